"""Ordering of transfers per key: overlapping operations of which one is a write run in submission order.

Pure bookkeeping, guarded by its store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from storage.types import Op, Ticket


@dataclass(slots=True, eq=False)
class Operation:
    """A transfer on bytes `start` to `stop` of a key."""

    op: Op
    start: int
    stop: int
    ticket: Ticket

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop

    def conflicts(self, other: Operation) -> bool:
        writes = Op.WRITE in (self.op, other.op)
        return writes and self.overlaps(other.start, other.stop)


@dataclass(slots=True, eq=False)
class KeyOrder:
    """Operations in flight on one key, and the spans whose last write failed."""

    operations: list[Operation] = field(default_factory=list)
    lost: list[tuple[int, int, BaseException]] = field(default_factory=list)

    def add(self, operation: Operation) -> list[Ticket]:
        """Note an operation; the tickets it has to wait for."""
        before = [earlier.ticket for earlier in self.operations if earlier.conflicts(operation)]
        self.operations.append(operation)
        return before

    def remove(self, operation: Operation, error: BaseException | None) -> None:
        """An operation ended. A failed write loses its span, a successful one makes it good again."""
        self.operations.remove(operation)
        if operation.op is not Op.WRITE:
            return
        kept = []
        for start, stop, cause in self.lost:
            if start < operation.start:
                kept.append((start, min(stop, operation.start), cause))
            if stop > operation.stop:
                kept.append((max(start, operation.stop), stop, cause))
        if error is not None:
            kept.append((operation.start, operation.stop, error))
        self.lost = kept

    def lost_in(self, start: int, stop: int) -> BaseException | None:
        """Why bytes in this span were never written, if that is so."""
        return next((cause for a, b, cause in self.lost if a < stop and start < b), None)
