"""Ordering of transfers per key: overlapping operations of which one is a write run in submission order.

Pure bookkeeping, guarded by its store's lock. An operation enters with `add`; while operations before it conflict with
it, it is held; `remove` says who is free to go because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.checksums import Check
from storage.errors import detached
from storage.stripes import Piece
from storage.types import Extent, Op, Priority, Ticket, TrafficTag


@dataclass(slots=True, eq=False)
class Operation:
    """A transfer between memory and bytes `start` to `stop` of a key."""

    op: Op
    key: str
    start: int
    memory: memoryview
    priority: Priority
    tag: TrafficTag
    payload_nbytes: int
    ticket: Ticket
    pieces: Sequence[Piece] = ()  # where the bytes of its key lie; empty until it may start
    old_pieces: Sequence[Piece] = ()  # where they lay before it
    left: list[Extent] = field(default_factory=list)  # what it moves its bytes away from
    refused_by: set[int] = field(default_factory=set)  # drives that did not take a part of it
    check: Check | None = None
    doubt: BaseException | None = None  # why what has been written of it may not last
    started_s: float = 0.0  # when it was handed to the backends, on the performance counter
    reach: tuple[int, int] = (0, 0)  # the bytes that its order matters for; known once it is in the order of its key
    held_by: int = 0
    holds: list[Operation] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The byte of the key behind the last one that is moved."""
        return self.start + len(self.memory)

    def part(self, start: int, stop: int) -> memoryview:
        """The memory of bytes `start` to `stop` of the key."""
        return self.memory[start - self.start : stop - self.start]


@dataclass(slots=True, eq=False)
class KeyOrder:
    """Operations in flight on one key, and the spans whose last write failed, which do not overlap.

    The errors in `lost` are raised by nobody, for they would keep the frames that they are raised in.
    """

    operations: list[Operation] = field(default_factory=list)
    lost: list[tuple[int, int, BaseException]] = field(default_factory=list)

    def add(self, operation: Operation) -> bool:
        """Note an operation; whether it may start now."""
        check = operation.check
        start, stop = (operation.start, operation.stop) if check is None else (check.reach_start, check.reach_stop)
        operation.reach, is_write = (start, stop), operation.op is Op.WRITE
        for earlier in self.operations:  # hundreds, where a large gradient comes down in chunks
            earlier_start, earlier_stop = earlier.reach
            if start < earlier_stop and earlier_start < stop and (is_write or earlier.op is Op.WRITE):
                earlier.holds.append(operation)
                operation.held_by += 1
                earlier.priority = min(earlier.priority, operation.priority)  # who waits for one waits for the other
        self.operations.append(operation)
        return operation.held_by == 0

    def remove(self, operation: Operation, error: BaseException | None) -> list[Operation]:
        """An operation ended; those that may start now, in submission order."""
        self.operations.remove(operation)
        if operation.op is Op.WRITE:
            self.note_write(operation.start, operation.stop, error)
        for later in operation.holds:
            later.held_by -= 1
        return [later for later in operation.holds if later.held_by == 0]

    def lost_in(self, start: int, stop: int) -> BaseException | None:
        """Why bytes in this span are not what was written, if that is so."""
        return next((detached(cause) for a, b, cause in self.lost if a < stop and start < b), None)

    def note_write(self, start: int, stop: int, error: BaseException | None) -> None:
        """A failed write loses its span, a successful one makes it good again."""
        kept = []
        for lost_start, lost_stop, cause in self.lost:
            if lost_start < start:
                kept.append((lost_start, min(lost_stop, start), cause))
            if lost_stop > stop:
                kept.append((max(lost_start, stop), lost_stop, cause))
        if error is not None:
            kept.append((start, stop, detached(error)))
        self.lost = kept
