"""What a checkpoint is to hold, as of one moment: where every byte of it lies, without touching the bytes.

What lies in the swap files is held there (`storage.held`), so that training may go on and write elsewhere. What lies in
host memory only is a `MemorySource`, which whoever changes that memory saves first (`Saver.preserve`).

Nothing is converted. The shard of a group, and the fields of its records, become tensors of one file; the entries of
the parameters say which elements of them are theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from infinity.checkpoint.format import PARAMETER, ParameterEntry, Piece, group_file
from infinity.checkpoint.shard_file import MemorySource, Part, ShardFile, StoredSource
from infinity.checkpoint.tensor_file import refuse_dtype
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan, Slot
from infinity.optim.moments import BLOCK_NUMEL, SCALE
from infinity.optim.records import GroupState, Record
from infinity.runtime import Runtime

_PARAM = "param"


def capture_group(runtime: Runtime, group: FlatGroup, rank: int = 0) -> ShardFile:
    """What a rank saves of a group: its own span of the parameters, and the state that goes with it.

    Nothing of the group may be in flight.
    """
    return _Capture(runtime, group, rank).file()


class _Capture:
    def __init__(self, runtime: Runtime, group: FlatGroup, rank: int) -> None:
        self._runtime = runtime
        self._group = group
        self._file_name = group_file(group.index, rank)
        self._span = group.span_of(rank)
        self._state: GroupState | None = runtime.states.get(group.index)
        self._steps = list(self._state.steps) if self._state is not None else [0] * len(group.layout.slots)
        self._spans = self._cut()
        self._moments: Sequence[str] = runtime.kernel.moments
        self._rest = runtime.kernel.fields[0].name if runtime.kernel.completes_master else None
        self._scaled = {f.name.removesuffix(SCALE) for f in runtime.kernel.fields if f.name.endswith(SCALE)}

    def file(self) -> ShardFile:
        parts = [*self._param_parts(), *(part for record in self._records() for part in self._record_parts(record))]
        return ShardFile(self._file_name, parts, self._entries)

    def _records(self) -> Iterator[Record]:
        """The records that have been written; the others are as the kernel begins them."""
        if self._state is not None:
            yield from (record for record in self._state.records if record.is_initialised and record.nbytes)

    def _cut(self) -> list[tuple[FlatSpan, Record | None]]:
        """This rank's span, cut where records begin and end; without a record where it has not been written."""
        if self._state is None:
            return [(self._span, None)]
        return [
            (FlatSpan(record.chunk.start, record.chunk.stop), record if record.is_initialised else None)
            for record in self._state.records
        ]

    # Parts -----------------------------------------------------------------------------------------------------

    def _param_parts(self) -> Iterator[Part]:
        if self._rest == "master" and self._state is not None and all(r.is_initialised for r in self._state.records):
            return  # it is the rounded master
        group, copy = self._group, self._runtime.copies[self._group.index]
        refuse_dtype(group.key, group.shard_dtype)  # now: the file is laid out behind training
        size = group.shard_dtype.itemsize
        first, last = ((place - group.param_span.start) * size for place in (self._span.start, self._span.stop))
        source: StoredSource | MemorySource = StoredSource(group.key, first)
        if not copy.is_stored:
            source = MemorySource(group.key, copy.memory[first:last])
        yield Part(_PARAM, group.shard_dtype, self._span.numel, source)

    def _record_parts(self, record: Record) -> Iterator[Part]:
        offset = 0
        for f in record.fields:
            nbytes = f.stored_nbytes(record.chunk.numel)
            source: StoredSource | MemorySource = StoredSource(record.key, offset)
            if not record.is_stored and record.lease is not None:
                source = MemorySource(record.key, record.lease.memory[offset : offset + nbytes])
            yield Part(_state_part(record, f.name), f.dtype, nbytes // f.dtype.itemsize, source)
            offset += nbytes

    # Entries: made later, of what does not change any more ------------------------------------------------------

    def _entries(self) -> dict[str, ParameterEntry]:
        slots = self._group.layout.slots
        return {slot.name: self._entry(slot, step) for slot, step in zip(slots, self._steps, strict=True)}

    def _entry(self, slot: Slot, step: int) -> ParameterEntry:
        trains = self._group.trainable
        dtype = torch.float32 if trains else self._group.shard_dtype
        tensors = {PARAMETER: tuple(self._parameter_pieces(slot))}
        if step:
            tensors |= {moment: tuple(self._moment_pieces(slot, moment)) for moment in self._moments}
        return ParameterEntry(slot.shape, str(dtype).removeprefix("torch."), trains, step, tensors)

    def _parameter_pieces(self, slot: Slot) -> Iterator[Piece]:
        for span, record in self._spans:
            for start, numel, at in _overlap(slot, span):
                in_param = at + span.start - self._span.start
                if record is None or self._rest is None:
                    yield Piece(start, numel, self._file_name, _PARAM, in_param)
                elif self._rest == "master":
                    yield Piece(start, numel, self._file_name, _state_part(record, self._rest), at)
                else:
                    low = _state_part(record, self._rest)
                    yield Piece(start, numel, self._file_name, _PARAM, in_param, low, at)

    def _moment_pieces(self, slot: Slot, moment: str) -> Iterator[Piece]:
        for span, record in self._spans:
            if record is not None:
                for start, numel, at in _overlap(slot, span):
                    piece = Piece(start, numel, self._file_name, _state_part(record, moment), at)
                    if moment in self._scaled:
                        scales = _state_part(record, moment + SCALE)
                        piece = replace(piece, scales=scales, scales_at=at // BLOCK_NUMEL)
                    yield piece


def _state_part(record: Record, name: str) -> str:
    return f"state{record.chunk.index}/{name}"


def _overlap(slot: Slot, span: FlatSpan) -> Iterator[tuple[int, int, int]]:
    """The elements of a slot that lie in a span: first one in the slot, how many, first one in the span."""
    first, last = max(slot.offset, span.start), min(slot.stop, span.stop)
    if first < last:
        yield first - slot.offset, last - first, first - span.start
