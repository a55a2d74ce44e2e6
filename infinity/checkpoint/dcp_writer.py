"""Checkpoints that `torch.distributed.checkpoint` writes out of plain modules, for `Engine.load`.

    dcp.save({"model": model.state_dict()}, storage_writer=InfinityWriter("run/step100", model))
    dcp.save({"model": m, "optim": o}, storage_writer=InfinityWriter("run/step100", model))    # of get_state_dict(...)

Every rank writes the parts of DTensors that it holds. Names under `model.` (or without a prefix) are parameters and
buffers, `optim.` is what torch's `get_state_dict` gives for an optimizer; all else becomes `extra`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from infinity.checkpoint.dcp_reader import GROUPS, MODEL, STATE
from infinity.checkpoint.description import describe_model
from infinity.checkpoint.folder import made_for, replaced_folder
from infinity.checkpoint.format import (
    INDEX_FILE,
    PARAMETER,
    FileEntry,
    OptimizerEntry,
    ParameterEntry,
    Piece,
    group_file,
    merged,
)
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.parts import pack_extra, persistent_buffers, plain_setting
from infinity.checkpoint.rng import rng_state
from infinity.checkpoint.save import Small, finish_folder
from infinity.checkpoint.tensor_file import bytes_of
from infinity.errors import CheckpointError
from storage.paths import StrPath

_ALIAS = "alias"


@dataclass(frozen=True, slots=True)
class _Written:
    """What one rank tells the one that writes the index."""

    entries: dict[str, ParameterEntry]
    files: dict[str, FileEntry]
    buffers: dict[str, torch.Tensor]
    steps: dict[str, int]
    settings: dict[str, Any]
    extra: dict[str, Any]


class InfinityWriter(StorageWriter):
    """Writes a checkpoint that `Engine.load` reads, in which what trains is fp32, whatever it is here.

    Args:
        path: the folder, on a file system that all ranks see; it appears when it is complete.
        model: the module whose state it is; says which names are buffers and which parameters train.

    Raises:
        CheckpointError: the folder cannot be written, or a tensor is sharded along another dimension than its first.
    """

    def __init__(self, path: StrPath, model: nn.Module) -> None:
        self._path = Path(path).absolute()
        self._model = model
        self._parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._aliases = {name: names[id(parameter)] for name, parameter in every if name not in self._parameters}
        self._buffers = set(persistent_buffers(model))
        self._stack = ExitStack()

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called by torch before every save; gives up one that did not end."""
        self.close()
        if checkpoint_id:
            self._path = Path(checkpoint_id).absolute()

    def close(self) -> None:
        """Give up a save that did not end: nothing is left of it, and what was there before stays. Idempotent."""
        stack, self._stack = self._stack, ExitStack()
        failure = CheckpointError(f"saving {self._path} did not end")
        stack.__exit__(CheckpointError, failure, None)

    def set_up_storage_writer(self, is_coordinator: bool, *unused: Any, **more: Any) -> None:
        """Nothing is made before all ranks have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the rank that coordinates: make the folder, and number the ranks."""
        made = self._stack.enter_context(replaced_folder(self._path, lambda there: (there / INDEX_FILE).exists()))
        return [replace(plan, storage_data=(str(made), rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank holds."""
        folder, rank = plan.storage_data
        written = self._write(Path(folder), rank, list(plan.items), planner)
        done: Future[list[WriteResult]] = Future()
        nothing = [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        if nothing:
            nothing[0] = replace(nothing[0], storage_data=written)
        done.set_result(nothing)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the rank that coordinates: write the index and put the folder in its place."""
        try:
            self._finish(results)
        except BaseException:
            self.close()
            raise
        self._stack.close()

    def _finish(self, results: list[list[WriteResult]]) -> None:
        told = [one.storage_data for rank in results for one in rank if one.storage_data is not None]
        steps = {name: step for one in told for name, step in one.steps.items()}
        entries = merged([one.entries for one in told])
        for name, entry in entries.items():
            if set(entry.tensors) - {PARAMETER} and not steps.get(name):
                raise CheckpointError(f"the optimizer's state of {name!r} has no step; save what get_state_dict gives")
            entries[name] = replace(entry, step=steps.get(name, 0) if len(entry.tensors) > 1 else 0)
        missing = self._parameters.keys() - entries.keys()
        if missing:
            raise CheckpointError(f"{sorted(missing)[0]!r} is a parameter of the model, but its values were not given")
        groups = _groups({name: value for one in told for name, value in one.settings.items()})
        extra = {name: value for one in told for name, value in one.extra.items()}
        small = Small(
            packed=pack_extra({"extra": extra, "scheduler": None, "scaler": None}),
            buffers={name: tensor for one in told for name, tensor in one.buffers.items()},
            optimizer=groups,
            rng=[rng_state()],
            step=max(steps.values(), default=0),
            precision="fp32",
            descriptions=describe_model(self._model),
            aliases=self._aliases,
        )
        finish_folder(self._folder(), small, entries, {name: file for one in told for name, file in one.files.items()})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    # Parts -----------------------------------------------------------------------------------------------------

    def _folder(self) -> Path:
        return made_for(self._path)

    def _write(self, folder: Path, rank: int, items: Sequence[WriteItem], planner: SavePlanner) -> _Written:
        written = _Written({}, {}, {}, {}, {}, {})
        tensors: list[tuple[str, str, WriteItem]] = []
        for item in items:
            name = item.index.fqn
            if item.type is WriteItemType.BYTE_IO or name.startswith(GROUPS):
                value = planner.resolve_data(item)
                value = value if isinstance(value, torch.Tensor) else _unpacked(name, value)
                (written.settings if name.startswith(GROUPS) else written.extra)[name] = value
                continue
            owner, kind = self._place(name)
            if kind == "step":
                written.steps[owner] = int(planner.resolve_data(item))  # type: ignore[arg-type]
            elif kind == _ALIAS:  # what it stands for has the values
                continue
            elif kind == "buffer":
                written.buffers[owner] = _tensor(planner, item)
            elif kind:
                tensors.append((owner, kind, item))
            else:
                written.extra[name] = _tensor(planner, item)
        self._write_tensors(written, folder, rank, tensors, planner)
        return written

    def _place(self, name: str) -> tuple[str, str]:
        """Whose a tensor is, and what of it; "" for neither a parameter nor a buffer nor state of one."""
        if name.startswith(STATE):
            owner, _, kind = name.removeprefix(STATE).rpartition(".")
            return owner, kind if owner in self._parameters else ""
        own = name.removeprefix(MODEL)
        if own in self._aliases:
            return own, _ALIAS
        return own, PARAMETER if own in self._parameters else "buffer" if own in self._buffers else ""

    def _write_tensors(
        self,
        written: _Written,
        folder: Path,
        rank: int,
        tensors: Iterable[tuple[str, str, WriteItem]],
        planner: SavePlanner,
    ) -> None:
        chosen = {f"{kind}/{owner}/{_first(item, owner)}": (owner, kind, item) for owner, kind, item in tensors}
        if not chosen:
            return
        name = group_file(0, rank)
        parts = {
            part: (item.tensor_data.properties.dtype, (math.prod(item.tensor_data.chunk.sizes),))
            for part, (_, _, item) in chosen.items()
            if item.tensor_data is not None
        }
        writer = PartFileWriter(folder / name, parts)
        found = []
        for part, (owner, kind, item) in chosen.items():
            values = _tensor(planner, item).reshape(-1)
            writer.write(part, bytes_of(values))
            parameter = self._parameters[owner]
            trains = parameter.requires_grad and parameter.dtype.is_floating_point
            dtype = str(torch.float32 if trains else parameter.dtype).removeprefix("torch.")
            pieces = (Piece(_first(item, owner), values.numel(), name, part, 0),) if values.numel() else ()
            found.append({owner: ParameterEntry(tuple(parameter.shape), dtype, trains, 0, {kind: pieces})})
        written.entries.update(merged(found))
        written.files[name] = writer.finish()


def _first(item: WriteItem, owner: str) -> int:
    """The first element of the flattened tensor that an item holds.

    Raises:
        CheckpointError: it holds no whole rows.
    """
    if item.tensor_data is None:
        return 0
    size, offsets, sizes = item.tensor_data.size, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
    if any(offsets[1:]) or list(sizes[1:]) != list(size[1:]):
        raise CheckpointError(
            f"{owner!r} is sharded along another dimension than its first, which a checkpoint cannot hold; shard the "
            "first, or gather it"
        )
    return offsets[0] * math.prod(size[1:]) if offsets else 0


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{item.index.fqn!r} was planned as a tensor and is {type(value).__name__}")
    return value.detach().cpu().contiguous()


def _unpacked(name: str, value: object) -> Any:
    if not isinstance(value, io.BytesIO):
        raise CheckpointError(f"{name!r} was planned as bytes and is {type(value).__name__}")
    value.seek(0)
    return torch.load(value, weights_only=True)


def _groups(settings: dict[str, Any]) -> list[OptimizerEntry] | None:
    """The optimizer's parameter groups from their settings, by the names that torch gives them."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in settings.items():
        number, _, key = name.removeprefix(GROUPS).partition(".")
        found.setdefault(int(number), {})[key] = value
    return [
        OptimizerEntry(
            list(group["params"]), {key: plain_setting(key, value) for key, value in group.items() if key != "params"}
        )
        for _, group in sorted(found.items())
    ] or None
