"""How one operation becomes requests to the backends, and what its checksums need around them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage.backends.system import without_frames
from storage.checksums import Check, Cut, KeyChecksums, Place, RequestCheck
from storage.drives import Drive
from storage.ordering import KeyOrder, Operation
from storage.stripes import Piece, overlap
from storage.types import IoRequest, Op, Ticket


@dataclass(slots=True, eq=False)
class StoredKey:
    """What a store knows of a key. `pieces` is replaced, never changed: operations in flight keep theirs."""

    nbytes: int
    pieces: Sequence[Piece]
    checksums: KeyChecksums | None
    order: KeyOrder = field(default_factory=KeyOrder)


def start_transfer(drives: Sequence[Drive], operation: Operation) -> Ticket:
    """Give an operation's pieces to the backends; a ticket for all of them, and for what its checksums need."""
    check, memory = operation.check, operation.memory
    if check is None or not check.cuts:
        return _move(drives, operation, operation.op, operation.start, memory)
    label = operation.ticket.label
    read_back = [_ReadBack(cut, drives, operation) for cut in check.cuts]
    if operation.op is Op.READ:
        tickets = [_move(drives, operation, Op.READ, operation.start, memory), *(one.ticket for one in read_back)]
        return _then(Ticket.all_of(tickets, label), lambda error: _settle_read(check, read_back, error))
    ended = Ticket.all_of([one.ticket for one in read_back], label)

    def write(error: BaseException | None) -> Ticket:
        for one in read_back:
            one.settle(check)
        return _move(drives, operation, Op.WRITE, operation.start, memory)

    return _then(ended, write)


class _ReadBack:
    """A span that an operation cuts, on its way into memory of its own."""

    def __init__(self, cut: Cut, drives: Sequence[Drive], operation: Operation) -> None:
        self._cut = cut
        self._content = memoryview(mmap.mmap(-1, cut.span.stop - cut.span.start))
        piece, start, _ = overlap(operation.old_pieces, cut.span.start, cut.span.stop)[0]
        self._place = _place(drives[piece.extent.drive], piece, start)
        self.ticket = _move(drives, operation, Op.READ, cut.span.start, self._content, is_read_back=True)

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


def _move(
    drives: Sequence[Drive],
    operation: Operation,
    op: Op,
    start: int,
    memory: memoryview,
    *,
    is_read_back: bool = False,
) -> Ticket:
    """Transfer between memory and the bytes of the operation's key from `start` on."""
    label = operation.ticket.label
    check = None if is_read_back else operation.check
    pieces = operation.old_pieces if is_read_back else operation.pieces
    tickets = []
    for piece, part_start, part_stop in overlap(pieces, start, start + len(memory)):
        drive = drives[piece.extent.drive]
        place = _place(drive, piece, part_start)
        request = IoRequest(
            op=op,
            fd=drive.file.fd,
            path=place.path,
            offset=place.offset,
            memory=memory[part_start - start : part_stop - start],
            priority=operation.priority,
            key=operation.key,
            ticket=Ticket(label),
            check=None if check is None else RequestCheck(check, place),
        )
        tickets.append(request.ticket)
        try:
            drive.backend.submit(request)
        except Exception as error:  # the ticket carries it, as if the device had refused
            request.ticket.set_exception(error)
    return tickets[0] if len(tickets) == 1 else Ticket.all_of(tickets, label)


def _place(drive: Drive, piece: Piece, start: int) -> Place:
    return Place(str(drive.file.path), piece.extent.offset + start - piece.start, start)


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
            following.add_done_callback(finish)

    def finish(done: Ticket) -> None:
        if done.exception is None:
            ended.set_done()
        else:
            ended.set_exception(done.exception)

    ticket.add_done_callback(go_on)
    return ended
