"""The layout of DeepSpeed's ZeRO checkpoints: which elements of which file belong to which parameter.

Stages 1 and 2: what trains is per parameter group one flat vector, cut into equal spans, one per rank, with padding at
its end; frozen parameters and buffers lie whole in `module`. Stage 3: every parameter is cut into equal spans, one per
rank, the last one padded, and a rank's spans lie one after another in the flat vectors of its sub-groups; frozen ones
likewise, each by itself, in `frozen_param_fragments`.

The files of rank *r* are `[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`, with the fp32 masters, and
`mp_rank_00_model_states.pt`, in stage 3 `zero_pp_rank_<r>_mp_rank_00_model_states.pt`. The tensors are memory-mapped:
only what is read is in memory.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import damaged, listed
from infinity.errors import CheckpointError
from infinity.weights.foreign_file import Inert, load_foreign_file
from infinity.weights.torch_file import precision_of, understanding

MOMENTS = ("exp_avg", "exp_avg_sq")
_LATEST = "latest"
_MODEL_FILES = "*_model_states.pt"
_OPTIMIZER_FILES = "*_optim_states.pt"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter: `tensor[at : at + numel]`, flat."""

    tensor: torch.Tensor
    at: int
    numel: int


@dataclass(frozen=True, slots=True)
class ZeroParameter:
    """One parameter.

    Attributes:
        runs: its elements, in order: by "parameter" and by the moments, which are absent for a frozen one.
    """

    name: str
    shape: tuple[int, ...]
    trains: bool
    step: int
    runs: Mapping[str, tuple[Run, ...]]


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """A ZeRO checkpoint, of which nothing but the layout has been read.

    Attributes:
        groups: per parameter group of the optimizer the names of its parameters, and its settings.
        client_state: what the training script saved beside.
        shared: other names of tied parameters, with the name under which each is stored.
    """

    folder: Path
    stage: int
    ranks: int
    precision: str
    step: int
    parameters: Sequence[ZeroParameter]
    groups: Sequence[tuple[list[str], dict[str, Any]]]
    buffers: Mapping[str, torch.Tensor]
    client_state: Mapping[str, Any]
    shared: Mapping[str, str]


def is_zero_checkpoint(path: Path) -> bool:
    """Whether a folder, or the one that its `latest` names, has files of such a checkpoint."""
    return path.is_dir() and any(_tag_folder(path).glob(_MODEL_FILES))


def open_zero_checkpoint(path: Path) -> ZeroCheckpoint:
    """Find out where everything lies.

    Args:
        path: the folder of one checkpoint, or one with the file `latest`.

    Raises:
        CheckpointError: files are missing or damaged, or it is of a kind that is not supported: model or pipeline
            parallel, experts in files of their own, without ZeRO.
    """
    folder = _tag_folder(path)
    models, optimizers = _ordered(folder, _MODEL_FILES), _ordered(folder, _OPTIMIZER_FILES)
    _refuse_parallel(folder, models, optimizers)
    states = [load_foreign_file(file, ("deepspeed",)) for file in models]
    shards = [_optimizer_state(file) for file in optimizers]
    with understanding(folder, "a ZeRO checkpoint"):
        return _laid_out(folder, states, shards, optimizers[0])


def _laid_out(
    folder: Path, states: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], first: Path
) -> ZeroCheckpoint:
    stage = _stage_of(shards[0], first)
    ranks = _ranks_of(shards[0])
    if len(shards) != ranks or (stage == 3 and len(states) != ranks):
        raise CheckpointError(
            f"{folder} was saved by {ranks} ranks, but has files of {len(shards)} ({_OPTIMIZER_FILES})"
            + (f" and {len(states)} ({_MODEL_FILES})" if stage == 3 else "")
            + "; copy the files of every rank into one folder"
        )
    layout: _Flat | _Partitioned = _Partitioned(folder, states, shards) if stage == 3 else _Flat(folder, states, shards)
    model = states[0]
    buffers = {name: model["module"][name] for name in model.get("buffer_names") or () if name in model["module"]}
    return ZeroCheckpoint(
        folder=folder,
        stage=stage,
        ranks=ranks,
        precision=_precision_of(model),
        step=layout.step,
        parameters=[*layout.trained(), *layout.frozen(buffers)],
        groups=layout.groups(),
        buffers=buffers,
        client_state={k: v for k, v in model.items() if k not in _KNOWN},
        shared={str(k): str(v) for k, v in _pairs(model.get("shared_params"))},
    )


# What DeepSpeed itself puts beside the model; anything else is the training script's.
_KNOWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "ds_config"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version"),
        "checkpoint_parallel_dimensions",
    )
)


class _Layout(ABC):
    """What the stages have in common.

    Args:
        states: of the model, per rank that has some.
        shards: of the optimizer, per rank.
    """

    masters_key: str

    def __init__(
        self, folder: Path, states: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]
    ) -> None:
        self._folder = folder
        self._states = states
        self._shards = shards
        self._shapes: list[dict[str, tuple[int, ...]]] = [
            {str(name): tuple(int(n) for n in shape) for name, shape in group.items()}
            for group in _listed(states[0]["param_shapes"])
        ]
        self._masters = [_tensors(folder, shard, self.masters_key) for shard in shards]
        self._moments = [self._moments_of(shard) for shard in shards]
        self.step = max((self._step(number) for number in range(len(self._masters[0]))), default=0)

    @abstractmethod
    def _base(self, shard: Mapping[str, Any]) -> Any:
        """What a rank's file holds of the optimizer itself."""

    def _moments_of(self, shard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The state of every flat tensor, in order."""
        base = self._base(shard)
        if isinstance(base, Mapping):
            state = base.get("state", {})
            return [state.get(number, {}) for number in range(len(_tensors(self._folder, shard, self.masters_key)))]
        return [dict(one) for one in base or ()]

    def _step(self, number: int) -> int:
        """How often the flat tensor of this number has been updated."""
        base = self._base(self._shards[0])
        state = self._moments[0][number] if number < len(self._moments[0]) else {}
        groups = base.get("param_groups", []) if isinstance(base, Mapping) else []
        of_group = next((g.get("step") for g in groups if number in _listed(g.get("params"))), None)
        found = state.get("step", of_group)
        if found is None:
            found = self._shards[0].get("base_optimizer_state_step")
        if found is None:
            found = self._states[0].get("global_steps", 0) - self._states[0].get("skipped_steps", 0)
        return int(found) if all(moment in state for moment in MOMENTS) else 0

    def _settings(self) -> list[dict[str, Any]]:
        base = self._base(self._shards[0])
        return [dict(group) for group in base.get("param_groups", [])] if isinstance(base, Mapping) else []


class _Flat(_Layout):
    """Stages 1 and 2."""

    masters_key = "single_partition_of_fp32_groups"

    def _base(self, shard: Mapping[str, Any]) -> Any:
        return shard.get("base_optimizer_state")

    def trained(self) -> list[ZeroParameter]:
        found = []
        paddings = self._shards[0].get("param_alignment_paddings")
        for number, shapes in enumerate(self._shapes):
            step, offset = self._step(number), 0
            for place, (name, shape) in enumerate(shapes.items()):
                numel = math.prod(shape)
                runs = {"parameter": self._cut(number, "parameter", offset, numel, name)}
                if step:
                    runs |= {moment: self._cut(number, moment, offset, numel, name) for moment in MOMENTS}
                found.append(ZeroParameter(name, shape, True, step, runs))
                offset += numel + (int(paddings[number][place]) if paddings else 0)
        return found

    def _cut(self, number: int, kind: str, start: int, numel: int, name: str) -> tuple[Run, ...]:
        """Where elements of the vector of a parameter group lie: the spans of the ranks are one after another."""
        runs, first, stop = [], 0, start + numel
        for rank in range(len(self._shards)):
            master = self._masters[rank][number]
            tensor = master if kind == "parameter" else self._moments[rank][number][kind]
            low, high = max(start, first), min(stop, first + master.numel())
            if low < high:
                if high - first > tensor.numel():
                    break
                runs.append(Run(tensor, low - first, high - low))
            first += master.numel()
        if sum(run.numel for run in runs) != numel:
            raise damaged(self._folder, f"{kind} of {name!r} lacks elements: the vector of its group is too short")
        return tuple(runs)

    def frozen(self, buffers: Mapping[str, torch.Tensor]) -> list[ZeroParameter]:
        state = self._states[0]
        fragments = state.get("frozen_param_fragments") or {}
        known = {name for shapes in self._shapes for name in shapes} | {*buffers, *fragments}
        known |= {alias for alias, _ in _pairs(state.get("shared_params"))}
        whole = {name: tensor for name, tensor in state["module"].items() if name not in known}
        return [
            ZeroParameter(name, tuple(t.shape), False, 0, {"parameter": (Run(t, 0, t.numel()),)})
            for name, t in {**whole, **fragments}.items()
            if isinstance(t, torch.Tensor)
        ]

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        settings = self._settings()
        return [(list(shapes), one) for shapes, one in zip(self._shapes, settings, strict=False)]


class _Partitioned(_Layout):
    """Stage 3."""

    masters_key = "fp32_flat_groups"

    def _base(self, shard: Mapping[str, Any]) -> Any:
        return shard.get("optimizer_state_dict")

    def trained(self) -> list[ZeroParameter]:
        found = []
        # One after another through all sub-groups: versions differ in whether shapes are listed by sub-group.
        place, offset = 0, 0
        for name, shape in ((n, s) for shapes in self._shapes for n, s in shapes.items()):
            numel = math.prod(shape)
            share = -(-numel // len(self._shards))
            while place < len(self._masters[0]) and offset + share > self._masters[0][place].numel():
                place, offset = place + 1, 0
            if place == len(self._masters[0]):
                raise damaged(self._folder, f"{name!r} lacks elements: the flat groups are too short")
            step = self._step(place)
            runs = {"parameter": self._cut(place, "parameter", offset, numel, share)}
            if step:
                runs |= {moment: self._cut(place, moment, offset, numel, share) for moment in MOMENTS}
            found.append(ZeroParameter(name, shape, True, step, runs))
            offset += share
        return found

    def _cut(self, place: int, kind: str, offset: int, numel: int, share: int) -> tuple[Run, ...]:
        runs = []
        for rank in range(len(self._shards)):
            tensor = self._masters[rank][place] if kind == "parameter" else self._moments[rank][place][kind]
            count = min(share, numel - rank * share)
            if count > 0:
                if offset + count > tensor.numel():
                    raise damaged(self._folder, f"{kind} in flat group {place} of rank {rank} is too short")
                runs.append(Run(tensor, offset, count))
        return tuple(runs)

    def frozen(self, buffers: Mapping[str, torch.Tensor]) -> list[ZeroParameter]:
        found = []
        for name, given in (self._states[0].get("frozen_param_shapes") or {}).items():
            shape = tuple(int(n) for n in given)
            runs, left = [], math.prod(shape)
            for state in self._states:
                fragment = state["frozen_param_fragments"][name]
                runs.append(Run(fragment, 0, min(fragment.numel(), left)))
                left -= runs[-1].numel
            if left:
                raise damaged(self._folder, f"{name!r} lacks {left} elements")
            found.append(ZeroParameter(str(name), shape, False, 0, {"parameter": tuple(r for r in runs if r.numel)}))
        return found

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        settings = self._settings()
        if len(settings) == 1:
            return [([name for shapes in self._shapes for name in shapes], settings[0])]
        if len(self._shapes) != len(self._masters[0]):
            return []  # which sub-group is of which parameter group cannot be told
        return [
            ([name for sub_group in _listed(one.get("params")) for name in self._shapes[sub_group]], one)
            for one in settings
        ]


# Files -------------------------------------------------------------------------------------------------------------


def _tag_folder(path: Path) -> Path:
    latest = path / _LATEST
    if latest.is_file() and not any(path.glob(_MODEL_FILES)):
        try:
            return path / latest.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise damaged(latest, f"it does not name a folder ({error})") from error
    return path


def _ordered(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    if not found:
        raise CheckpointError(f"{folder} is no ZeRO checkpoint of DeepSpeed: it has no {pattern}; check the path")
    return found


def _refuse_parallel(folder: Path, models: Sequence[Path], optimizers: Sequence[Path]) -> None:
    parallel = [path.name for path in (*models, *optimizers) if "mp_rank_00" not in path.name]
    experts = [path.name for path in folder.glob("*expert*")]
    layers = [path.name for path in folder.glob("layer_*")]
    for names, what in ((experts, "experts"), (parallel, "tensor parallelism"), (layers, "pipeline parallelism")):
        if names:
            raise CheckpointError(
                f"{folder} was saved with {what} ({listed(names, 2)}), which is not supported; convert it with "
                "DeepSpeed's ds_to_universal.py and export the weights from there"
            )


def _optimizer_state(path: Path) -> Mapping[str, Any]:
    content = load_foreign_file(path, ("deepspeed",))
    state = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or "zero_stage" not in state:
        raise CheckpointError(f"{path} has no state of ZeRO's optimizer; only checkpoints of stages 1 to 3 are read")
    return state


def _stage_of(state: Mapping[str, Any], path: Path) -> int:
    given = state["zero_stage"]
    stage = int(given.args[0]) if isinstance(given, Inert) else int(given)
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{path} is of ZeRO stage {stage}; only checkpoints of stages 1 to 3 are read")
    return stage


def _ranks_of(state: Mapping[str, Any]) -> int:
    count = state["partition_count"]
    return max(count) if isinstance(count, list | tuple) else int(count)


def _precision_of(model: Mapping[str, Any]) -> str:
    config = model.get("ds_config") or {}
    for name in ("bf16", "fp16"):
        if (config.get(name) or {}).get("enabled"):
            return name
    held = [t for t in model["module"].values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return precision_of(held)


def _tensors(folder: Path, shard: Mapping[str, Any], key: str) -> list[torch.Tensor]:
    found = list(shard.get(key) or ())
    if not found or not all(isinstance(tensor, torch.Tensor) for tensor in found):
        raise CheckpointError(
            f"{folder} does not hold the fp32 masters ({key}), as when they were in NVMe while it was saved; save it "
            "with the optimizer's state in memory"
        )
    return found


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    return list(given.items()) if isinstance(given, Mapping) else [(a, b) for a, b in given or ()]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given] if given else []
