"""Brings records of optimizer state through a few buffers: read ahead, updated by the caller, written behind.

Used by the training thread, which waits only for what is not there yet; the store's threads move the bytes. A read of
bytes that are still being written waits for them inside the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from infinity.observe.stalls import StallCause, StallClock
from infinity.optim.records import Record
from storage.budget import Reservation, TierBudget
from storage.pool import HostPool, Lease
from storage.store import ShardStore
from storage.types import Priority, Ticket, TrafficTag

_GRAD = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A record on its way, and what else its update needs room for: bytes per element of copied parameters, or 0."""

    record: Record
    param_dtype: torch.dtype
    copies_param: bool

    @property
    def has_state(self) -> bool:
        """Whether the state passes through the buffer; else it is in host memory for good, or there is none."""
        return self.record.lease is None and self.record.nbytes > 0

    @property
    def state_nbytes(self) -> int:
        return self.record.nbytes if self.has_state else 0

    @property
    def nbytes(self) -> int:
        per_element = _GRAD.itemsize + (self.param_dtype.itemsize if self.copies_param else 0)
        return self.state_nbytes + self.record.chunk.numel * per_element


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of a passage; `ticket` is of the transfer under way."""

    passage: Passage
    reservation: Reservation
    lease: Lease
    ticket: Ticket

    @property
    def memory(self) -> memoryview:
        """Of the state, wherever it is."""
        kept = self.passage.record.lease
        return kept.memory if kept is not None else self.lease.memory[: self.passage.state_nbytes]

    @property
    def state(self) -> list[torch.Tensor]:
        """The fields of the record."""
        return self.passage.record.views(self.memory) if self.passage.record.nbytes else []

    @property
    def grad(self) -> torch.Tensor:
        """Room for the chunk's gradient, fp32."""
        numel = self.passage.record.chunk.numel
        return torch.frombuffer(self.lease.memory, dtype=_GRAD, offset=self.passage.state_nbytes, count=numel)

    @property
    def param(self) -> torch.Tensor:
        """Room for the chunk's parameters, where they are copied."""
        numel = self.passage.record.chunk.numel
        start = self.passage.state_nbytes + numel * _GRAD.itemsize
        return torch.frombuffer(self.lease.memory, dtype=self.passage.param_dtype, offset=start, count=numel)

    def release(self) -> None:
        """Give the memory back."""
        self.lease.release()
        self.reservation.release()


class RecordStream:
    """Owns the buffers.

    Args:
        store: where records lie that are not in host memory for good; None when all are.
        budget: bytes of buffers; at least those of the largest passage.
    """

    def __init__(self, store: ShardStore | None, pool: HostPool, budget: TierBudget, stalls: StallClock) -> None:
        self._store = store
        self._pool = pool
        self._budget = budget
        self._stalls = stalls
        self._reading: dict[str, Buffer] = {}  # by key of the record, in the order in which they are wanted
        self._taken: Buffer | None = None
        self._writing: deque[Buffer] = deque()
        self.reads_ahead = 0
        self.reads_on_demand = 0

    def pass_through(self, passages: Sequence[Passage], step: int) -> Iterator[Buffer]:
        """The buffer of every passage when its state is there; it is written when the next one is asked for.

        Raises:
            StorageError: a transfer failed or is stuck; `reset` comes before anything else then.
        """
        wanted = {passage.record.key for passage in passages}
        for key in [key for key in self._reading if key not in wanted]:
            self._drop(key)
        for number, passage in enumerate(passages):
            self._start_now(passage, step)
            self.read_ahead(passages[number + 1 :], step)
            buffer = self._take(passage)
            yield buffer
            passage.record.is_initialised = True
            self._write(buffer, step)
            self._taken = None

    def read_ahead(self, passages: Sequence[Passage], step: int) -> None:
        """Start to read what is wanted next, as far as there is room now."""
        self._reap()
        for passage in passages:
            if passage.record.key in self._reading:
                continue
            reservation = self._budget.try_reserve(passage.nbytes, passage.record.key)
            if reservation is None:
                return
            self.reads_ahead += self._start(passage, step, reservation)

    def look_at(self, passage: Passage, step: int) -> Buffer:
        """The state of one record, until `put_back`."""
        self._start_now(passage, step)
        return self._take(passage)

    def put_back(self, buffer: Buffer) -> None:
        """Nothing has been changed in it."""
        self._taken = None
        buffer.release()

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            StorageError: something was not.
        """
        while self._writing:
            self._finish_oldest_write()

    def reset(self) -> None:
        """Wait until nothing is under way, well or not, and give all buffers back."""
        taken = [self._taken] if self._taken is not None else []
        for buffer in (*self._reading.values(), *taken, *self._writing):
            self._stalls.settle(buffer.ticket, StallCause.NVME_WRITE)
        self.release()

    def release(self) -> None:
        """Give all buffers back; nothing may be under way."""
        taken = [self._taken] if self._taken is not None else []
        for buffer in (*self._reading.values(), *taken, *self._writing):
            buffer.release()
        self._reading.clear()
        self._writing.clear()
        self._taken = None

    # Parts -----------------------------------------------------------------------------------------------------

    def _start_now(self, passage: Passage, step: int) -> None:
        if passage.record.key in self._reading:
            return
        reservation = self._budget.try_reserve(passage.nbytes, passage.record.key)
        while reservation is None:
            if self._writing:
                self._finish_oldest_write()
            else:  # what was read ahead is not wanted first after all
                self._drop(next(reversed(self._reading)))
            reservation = self._budget.try_reserve(passage.nbytes, passage.record.key)
        self.reads_on_demand += self._start(passage, step, reservation)

    def _take(self, passage: Passage) -> Buffer:
        buffer = self._taken = self._reading.pop(passage.record.key)
        self._stalls.wait(buffer.ticket, StallCause.NVME_READ)
        return buffer

    def _start(self, passage: Passage, step: int, reservation: Reservation) -> bool:
        """Lease a buffer and fill it; whether that takes a read."""
        record = passage.record
        lease = self._pool.lease(passage.nbytes, record.key)
        buffer = Buffer(passage, reservation, lease, Ticket.completed(record.key))
        self._reading[record.key] = buffer
        reads = passage.has_state and record.is_initialised and self._store is not None
        if reads and self._store is not None:
            tag = TrafficTag("state", step)
            buffer.ticket = self._store.submit_read(
                record.key,
                buffer.memory,
                priority=Priority.READ_AHEAD,
                tag=tag,
                payload_nbytes=record.payload_nbytes,
            )
        return reads

    def _write(self, buffer: Buffer, step: int) -> None:
        record = buffer.passage.record
        if not buffer.passage.has_state or self._store is None:
            buffer.release()
            return
        tag = TrafficTag("state", step)
        buffer.ticket = self._store.submit_write(
            record.key, buffer.memory, tag=tag, payload_nbytes=record.payload_nbytes
        )
        self._writing.append(buffer)

    def _reap(self) -> None:
        """Buffers whose writes have landed are free."""
        while self._writing and self._writing[0].ticket.done:
            self._finish_oldest_write()

    def _finish_oldest_write(self) -> None:
        buffer = self._writing[0]
        self._stalls.wait(buffer.ticket, StallCause.NVME_WRITE)
        self._writing.popleft()
        buffer.release()

    def _drop(self, key: str) -> None:
        buffer = self._reading[key]
        self._stalls.settle(buffer.ticket, StallCause.NVME_READ)
        del self._reading[key]
        buffer.release()
