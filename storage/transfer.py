"""How one operation becomes requests to the backends, and what its checksums need around them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage.backends.system import without_frames
from storage.checksums import Check, Cut, KeyChecksums, Place, RequestCheck
from storage.drives import Drive
from storage.errors import IoError, SwapFullError
from storage.meters import DriveMeters
from storage.ordering import KeyOrder, Operation
from storage.stripes import Piece, overlap
from storage.types import IoRequest, Op, Ticket

_STILL_TIMEOUT_S = 10.0
_POLL_S = 0.05


@dataclass(slots=True, eq=False)
class StoredKey:
    """What a store knows of a key. `pieces` is replaced, never changed: operations in flight keep theirs."""

    nbytes: int
    pieces: Sequence[Piece]
    checksums: KeyChecksums | None
    order: KeyOrder = field(default_factory=KeyOrder)


@dataclass(frozen=True, slots=True)
class FailedPart:
    """Bytes `start` to `stop` of a key that a drive did not take."""

    start: int
    stop: int
    drive: int
    error: Exception


Respill = Callable[[Operation, Sequence[FailedPart]], None]
"""Finds another place for parts of a write, or raises what the write fails with."""


class Transfers:
    """Starts operations on drives. Thread safe.

    Args:
        meters: told about every request.
        respill: asked when a drive does not take a part of a write; afterwards `operation.pieces` says where the part
            goes instead.
    """

    def __init__(self, drives: Sequence[Drive], meters: DriveMeters, respill: Respill) -> None:
        self._drives = drives
        self._meters = meters
        self._respill = respill

    def start(self, operation: Operation) -> Ticket:
        """Give an operation's pieces to the backends; a ticket for all of them, and for what its checksums need."""
        check, label = operation.check, operation.ticket.label
        read_back = [] if check is None else [_ReadBack(cut, self, operation) for cut in check.cuts]
        if operation.op is Op.WRITE:
            if check is None or not read_back:
                return _Write(self, operation).start()
            ended = Ticket.all_of([one.ticket for one in read_back], label)

            def write(error: BaseException | None) -> Ticket:
                for one in read_back:
                    one.settle(check)
                return _Write(self, operation).start()

            return _then(ended, write)
        moved = _joined(self.submit(operation, Op.READ, operation.start, operation.stop), label)
        if check is None or not read_back:
            return moved
        tickets = [moved, *(one.ticket for one in read_back)]
        return _then(Ticket.all_of(tickets, label), lambda error: _settle_read(check, read_back, error))

    def wait_until_still(self, operation: Operation) -> bool:
        """Wait, for a bounded time, until nothing moves the memory of an operation; whether it is complete."""
        ticket, deadline_s = operation.ticket, time.monotonic() + _STILL_TIMEOUT_S
        while not ticket.wait(_POLL_S) and time.monotonic() < deadline_s:
            moving = [request.ticket.label for drive in self._drives for request in drive.backend.in_flight()]
            if not operation.held_by and ticket.label not in moving:
                break
        return ticket.wait(_POLL_S)  # whoever served the last part is about to complete it, if anybody is

    def read_back(self, operation: Operation, start: int, memory: memoryview) -> tuple[Ticket, Place]:
        """Read bytes of the operation's key as they were before it, unchecked; and where the first of them are."""
        parts = overlap(operation.old_pieces, start, start + len(memory))
        tickets = [
            self._submit(operation, Op.READ, piece, memory[a - start : b - start], a, is_checked=False)
            for piece, a, b in parts
        ]
        piece, first, _ = parts[0]
        return _joined(tickets, operation.ticket.label), self._place(piece, first)

    def submit(self, operation: Operation, op: Op, start: int, stop: int) -> list[Ticket]:
        """Move bytes `start` to `stop` of the operation's key; a ticket for each piece they lie in."""
        parts = overlap(operation.pieces, start, stop)
        return [self._submit(operation, op, piece, operation.part(a, b), a) for piece, a, b in parts]

    def respill(self, operation: Operation, failed: Sequence[FailedPart]) -> None:
        """Find another place for parts of a write, or raise what the write fails with."""
        self._respill(operation, failed)

    # Parts -----------------------------------------------------------------------------------------------------

    def _submit(
        self, operation: Operation, op: Op, piece: Piece, memory: memoryview, start: int, *, is_checked: bool = True
    ) -> Ticket:
        """Move bytes of the operation's key, from `start` on, which lie in one piece."""
        number = piece.extent.drive
        drive, place = self._drives[number], self._place(piece, start)
        check = operation.check if is_checked else None
        request = IoRequest(
            op=op,
            fd=drive.file.fd,
            path=place.path,
            offset=place.offset,
            memory=memory,
            priority=operation.priority,
            key=operation.key,
            ticket=Ticket(operation.ticket.label),
            check=None if check is None else RequestCheck(check, place),
        )
        self._meters.began(number, op, len(memory))
        request.ticket.add_done_callback(_Metered(self._meters, number, op, len(memory)))
        try:
            drive.backend.submit(request)
        except Exception as error:  # the ticket carries it, as if the device had refused
            request.ticket.set_exception(error)
        return request.ticket

    def _place(self, piece: Piece, start: int) -> Place:
        path = self._drives[piece.extent.drive].file.path
        return Place(str(path), piece.extent.offset + start - piece.start, start)


@dataclass(frozen=True, slots=True)
class _Metered:
    """Callback of a request in flight."""

    meters: DriveMeters
    drive: int
    op: Op
    nbytes: int

    def __call__(self, ticket: Ticket) -> None:
        self.meters.ended(self.drive, self.op, self.nbytes, has_moved=ticket.exception is None)


class _Write:
    """The bytes of a write on their way to the drives; what a drive does not take goes to another one."""

    def __init__(self, transfers: Transfers, operation: Operation) -> None:
        self._transfers = transfers
        self._operation = operation
        self._ended = Ticket(operation.ticket.label)

    def start(self) -> Ticket:
        self._go_on([(self._operation.start, self._operation.stop)])
        return self._ended

    def _go_on(self, spans: Sequence[tuple[int, int]]) -> None:
        operation = self._operation
        parts = [part for start, stop in spans for part in overlap(operation.pieces, start, stop)]
        tickets = [one for a, b in spans for one in self._transfers.submit(operation, Op.WRITE, a, b)]
        _joined(tickets, operation.ticket.label).add_done_callback(lambda _: self._end(parts, tickets))

    def _end(self, parts: Sequence[tuple[Piece, int, int]], tickets: Sequence[Ticket]) -> None:
        failed = []
        try:
            for (piece, start, stop), ticket in zip(parts, tickets, strict=True):
                error = ticket.exception
                if isinstance(error, IoError | SwapFullError):
                    failed.append(FailedPart(start, stop, piece.extent.drive, error))
                elif error is not None:
                    raise error  # what another drive cannot help with, such as a closed store
            if failed:
                self._transfers.respill(self._operation, failed)
                self._go_on([(part.start, part.stop) for part in failed])
        except BaseException as error:  # whatever it is, the ticket has to carry it
            self._ended.set_exception(without_frames(error))
            return
        if not failed:
            self._ended.set_done()


def _joined(tickets: Sequence[Ticket], label: str) -> Ticket:
    return tickets[0] if len(tickets) == 1 else Ticket.all_of(tickets, label)


class _ReadBack:
    """A span that an operation cuts, on its way into memory of its own."""

    def __init__(self, cut: Cut, transfers: Transfers, operation: Operation) -> None:
        self._cut = cut
        self._content = memoryview(mmap.mmap(-1, cut.span.stop - cut.span.start))
        self.ticket, self._place = transfers.read_back(operation, cut.span.start, self._content)

    def settle(self, check: Check) -> None:
        if self.ticket.exception is None:
            check.settle(self._cut, self._content, self._place)
        else:
            check.give_up(self._cut, self.ticket.exception)


def _settle_read(check: Check, read_back: list[_ReadBack], error: BaseException | None) -> None:
    if error is not None:
        raise error
    for one in read_back:
        one.settle(check)


def _then(ticket: Ticket, action: Callable[[BaseException | None], Ticket | None]) -> Ticket:
    """A ticket that is done when `ticket` is and `action`, called with its exception, as well as what that started."""
    ended = Ticket(ticket.label)

    def go_on(done: Ticket) -> None:
        try:
            following = action(done.exception)
        except Exception as error:  # the ticket carries it
            ended.set_exception(without_frames(error))
            return
        if following is None:
            ended.set_done()
        else:
            following.add_done_callback(lambda last: ended.complete(last.exception))

    ticket.add_done_callback(go_on)
    return ended
