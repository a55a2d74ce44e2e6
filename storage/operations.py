"""Operations on the keys of a store, from submission to end: where their bytes lie, when they start, what they free.

Overlapping operations on a key are held back by `ordering`; an operation that ends starts those that it held, on the
thread that completed it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from storage.backends.system import without_frames
from storage.checksums import READ_BACK_KIND
from storage.ordering import Operation
from storage.space import Space
from storage.stats import IoStats
from storage.transfer import FailedPart, StoredKey, Transfers
from storage.types import Op, Priority, Ticket, TrafficTag


class Operations:
    """The operations of one store. Thread safe.

    Args:
        space: where bytes lie.
        lock: of the store; it guards the space, the keys and `in_flight`.
        stats: told about every operation that succeeds.

    Attributes:
        in_flight: operations that have not ended, in the order of submission, each with the key that it is of.
    """

    def __init__(self, space: Space, lock: threading.Lock, stats: IoStats) -> None:
        self._space = space
        self._drives = space.drives
        self._lock = lock
        self._stats = stats
        self._transfers = Transfers(space.drives, space.meters, self._respill)
        self.in_flight: dict[Operation, StoredKey] = {}

    # Under the store's lock ------------------------------------------------------------------------------------

    def place_first(self, entry: StoredKey, operation: Operation) -> None:
        """Find a place for an operation that no other one is before; the others get theirs when it is their turn.

        Raises:
            SwapFullError: there is no room; nothing has changed.
        """
        if not entry.order.operations:
            self._place(entry, operation)

    def admit(self, entry: StoredKey, operation: Operation) -> bool:
        """Take an operation up; whether it may start now."""
        self.in_flight[operation] = entry
        return entry.order.add(operation)

    def doubt_writes(self, keys: Collection[str], error: BaseException) -> None:
        """A drive may have lost what it has of the writes in flight on these keys: they fail with `error` at their end.

        What is held behind them starts later, with all of its bytes.
        """
        for operation in self.in_flight:
            if operation.op is Op.WRITE and operation.key in keys and not operation.held_by:
                operation.doubt = error

    # Without it ------------------------------------------------------------------------------------------------

    def run(self, entry: StoredKey, operation: Operation, *, may_start: bool) -> None:
        """Start an operation that was admitted; one that is held starts later by itself."""
        try:
            if may_start:
                self._start(entry, operation)
            elif operation.priority is Priority.DEMAND:  # what holds it back is waited for as well
                self.promote(operation.key)
        except BaseException as error:  # Ctrl-C: nobody gets the ticket, and the caller takes its memory back
            self._end_interrupted(entry, operation, error)
            raise

    def promote(self, key: str) -> None:
        """What the drives have of a key goes before all that nobody waits for."""
        for drive in self._drives:
            drive.backend.promote(key)

    def describe(self) -> list[str]:
        """One line per transfer that has not completed, oldest first: what it is, and where it is held up."""
        places: dict[str, list[str]] = {}
        for drive in self._drives:
            for request in drive.backend.in_flight():
                places.setdefault(request.ticket.label, []).append(f"at offset {request.offset} of {request.path}")
        lines = []
        with self._lock:
            # Not by label: two transfers of the same bytes are two lines.
            for operation in self.in_flight:
                label = operation.ticket.label
                where = ["held behind an earlier one"] if operation.held_by else places.get(label, [])
                lines.append(f"{label}: {', '.join(where)}" if where else label)
        return lines

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted before has ended, well or not; whether that happened in time."""
        with self._lock:
            tickets = [operation.ticket for operation in self.in_flight]
        # One by one: a ticket that joined them would stay behind as a callback when the time is over.
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return all(
            ticket.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())) for ticket in tickets
        )

    # Parts -----------------------------------------------------------------------------------------------------

    def _end_interrupted(self, entry: StoredKey, operation: Operation, error: BaseException) -> None:
        """Nothing moves the memory of an operation any more; one that nobody will complete fails."""
        if not self._transfers.wait_until_still(operation):
            self._ended(entry, operation, error)

    def _place(self, entry: StoredKey, operation: Operation) -> None:
        """Decide where an operation finds its bytes. Called when no other one that uses them is before it."""
        operation.old_pieces = entry.pieces
        if operation.op is Op.WRITE:
            layout = self._space.place(entry.pieces, operation.start, operation.stop)
            entry.pieces = layout.pieces
            operation.left += layout.left
        operation.pieces = entry.pieces

    def _respill(self, operation: Operation, failed: Sequence[FailedPart]) -> None:
        """Move parts of a write in flight that their drives did not take to others."""
        with self._lock:
            entry = self.in_flight[operation]
            for part in failed:
                self._space.health.note_failure(part.drive, part.error)
                operation.refused_by.add(part.drive)
            spans = [(part.start, part.stop) for part in failed]
            layout = self._space.replace(entry.pieces, spans, operation.refused_by, failed[0].error)
            operation.pieces = entry.pieces = layout.pieces
            operation.left += layout.left

    def _start(self, entry: StoredKey, operation: Operation) -> None:
        """Start an operation that nothing holds; and, when it ends at once, those that it held, and so on."""
        ready = deque([operation])
        while ready:
            started = ready.popleft()
            joined = self._hand_over(entry, started)
            if joined.done:
                # Not through a callback: a long chain of operations that fail at once would nest as deeply.
                ready.extend(self._finish(entry, started, joined.exception))
            else:
                joined.add_done_callback(_Ended(self, entry, started))

    def _hand_over(self, entry: StoredKey, operation: Operation) -> Ticket:
        """Give an operation's pieces to the backends; a ticket for all of them."""
        error = self._make_ready(entry, operation)
        if error is None:
            operation.started_s = time.perf_counter()
            try:
                return self._transfers.start(operation)
            except Exception as problem:  # such as no memory for what is read back: the ticket carries it
                error = without_frames(problem)
        failed = Ticket(operation.ticket.label)
        failed.set_exception(error)
        return failed

    def _make_ready(self, entry: StoredKey, operation: Operation) -> BaseException | None:
        """Find out where an operation's bytes are, and what it fails with if it must not start."""
        with self._lock:
            lost = entry.order.lost_in(operation.start, operation.stop) if operation.op is Op.READ else None
            if lost is None and not operation.pieces:
                try:
                    self._place(entry, operation)
                except Exception as error:  # the ticket carries it
                    return without_frames(error)
            return lost

    def _finish(self, entry: StoredKey, operation: Operation, error: BaseException | None) -> list[Operation]:
        """An operation has ended; those that may start now. Idempotent: one that was interrupted may end once more."""
        with self._lock:
            if self.in_flight.pop(operation, None) is None:
                return []
            error = error or operation.doubt
            freed = entry.order.remove(operation, error)
            self._space.free(operation.left)
            if operation.op is Op.WRITE and error is None:
                self._space.note_written(operation.pieces, operation.start, operation.stop)
        if error is None:
            seconds = time.perf_counter() - operation.started_s
            nbytes = len(operation.memory)
            self._stats.add(operation.op, operation.tag, nbytes, operation.payload_nbytes, seconds)
            if operation.check is not None and operation.check.cuts:
                tag = TrafficTag(READ_BACK_KIND, operation.tag.step)
                self._stats.add(Op.READ, tag, operation.check.read_back_nbytes, 0, None)
        operation.ticket.complete(error)
        return freed

    def _ended(self, entry: StoredKey, operation: Operation, error: BaseException | None) -> None:
        for freed in self._finish(entry, operation, error):
            self._start(entry, freed)


@dataclass(frozen=True, slots=True)
class _Ended:
    """Callback of an operation in flight."""

    operations: Operations
    entry: StoredKey
    operation: Operation

    def __call__(self, ticket: Ticket) -> None:
        self.operations._ended(self.entry, self.operation, ticket.exception)
