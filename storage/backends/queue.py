"""The queue in front of a device: transfers by priority, handed out block by block.

Several workers serve one queue, so the depth at the device spans transfers and files: a small shard does not run alone
while others wait, and a large one keeps every worker busy. A transfer ends when its last block does, or, once a block
has failed, when the blocks that were already handed out have.
"""

from __future__ import annotations

import threading
from collections import deque

from storage.errors import ClosedError
from storage.types import IoRequest, Priority

# With both waiting, one block in so many is a write: a steady stream of reads must not hold writes up for ever. Demand
# reads, which somebody waits for, let writes through more rarely.
_READ_AHEADS_PER_WRITE = 8
_DEMANDS_PER_WRITE = 64


class Transfer:
    """A request being served: where its next block starts and how many are out. Guarded by its queue's lock."""

    __slots__ = ("blocks_out", "error", "next_start", "request")

    def __init__(self, request: IoRequest) -> None:
        self.request = request
        self.next_start = 0
        self.blocks_out = 0
        self.error: BaseException | None = None

    @property
    def is_handed_out(self) -> bool:
        """Whether no further block will be handed out."""
        return self.error is not None or self.next_start >= len(self.request.memory)

    def complete(self) -> None:
        """Complete the request's ticket."""
        if self.error is None:
            self.request.ticket.set_done()
        else:
            self.request.ticket.set_exception(self.error)


class BlockQueue:
    """Thread safe. The lock is held for a few operations on deques."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._waiting: dict[Priority, deque[Transfer]] = {priority: deque() for priority in Priority}
        self._served: set[Transfer] = set()
        self._reads_in_a_row = 0
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())

    def put(self, request: IoRequest) -> int:
        """Queue a request; into how many blocks it will be cut.

        Raises:
            ClosedError: the queue is closed.
        """
        blocks = -(-len(request.memory) // self._block_nbytes)
        with self._changed:
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            self._waiting[request.priority].append(Transfer(request))
            self._changed.notify(blocks)
        return blocks

    def take(self) -> tuple[Transfer, int, int] | None:
        """The next block as (transfer, start, stop), in bytes of its memory; blocks. None when closed."""
        with self._changed:
            while (block := self._next_block()) is None and not self._is_closed:
                self._changed.wait()
            return block

    def take_nowait(self) -> tuple[Transfer, int, int] | None:
        """The same, or None when there is nothing to do now."""
        with self._changed:
            return self._next_block()

    def block_done(self, transfer: Transfer, error: BaseException | None) -> bool:
        """A block has ended; whether the whole transfer has, whose ticket is then the caller's to complete."""
        with self._changed:
            transfer.blocks_out -= 1
            if error is not None and transfer.error is None:
                if not transfer.is_handed_out:
                    self._waiting[transfer.request.priority].remove(transfer)
                transfer.error = error
            is_over = transfer.is_handed_out and transfer.blocks_out == 0
            if is_over:
                self._served.discard(transfer)
            return is_over

    def requests(self) -> list[IoRequest]:
        """What was put and has not ended."""
        with self._changed:
            waiting = [transfer for queue in self._waiting.values() for transfer in queue]
            return [transfer.request for transfer in dict.fromkeys([*self._served, *waiting])]

    def close(self) -> list[Transfer]:
        """Hand out nothing more and wake everybody; the transfers that end here, for the caller to complete."""
        with self._changed:
            self._is_closed = True
            ended = []
            for queue in self._waiting.values():
                for transfer in queue:
                    transfer.error = ClosedError("the I/O backend was closed before the transfer was served")
                    if transfer.blocks_out == 0:
                        ended.append(transfer)
                queue.clear()
            self._changed.notify_all()
            return ended

    def abandon(self) -> list[Transfer]:
        """After `close`: the transfers that a stuck system call still holds."""
        with self._changed:
            stuck = list(self._served)
            for transfer in stuck:
                transfer.error = ClosedError(
                    f"the I/O backend was closed, but the device never answered for {transfer.request.key!r}"
                )
            return stuck

    def _next_block(self) -> tuple[Transfer, int, int] | None:
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
        limit = _DEMANDS_PER_WRITE if demands else _READ_AHEADS_PER_WRITE
        if not reads or (writes and self._reads_in_a_row >= limit):
            self._reads_in_a_row = 0
            return writes
        self._reads_in_a_row += 1
        return reads
