"""From checkpoints of others to one of infinity, streamed: parameters, optimizer state, settings and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import EXTRA_FILE, PARAMETER, OptimizerEntry
from infinity.checkpoint.parts import pack_extra
from infinity.checkpoint.writer import Fill, NewParameter, NewRest, NewTensor, write_checkpoint
from infinity.errors import CheckpointError
from infinity.weights.torch_file import flat_part
from infinity.weights.torch_optimizer import TorchRun, read_torch_run
from infinity.weights.zero_checkpoint import MOMENTS, Run, ZeroCheckpoint, is_zero_checkpoint, open_zero_checkpoint
from storage.paths import StrPath

# Settings that optimizers of infinity have too; the others say how torch computes, not what.
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "maximize")

OnFile = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """What was taken over.

    Attributes:
        kind: what it came from, in words.
        aliases: other names of tied parameters, with the names under which they are kept.
        left_out: what could not be kept, in words.
    """

    kind: str
    step: int
    parameters: int
    numel: int
    groups: int
    aliases: Mapping[str, str]
    left_out: tuple[str, ...]


def import_checkpoint(
    source: StrPath,
    target: StrPath,
    *,
    optimizer: StrPath | None = None,
    names: Sequence[str] | None = None,
    on_file: OnFile | None = None,
) -> Imported:
    """Make a checkpoint of infinity from one of DeepSpeed (ZeRO, stages 1 to 3) or from files of `torch.save`.

    Args:
        source: a folder of DeepSpeed, or a file with a model's `state_dict()`, alone or with the optimizer's beside it.
        target: the folder to make.
        optimizer: a file with the `state_dict()` of `torch.optim.AdamW`.
        names: the parameters in the order in which the optimizer has them, where they cannot be told otherwise.
        on_file: told every file that is written, and its bytes of tensors.

    Raises:
        CheckpointError: it is of no known kind, damaged, or does not fit together; `target` cannot be written.
    """
    source, target = Path(source), Path(target)
    if is_zero_checkpoint(source):
        return _import_zero(open_zero_checkpoint(source), target, on_file)
    if source.is_dir():
        raise CheckpointError(f"{source} is no ZeRO checkpoint of DeepSpeed: there are no *_model_states.pt in it")
    return _import_torch(read_torch_run(source, None if optimizer is None else Path(optimizer), names), target, on_file)


# DeepSpeed ---------------------------------------------------------------------------------------------------------


def _import_zero(zero: ZeroCheckpoint, target: Path, on_file: OnFile | None) -> Imported:
    parameters = [
        NewParameter(
            one.name,
            one.shape,
            one.trains,
            one.step,
            {kind: NewTensor(_stored_dtype(runs, one.trains), _from_runs(runs)) for kind, runs in one.runs.items()},
        )
        for one in zero.parameters
    ]
    left_out = []
    extra: dict[str, Any] = {"global_step": zero.step, "client_state": dict(zero.client_state)}
    try:
        packed = _pack(extra)
    except CheckpointError as error:
        left_out.append(f"the client state ({error})")
        packed = _pack({"global_step": zero.step})
    if not zero.groups:
        left_out.append("the settings of the parameter groups, which do not say whose they are")
    left_out.append("learning rate schedule, loss scale and random number generators")
    rest = NewRest(
        step=zero.step,
        precision=zero.precision,
        optimizer=_entries(zero.groups),
        rng=[],
        buffers={name: buffer.contiguous() for name, buffer in zero.buffers.items()},
        small={EXTRA_FILE: packed},
        aliases=zero.shared,
    )
    write_checkpoint(target, parameters, rest, on_file=on_file)
    kind = f"ZeRO stage {zero.stage} of {zero.ranks} rank{'s' * (zero.ranks > 1)}, {zero.precision}"
    return _told(kind, zero.step, parameters, zero.groups, zero.shared, left_out)


def _stored_dtype(runs: Sequence[Run], trains: bool) -> torch.dtype:
    return torch.float32 if trains or not runs else runs[0].tensor.dtype


def _from_runs(runs: Sequence[Run]) -> Fill:
    def fill(start: int, into: torch.Tensor) -> None:
        position, stop = 0, start + into.numel()
        for run in runs:
            first, last = max(start, position), min(stop, position + run.numel)
            if first < last:
                part = flat_part(run.tensor, run.at + first - position, last - first)
                into[first - start : last - start].copy_(part)
            position += run.numel

    return fill


# torch.save --------------------------------------------------------------------------------------------------------


def _import_torch(run: TorchRun, target: Path, on_file: OnFile | None) -> Imported:
    parameters = []
    for name, tensor in run.parameters.items():
        state = run.states.get(name)
        trains = name in run.trained
        tensors = {PARAMETER: _whole(tensor, torch.float32 if trains else tensor.dtype)}
        if state is not None:
            tensors |= {moment: _whole(state.moments[moment], torch.float32) for moment in MOMENTS}
        parameters.append(
            NewParameter(name, tuple(tensor.shape), trains, state.step if state is not None else 0, tensors)
        )
    step = max((state.step for state in run.states.values()), default=0)
    rest = NewRest(
        step=step,
        precision=run.precision,
        optimizer=_entries(run.groups) if run.groups else None,
        rng=[],
        buffers={name: buffer.contiguous() for name, buffer in run.buffers.items()},
        small={EXTRA_FILE: _pack({})},
        aliases=run.aliases,
    )
    write_checkpoint(target, parameters, rest, on_file=on_file)
    left_out = ["random number generators"] + ([] if run.groups else ["there was no optimizer"])
    kind = "torch.save" + (" with AdamW" if run.groups else "")
    return _told(kind, step, parameters, run.groups, run.aliases, left_out)


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> NewTensor:
    return NewTensor(dtype, _from_runs((Run(tensor, 0, tensor.numel()),)))


# Both --------------------------------------------------------------------------------------------------------------


def _entries(groups: Sequence[tuple[list[str], dict[str, Any]]]) -> list[OptimizerEntry] | None:
    kept = [OptimizerEntry(names, {k: _plain(s[k]) for k in _SETTINGS if k in s}) for names, s in groups]
    return kept or None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _pack(extra: Mapping[str, Any]) -> bytes:
    return pack_extra({"extra": dict(extra), "scheduler": None, "scaler": None})


def _told(
    kind: str,
    step: int,
    parameters: Sequence[NewParameter],
    groups: Sequence[object],
    aliases: Mapping[str, str],
    left_out: Sequence[str],
) -> Imported:
    numel = sum(math.prod(parameter.shape) for parameter in parameters)
    return Imported(kind, step, len(parameters), numel, len(groups), aliases, tuple(left_out))
