"""The stored state of an engine, span by span: what saving reads and loading writes.

For a span of a shard it gives tensors over its parameters and its optimizer state, wherever they lie: in place where
they are in host memory for good, else in one buffer that is read from and written to the swap files. The buffer takes
the place of the update pipeline, which has nothing to do meanwhile, so host memory stays within its budget.

Only while no update and no write is under way: then the swap file, or the memory of what is placed in host memory,
holds the newest bytes of everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from infinity.groups import FlatGroup
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.observe.stalls import StallCause
from infinity.optim.hyper import most_nbytes_per_element
from infinity.optim.records import Record
from infinity.runtime import Runtime
from storage.align import PAGE_NBYTES, align_down, align_up
from storage.closing import Closing
from storage.pool import HostPool, Lease
from storage.store import ShardStore
from storage.types import Priority, Ticket, TrafficTag

CHECKPOINT_STEP = -2  # the step that traffic of saving and loading belongs to
_TARGET_NUMEL = 512 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of a group's shard, within one record if the group has any."""

    group: FlatGroup
    start: int
    stop: int
    record: Record | None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """For every slot in the span: its number, first and last element in the span, first element in the slot."""
        for number, slot in enumerate(self.group.layout.slots):
            first, last = max(slot.offset, self.start), min(slot.stop, self.stop)
            if first < last:
                yield number, first - self.start, last - self.start, first - slot.offset


@dataclass(frozen=True, slots=True)
class _Swapped:
    """Which bytes of the swap file, and the buffer for them."""

    key: str
    offset: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a span. `is_in_place`: it is host memory that is the value; else a buffer for what is `swapped`.

    `swapped` is None where the swap files do not hold it; `name` is that of the field of state.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    swapped: _Swapped | None = None
    is_in_place: bool = False


class _Carver:
    """Hands out a buffer from its beginning."""

    def __init__(self, memory: memoryview) -> None:
        self._left = memory

    def take(self, nbytes: int) -> memoryview:
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken


@dataclass(frozen=True, slots=True)
class Values:
    """The tensors of a span, 1-D and as long as it: the parameters as they are stored, and the fields of the state."""

    span: Span
    param: torch.Tensor
    state: dict[str, torch.Tensor]
    _parts: tuple[_Part, ...]


class Tiers(Closing):
    """Reads and writes spans. A context manager; used by the training thread, one span at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held = ExitStack()
        self._numel, self._lease = self._take_buffer()

    def spans(self, group: FlatGroup) -> Iterator[Span]:
        """The spans of a group, in order: of what this rank updates, or, of a frozen one, of all that it holds."""
        state = self._runtime.states.get(group.index)
        if state is None:
            yield from _cut(group, group.param_span.start, group.param_span.stop, self._numel, None)
            return
        for record in state.records:
            # What blocks of elements share (a scale) can be read and written for whole records only.
            is_cut = all(f.block_numel == 1 for f in record.fields)
            numel = self._numel if is_cut else record.chunk.numel
            yield from _cut(group, record.chunk.start, record.chunk.stop, numel, record)

    def copied_spans(self, group: FlatGroup) -> Iterator[Span]:
        """The spans of a group that trains of which this rank holds the parameters while others update them."""
        if group.index in self._runtime.states:
            yield from _cut(group, group.param_span.start, group.state_span.start, self._numel, None)
            yield from _cut(group, group.state_span.stop, group.param_span.stop, self._numel, None)

    def read(self, span: Span, *, param: bool = True, fields: Collection[str] | None = None) -> Values:
        """The present values; valid until the next span. State that was never updated is as the kernel begins it.

        Args:
            param: read the parameters too; else their bytes are undefined where they are not in place.
            fields: of the state, which to read; None for all. The others are undefined where they are not in place.
        """
        values = self._values(span)
        is_born = span.record is not None and span.record.is_initialised
        wanted = {"state": is_born, "param": param or (not is_born and "master" in values.state)}
        tickets = []
        for part in values._parts:
            if part.kind == "state" and fields is not None and part.name not in fields:
                continue
            if part.swapped is not None and not part.is_in_place and wanted[part.kind]:
                at, tag = part.swapped, TrafficTag(part.kind, CHECKPOINT_STEP)
                tickets.append(
                    self._store.submit_read(at.key, at.memory, offset=at.offset, priority=Priority.DEMAND, tag=tag)
                )
        self._wait(tickets, StallCause.NVME_READ)
        if span.record is not None and not is_born:
            self._runtime.kernel.begin(values.param, list(values.state.values()))
        return values

    def blank(self, span: Span) -> Values:
        """Tensors to fill with new values, zero at first; the old values are gone or will be with `write`."""
        values = self._values(span)
        for part in values._parts:
            part.tensor.zero_()
        return values

    def write(self, values: Values, *, param: bool = True, state: bool = True) -> None:
        """Make the tensors the stored values. Host copies that the read-ahead holds become stale."""
        wanted = {"param": param, "state": state}
        self._runtime.before_replacing()
        tickets = []
        for part in values._parts:
            if part.swapped is not None and wanted[part.kind]:
                at, tag = part.swapped, TrafficTag(part.kind, CHECKPOINT_STEP)
                tickets.append(self._store.submit_write(at.key, at.memory, offset=at.offset, tag=tag))
        self._wait(tickets, StallCause.NVME_WRITE)

    def close(self) -> None:
        self._held.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _take_buffer(self) -> tuple[int, Lease]:
        runtime = self._runtime
        fields = most_nbytes_per_element(runtime.kernel.fields)
        per_element = max(g.shard_dtype.itemsize + (fields if g.trainable else 0) for g in runtime.groups)
        budget = runtime.budgets["pipeline"]
        most = max(group.layout.numel for group in runtime.groups)
        target = _TARGET_NUMEL
        if any(f.block_numel > 1 for f in runtime.kernel.fields):  # whole records, see `spans`
            target = max(r.chunk.numel for state in runtime.states.values() for r in state.records)
        numel = min(target, most, align_down(budget.limit_nbytes // per_element, SHARD_ALIGN_NUMEL))
        if numel > 0:
            reservation = self._held.enter_context(budget.request(numel * per_element, "checkpoint"))
            runtime.stalls.wait(reservation, StallCause.OPTIMIZER)
            return numel, self._held.enter_context(runtime.pool.lease(numel * per_element, "checkpoint"))
        # Nothing that streams trains, so there is no pipeline: a buffer of a few pages beside the budget.
        pool = HostPool(SHARD_ALIGN_NUMEL * per_element)
        self._held.callback(pool.close)
        lease = self._held.enter_context(pool.lease(SHARD_ALIGN_NUMEL * per_element, "checkpoint"))
        return SHARD_ALIGN_NUMEL, lease

    def _values(self, span: Span) -> Values:
        left = _Carver(self._lease.memory)
        param = self._param(span, left)
        if span.record is None:
            return Values(span, param.tensor, {}, (param,))
        state = self._state(span, span.record, left)
        return Values(span, param.tensor, {name: part.tensor for name, part in state.items()}, (param, *state.values()))

    def _param(self, span: Span, left: _Carver) -> _Part:
        copy, dtype = self._runtime.copies[span.group.index], span.group.shard_dtype
        first, last = (place - span.group.param_span.start for place in (span.start, span.stop))
        offset = first * dtype.itemsize
        if copy.pinned:
            memory = copy.memory[offset : last * dtype.itemsize]
            stored = _Swapped(span.group.key, offset, memory) if copy.is_stored else None
            return _Part("param", "", copy.tensor[first:last], stored, is_in_place=True)
        return _in_buffer("param", "", span.numel, dtype, left, span.group.key, offset)

    def _state(self, span: Span, record: Record, left: _Carver) -> dict[str, _Part]:
        first = span.start - record.chunk.start
        in_place = record.views(record.lease.memory) if record.lease is not None else None
        parts = {}
        field_offset = 0
        for number, f in enumerate(record.fields):
            at, numel = f.numel(first), f.numel(span.numel)
            offset = field_offset + at * f.dtype.itemsize
            if in_place is not None and record.lease is not None:
                memory = record.lease.memory[offset : offset + align_up(numel * f.dtype.itemsize, PAGE_NBYTES)]
                stored = _Swapped(record.key, offset, memory) if record.is_stored else None
                values = in_place[number][at : at + numel]
                parts[f.name] = _Part("state", f.name, values, stored, is_in_place=True)
            else:
                parts[f.name] = _in_buffer("state", f.name, numel, f.dtype, left, record.key, offset)
            field_offset += f.stored_nbytes(record.chunk.numel)
        return parts

    @property
    def _store(self) -> ShardStore:
        store = self._runtime.store
        if store is None:
            raise RuntimeError("something lies in a swap file, but there is none")
        return store

    def _wait(self, tickets: list[Ticket], cause: StallCause) -> None:
        self._runtime.stalls.wait(Ticket.all_of(tickets, "checkpoint"), cause)


def blank_moment(values: Values, name: str) -> torch.Tensor:
    """Zeros in fp32 for the new values of a moment of a span: where it is stored, if it is stored in fp32."""
    stored = values.state.get(name)
    return stored.zero_() if stored is not None and stored.dtype is torch.float32 else torch.zeros(values.span.numel)


def _in_buffer(kind: str, name: str, numel: int, dtype: torch.dtype, left: _Carver, key: str, offset: int) -> _Part:
    memory = left.take(align_up(numel * dtype.itemsize, PAGE_NBYTES))
    return _Part(kind, name, torch.frombuffer(memory, dtype=dtype, count=numel), _Swapped(key, offset, memory))


def _cut(group: FlatGroup, start: int, stop: int, numel: int, record: Record | None) -> Iterator[Span]:
    for first in range(start, stop, numel):
        yield Span(group, first, min(first + numel, stop), record)
