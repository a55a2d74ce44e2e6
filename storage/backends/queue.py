"""The queue in front of a device: transfers by priority, handed out block by block.

Several workers serve one queue, so the depth at the device spans transfers and files: a small shard does not run alone
while others wait, and a large one keeps every worker busy. A transfer ends when its last block does, or, once a block
has failed, when the blocks that were already handed out have.

[Note: waking workers] A thread that is woken costs more than a small block: a system call, a switch of contexts, a turn
of the interpreter's lock. So a worker whose completions submit the next request takes that one itself instead of
waking another, and the worker that went to sleep last is woken first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from storage.errors import ClosedError, IoError
from storage.types import IoRequest, Op, Priority

_log = logging.getLogger(__name__)

# With both waiting, one block in so many is a write: a steady stream of reads must not hold writes up for ever. How
# many depends on the share of their memory that writes hold: nobody needs it, or somebody will soon wait for it.
_READ_AHEADS_PER_WRITE = ((0.25, 16), (0.5, 8), (0.75, 3))
_READ_AHEADS_PER_WRITE_UNDER_PRESSURE = 1
_READ_AHEADS_PER_WRITE_UNKNOWN = 8
# Demand reads, which somebody waits for, let writes through more rarely.
_DEMANDS_PER_WRITE = 64
_DEMANDS_PER_WRITE_UNDER_PRESSURE = 8
_PRESSURE = 0.75

Block = tuple["Transfer", int, int]


def read_aheads_per_write(pressure: float | None) -> int:
    """How many blocks of reads go before one of writes.

    Args:
        pressure: share of the memory for writes that writes hold; None when the memory is not known.
    """
    if pressure is None:
        return _READ_AHEADS_PER_WRITE_UNKNOWN
    for limit, reads in _READ_AHEADS_PER_WRITE:
        if pressure < limit:
            return reads
    return _READ_AHEADS_PER_WRITE_UNDER_PRESSURE


class Transfer:
    """A request being served: where its next block starts and how many are out. Guarded by its queue's lock."""

    __slots__ = ("blocks_out", "error", "next_start", "priority", "request")

    def __init__(self, request: IoRequest) -> None:
        self.request = request
        self.priority = request.priority  # rises when somebody begins to wait for it
        self.next_start = 0
        self.blocks_out = 0
        self.error: BaseException | None = None

    @property
    def is_handed_out(self) -> bool:
        """Whether no further block will be handed out."""
        return self.error is not None or self.next_start >= len(self.request.memory)

    def complete(self) -> None:
        """Complete the request's ticket."""
        self.request.ticket.complete(self.error)


class Seat:
    """Where one worker sleeps when there is nothing to do. Made by the worker's own thread."""

    __slots__ = ("comes_back", "ident", "wake")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.wake = threading.Lock()  # as a semaphore: released by whoever takes the seat off the idle ones
        self.wake.acquire()
        self.comes_back = False  # it completes a transfer, and will take a block when that is done


class BlockQueue:
    """Thread safe. The lock is held for a few operations on deques.

    Args:
        block_nbytes: most bytes of a block.
        write_memory_nbytes: memory that writes may hold until they have ended; decides how much they yield to reads.
    """

    def __init__(self, block_nbytes: int, write_memory_nbytes: int | None = None) -> None:
        self._block_nbytes = block_nbytes
        self._write_memory_nbytes = write_memory_nbytes
        self._held_by_writes_nbytes = 0
        self._waiting: dict[Priority, deque[Transfer]] = {priority: deque() for priority in Priority}
        self._served: set[Transfer] = set()
        self._reads_in_a_row = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._idle: list[Seat] = []
        self._seats: dict[int, Seat] = {}

    @property
    def write_pressure(self) -> float | None:
        """Share of the memory for writes that is held by writes which have not ended; may exceed 1."""
        if not self._write_memory_nbytes:
            return None
        return self._held_by_writes_nbytes / self._write_memory_nbytes

    def put(self, request: IoRequest) -> int:
        """Queue a request; into how many blocks it will be cut.

        Raises:
            ClosedError: the queue is closed.
            IoError: it has failed.
        """
        blocks = -(-len(request.memory) // self._block_nbytes)
        with self._lock:
            if self._failure is not None:
                raise _failed(request, self._failure)
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            self._waiting[request.priority].append(Transfer(request))
            if request.op is Op.WRITE:
                self._held_by_writes_nbytes += len(request.memory)
            self._wake(blocks)
        return blocks

    def promote(self, key: str) -> None:
        """Somebody waits for the transfers of a key: those that are queued go before all that nobody waits for."""
        with self._lock:
            for priority in (Priority.READ_AHEAD, Priority.WRITE):
                queue = self._waiting[priority]
                for transfer in [waiting for waiting in queue if waiting.request.key == key]:
                    queue.remove(transfer)
                    transfer.priority = Priority.DEMAND
                    self._waiting[Priority.DEMAND].append(transfer)

    def sit_down(self) -> Seat:
        """A seat for the calling thread, which will take blocks until there are no more."""
        seat = Seat()
        with self._lock:
            self._seats[seat.ident] = seat
        return seat

    def take(self, seat: Seat) -> Block | None:
        """The next block as (transfer, start, stop), in bytes of its memory; blocks. None when closed."""
        while True:
            with self._lock:
                seat.comes_back = False
                block = self._next_block()
                if block is not None or self._is_closed:
                    return block
                self._idle.append(seat)
            seat.wake.acquire()

    def take_nowait(self) -> Block | None:
        """The same, or None when there is nothing to do now."""
        with self._lock:
            return self._next_block()

    def take_many(self, most: int) -> list[Block]:
        """Up to so many blocks, as far as there are any now."""
        blocks: list[Block] = []
        with self._lock:
            while len(blocks) < most and (block := self._next_block()) is not None:
                blocks.append(block)
        return blocks

    def block_done(self, transfer: Transfer, error: BaseException | None, seat: Seat | None = None) -> bool:
        """A block has ended; whether the whole transfer has, whose ticket is then the caller's to complete.

        Args:
            seat: of the worker that served it, and that takes a block next.
        """
        with self._lock:
            is_over = self._block_done(transfer, error)
            if is_over and seat is not None:
                seat.comes_back = True
            return is_over

    def blocks_done(self, done: Sequence[tuple[Transfer, BaseException | None]]) -> list[Transfer]:
        """Several blocks have ended; the transfers that have with them, whose tickets are the caller's to complete."""
        with self._lock:
            return [transfer for transfer, error in done if self._block_done(transfer, error)]

    def requests(self) -> list[IoRequest]:
        """What was put and has not ended."""
        with self._lock:
            waiting = [transfer for queue in self._waiting.values() for transfer in queue]
            return [transfer.request for transfer in dict.fromkeys([*self._served, *waiting])]

    def close(self) -> list[Transfer]:
        """Hand out nothing more and wake everybody; the transfers that end here, for the caller to complete."""
        with self._lock:
            self._is_closed = True
            ended = []
            for queue in self._waiting.values():
                for transfer in queue:
                    transfer.error = ClosedError("the I/O backend was closed before the transfer was served")
                    if transfer.blocks_out == 0:
                        ended.append(transfer)
                        self._let_go(transfer)
                queue.clear()
            while self._idle:
                self._idle.pop().wake.release()
            return ended

    def fail(self, error: BaseException) -> list[Transfer]:
        """Nobody serves the queue any more because of `error`, nor ever will: every transfer ends with it.

        Returns:
            The transfers, for the caller to complete. None of them may be moving any more.
        """
        with self._lock:
            self._is_closed = True
            self._failure = error
            ended = [*self._served, *(transfer for queue in self._waiting.values() for transfer in queue)]
            ended = list(dict.fromkeys(ended))
            for transfer in ended:
                transfer.error = transfer.error or _failed(transfer.request, error)
                self._let_go(transfer)
            self._served.clear()
            for queue in self._waiting.values():
                queue.clear()
            return ended

    def abandon(self) -> list[Transfer]:
        """After `close`: the transfers that a stuck system call still holds."""
        with self._lock:
            stuck = list(self._served)
            for transfer in stuck:
                transfer.error = ClosedError(
                    f"the I/O backend was closed, but the device never answered for {transfer.request.key!r}"
                )
            return stuck

    # With the lock held --------------------------------------------------------------------------------------------

    def _wake(self, blocks: int) -> None:
        """Wake a worker for each block, but for those that come by themselves. [Note: waking workers]"""
        seat = self._seats.get(threading.get_ident())
        if seat is not None and seat.comes_back:
            seat.comes_back = False  # for one block
            blocks -= 1
        for _ in range(min(blocks, len(self._idle))):
            self._idle.pop().wake.release()

    def _block_done(self, transfer: Transfer, error: BaseException | None) -> bool:
        transfer.blocks_out -= 1
        if error is not None and transfer.error is None:
            if not transfer.is_handed_out:
                self._waiting[transfer.priority].remove(transfer)
            transfer.error = error
        is_over = transfer.is_handed_out and transfer.blocks_out == 0
        if is_over:
            self._served.discard(transfer)
            self._let_go(transfer)
        return is_over

    def _let_go(self, transfer: Transfer) -> None:
        if transfer.request.op is Op.WRITE:
            self._held_by_writes_nbytes -= len(transfer.request.memory)

    def _next_block(self) -> Block | None:
        queue = self._next_queue()
        if not queue:
            return None
        transfer = queue[0]
        start = transfer.next_start
        stop = min(start + self._block_nbytes, len(transfer.request.memory))
        transfer.next_start = stop
        transfer.blocks_out += 1
        self._served.add(transfer)
        if transfer.is_handed_out:
            queue.popleft()
        return transfer, start, stop

    def _next_queue(self) -> deque[Transfer]:
        demands, writes = self._waiting[Priority.DEMAND], self._waiting[Priority.WRITE]
        reads = demands or self._waiting[Priority.READ_AHEAD]
        if not reads or (writes and self._reads_in_a_row >= self._reads_per_write(is_demand=bool(demands))):
            self._reads_in_a_row = 0
            return writes
        self._reads_in_a_row += 1
        return reads

    def _reads_per_write(self, *, is_demand: bool) -> int:
        pressure = self.write_pressure
        if not is_demand:
            return read_aheads_per_write(pressure)
        return _DEMANDS_PER_WRITE_UNDER_PRESSURE if (pressure or 0.0) >= _PRESSURE else _DEMANDS_PER_WRITE


def _failed(request: IoRequest, cause: BaseException) -> IoError:
    """The error of a transfer that nobody serves. As an I/O error, so that a write goes to another drive."""
    error = IoError(
        f"{request.op.value} of {request.key!r}: the I/O backend of {request.path} has ended: {cause}",
        path=request.path,
        offset=request.offset,
        nbytes=len(request.memory),
        errno=cause.errno if isinstance(cause, OSError) else None,
        key=request.key,
    )
    error.__cause__ = cause
    return error


def shut_down(
    queue: BlockQueue, threads: Sequence[threading.Thread], timeout_s: float, wake: Callable[[], None] = lambda: None
) -> None:
    """Close a queue and wait for the threads that serve it; what they do not answer for in time fails.

    Args:
        wake: called when the queue is closed, for threads that wait for something else than the queue.
    """
    for transfer in queue.close():
        transfer.complete()
    wake()
    deadline_s = time.monotonic() + timeout_s
    # A completion's callback may close: then one of the threads is this one, and has nothing in service.
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    for transfer in queue.abandon() if any(thread.is_alive() for thread in others) else []:
        _log.error("%s of %s never ended", transfer.request.op.value, transfer.request.key)
        transfer.complete()
