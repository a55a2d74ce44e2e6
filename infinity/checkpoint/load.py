"""Loading: everything is checked first, then streamed group by group into the tiers, whatever their placement.

[Note: precisions meet in the master] What trains is in the checkpoint as its fp32 master. An fp32 engine stores it
unchanged, a bf16 engine splits it into two halves; both lose nothing, so going from one precision to the other and back
gives the same bits (NaNs become one NaN). What is frozen is converted to the dtype in which this engine keeps it, which
rounds when that is the narrower one, as when the model was offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from infinity.checkpoint.format import PARAMETER, Index, ParameterEntry, damaged, read_index, tensor_key
from infinity.checkpoint.parts import (
    check_buffers,
    check_files,
    check_settings,
    listed,
    load_buffers,
    read_extra,
    restore_settings,
)
from infinity.checkpoint.rng import restore_rng_state
from infinity.checkpoint.tensor_file import TensorFileReader
from infinity.checkpoint.tiers import CHECKPOINT_STEP, Span, Tiers, Values
from infinity.errors import CheckpointError
from infinity.groups import FlatGroup
from infinity.iteration import Iteration
from infinity.layout import Slot
from infinity.observe.stalls import StallCause
from infinity.optim.splitmaster import split_master
from infinity.runtime import Runtime
from infinity.updates import Updates


def load_checkpoint(
    runtime: Runtime, updates: Updates, iteration: Iteration, folder: Path, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Replace the whole state of an engine; see `Engine.load`."""
    index = read_index(folder)
    extra = _check(runtime, index, folder, optimizer)
    updates.settle("loading")
    iteration.reset()
    refuse_gathered(runtime)
    with updates.consistency.replacing(f"loading {folder}"):
        stand_still(runtime)
        with Tiers(runtime) as tiers, _Source(folder, index) as source:
            for group in runtime.groups:
                _load_group(runtime, tiers, group, source)
        load_buffers(runtime.model, folder)
        go_on(runtime)
    if optimizer is not None:
        restore_settings(index.optimizer, optimizer)
    restore_rng_state(index.rng)
    return extra


# Checks: nothing has been changed yet ------------------------------------------------------------------------------


def _check(
    runtime: Runtime, index: Index, folder: Path, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    wanted = {slot.name: (group, slot) for group in runtime.groups for slot in group.layout.slots}
    _check_names(folder, wanted.keys(), index)
    for name, (group, slot) in wanted.items():
        _check_parameter(folder, group, slot, index.parameters[name], runtime.kernel.moments)
    check_files(folder, index)
    check_buffers(runtime.model, folder, index)
    _check_tensors(folder, index)
    if optimizer is not None:
        check_settings(index.optimizer, optimizer, runtime.groups)
    return read_extra(folder)


def _check_names(folder: Path, wanted: Iterable[str], index: Index) -> None:
    names = set(wanted)
    missing, unknown = sorted(names - index.parameters.keys()), sorted(index.parameters.keys() - names)
    if missing or unknown:
        details = f"it lacks {listed(missing)}" if missing else ""
        details += " and " if missing and unknown else ""
        details += f"it has {listed(unknown)}, which the model does not have" if unknown else ""
        raise CheckpointError(f"{folder} belongs to another model: {details}; build the model it was saved from")


def _check_parameter(
    folder: Path, group: FlatGroup, slot: Slot, entry: ParameterEntry, moments: Sequence[str]
) -> None:
    if entry.shape != slot.shape:
        raise CheckpointError(
            f"{folder} belongs to another model: {slot.name!r} has shape {entry.shape} there and {slot.shape} here; "
            "build the model it was saved from"
        )
    dtype = getattr(torch, entry.dtype)
    if dtype is not group.shard_dtype and not (dtype.is_floating_point and group.shard_dtype.is_floating_point):
        raise CheckpointError(
            f"{folder}: {slot.name!r} is {entry.dtype} there and {group.shard_dtype} here, and only floating-point "
            "numbers are converted; build the model it was saved from"
        )
    kinds = {PARAMETER, *moments} if entry.step else {PARAMETER}
    if entry.checksums.keys() != kinds and group.trainable:
        raise CheckpointError(
            f"{folder} has {listed(sorted(entry.checksums.keys() - {PARAMETER})) or 'no state'} of {slot.name!r}, but "
            f"the optimizer here keeps {listed(moments) or 'none'}; build the optimizer that it was saved with"
        )
    if entry.step and not group.trainable:
        raise CheckpointError(
            f"{folder}: {slot.name!r} was trained there and is frozen here, so its optimizer state would be lost; "
            "freeze it after loading in a run of its own, or build the model as it was"
        )


def _check_tensors(folder: Path, index: Index) -> None:
    """Refuse files that do not hold what the index says they do."""
    by_file: dict[str, list[str]] = {}
    for name, entry in index.parameters.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        with TensorFileReader(folder / file) as reader:
            for name in names:
                entry = index.parameters[name]
                for kind in entry.checksums:
                    dtype = getattr(torch, entry.dtype) if kind == PARAMETER else torch.float32
                    span = reader.spans.get(tensor_key(kind, name))
                    if span is None or span.shape != entry.shape or span.dtype is not dtype:
                        raise damaged(folder / file, f"{kind} of {name!r} is not what the index says")


def refuse_gathered(runtime: Runtime) -> None:
    """Refuse to replace parameters that somebody holds."""
    resident = {group.index for group in runtime.resident_groups}
    runtime.gatherer.drop_ahead(runtime.groups)
    runtime.gatherer.release_unviewed()
    held = [group.key for group in runtime.gatherer.gathered() if group.index not in resident]
    if held:
        raise CheckpointError(
            f"{listed(held)} is in use, so it cannot be replaced; load outside a forward and outside `gathered()`"
        )


# Moving the bytes --------------------------------------------------------------------------------------------------


def stand_still(runtime: Runtime) -> None:
    """Host copies of what is about to change go, and nothing is read ahead until the next forward."""
    ticket = runtime.io.submit(runtime.read_ahead.forget(), "dropping host copies")
    runtime.stalls.wait(ticket, StallCause.NVME_READ)


def go_on(runtime: Runtime) -> None:
    """What is always there is read again: parameters on the device, and copies kept from step to step."""
    for group in runtime.resident_groups:
        runtime.gatherer.refresh(group)
    runtime.io.post(runtime.read_ahead.read_kept, CHECKPOINT_STEP)


class _Source:
    """The tensors of a checkpoint, piece by piece and in order; one file open at a time."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._parameters: Mapping[str, ParameterEntry] = index.parameters
        self._file = ""
        self._reader: TensorFileReader | None = None
        self._hashers: dict[str, xxhash.xxh3_64] = {}

    def entry(self, name: str) -> ParameterEntry:
        return self._parameters[name]

    def read(self, kind: str, slot: Slot, start: int, into: torch.Tensor) -> None:
        """Fill `into` with elements of a tensor from `start` on, converting; the whole tensor's checksum is checked."""
        entry = self._parameters[slot.name]
        dtype = getattr(torch, entry.dtype) if kind == PARAMETER else torch.float32
        piece = into if into.dtype is dtype else torch.empty(into.numel(), dtype=dtype)
        key = tensor_key(kind, slot.name)
        hasher = self._hashers.setdefault(key, xxhash.xxh3_64())
        hasher.update(self._open(entry.file).read(key, start, piece))
        if piece is not into:
            into.copy_(piece)
        if start + into.numel() == slot.numel:
            found = self._hashers.pop(key).hexdigest()
            if found != entry.checksums[kind]:
                raise damaged(self._folder / entry.file, f"the checksum of {kind} of {slot.name!r} is wrong")

    def _open(self, file: str) -> TensorFileReader:
        if self._reader is None or self._file != file:
            self.close()
            self._reader, self._file = TensorFileReader(self._folder / file), file
        return self._reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _load_group(runtime: Runtime, tiers: Tiers, group: FlatGroup, source: _Source) -> None:
    state = runtime.states.get(group.index)
    steps = [source.entry(slot.name).step for slot in group.layout.slots]
    for span in tiers.spans(group):
        values = tiers.blank(span)
        _fill(values, runtime.kernel.moments, steps, source)
        if span.record is not None:
            # State that is zero need not be written: records are born zero. Low halves are rarely all zero.
            used = any(steps[piece.slot] for piece in span.record.chunk.pieces)
            completes_master = len(runtime.kernel.fields) > len(runtime.kernel.moments)
            span.record.is_initialised = used or completes_master
        tiers.write(values, state=span.record is not None and span.record.is_initialised)
    if state is not None:
        state.steps[:] = steps


def _fill(values: Values, moments: Sequence[str], steps: list[int], source: _Source) -> None:
    span: Span = values.span
    low, whole = values.state.get("low"), values.state.get("master")
    # See [Note: precisions meet in the master].
    master = whole if whole is not None else values.param if low is None else torch.zeros(span.numel)
    with torch.no_grad():
        for number, first, last, start in span.pieces():
            slot = span.group.layout.slots[number]
            source.read(PARAMETER, slot, start, master[first:last])
            if steps[number]:
                for moment in moments:
                    source.read(moment, slot, start, values.state[moment][first:last])
        if low is not None:
            high, rest = split_master(master)
            values.param.copy_(high)
            low.copy_(rest)
        if whole is not None:
            values.param.copy_(whole)
