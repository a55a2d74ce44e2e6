"""O_DIRECT transfers on worker threads: the default data path.

All workers serve one queue for all files, block by block, so the queue depth at the device spans transfers and files: a
1 MiB shard does not run alone while others wait. `preadv` and `pwritev` release the GIL; Python work is per block, a
few microseconds for a millisecond of I/O.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque

from storage.errors import ClosedError, IoError, ReadError, ShortIoError, SwapFullError, WriteError
from storage.types import IoRequest, Op, Priority

_READS_BEFORE_WRITE = 8  # with both waiting, one block in so many is a write, so that writes never starve
_MAX_RETRIES = 100
_JOIN_TIMEOUT_S = 30.0


class _Transfer:
    """A request being served: where its next block starts and how many are out. Guarded by the queue's lock."""

    __slots__ = ("blocks_out", "error", "next_offset", "request")

    def __init__(self, request: IoRequest) -> None:
        self.request = request
        self.next_offset = 0
        self.blocks_out = 0
        self.error: BaseException | None = None

    @property
    def is_exhausted(self) -> bool:
        return self.error is not None or self.next_offset >= len(self.request.memory)


class _BlockQueue:
    """Transfers by priority; hands out blocks. The lock is held for a few operations on deques."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._waiting: dict[Priority, deque[_Transfer]] = {priority: deque() for priority in Priority}
        self._serving: set[_Transfer] = set()
        self._reads_in_a_row = 0
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())

    def put(self, request: IoRequest) -> None:
        with self._changed:
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            self._waiting[request.priority].append(_Transfer(request))
            blocks = -(-len(request.memory) // self._block_nbytes)
            self._changed.notify(blocks)

    def take(self) -> tuple[_Transfer, int, int] | None:
        """The next block as (transfer, start, stop); blocks; None when closed."""
        with self._changed:
            while not (queue := self._next_queue()):
                if self._is_closed:
                    return None
                self._changed.wait()
            transfer = queue[0]
            start = transfer.next_offset
            stop = min(start + self._block_nbytes, len(transfer.request.memory))
            transfer.next_offset = stop
            transfer.blocks_out += 1
            self._serving.add(transfer)
            if transfer.is_exhausted:
                queue.popleft()
            return transfer, start, stop

    def block_done(self, transfer: _Transfer, error: BaseException | None) -> bool:
        """A block has ended; whether the whole transfer has."""
        with self._changed:
            transfer.blocks_out -= 1
            if error is not None and transfer.error is None:
                transfer.error = error
                queue = self._waiting[transfer.request.priority]
                if transfer in queue:
                    queue.remove(transfer)
            is_over = transfer.is_exhausted and transfer.blocks_out == 0
            if is_over:
                self._serving.discard(transfer)
            return is_over

    def requests(self) -> list[IoRequest]:
        with self._changed:
            waiting = [transfer for queue in self._waiting.values() for transfer in queue]
            return [transfer.request for transfer in {*waiting, *self._serving}]

    def close(self) -> list[_Transfer]:
        """Hand out nothing more; transfers of which no block was handed out."""
        with self._changed:
            self._is_closed = True
            dropped = []
            for queue in self._waiting.values():
                for transfer in queue:
                    transfer.error = ClosedError("the I/O backend was closed before the transfer was served")
                    if transfer.blocks_out == 0:
                        dropped.append(transfer)
                queue.clear()
            self._changed.notify_all()
            return dropped

    def _next_queue(self) -> deque[_Transfer] | None:
        reads = self._waiting[Priority.DEMAND] or self._waiting[Priority.READ_AHEAD]
        writes = self._waiting[Priority.WRITE]
        if reads and writes and not self._waiting[Priority.DEMAND] and self._reads_in_a_row >= _READS_BEFORE_WRITE:
            reads = deque()
        if reads:
            self._reads_in_a_row += 1
            return reads
        self._reads_in_a_row = 0
        return writes or None


class DirectBackend:
    """Serves requests with `preadv`/`pwritev` on a few threads.

    Args:
        threads: how many blocks are at the device at the same time.
        block_nbytes: size of one system call; a page multiple.
    """

    name = "direct"
    opens_direct = True

    def __init__(self, *, threads: int, block_nbytes: int) -> None:
        self._queue = _BlockQueue(block_nbytes)
        self._blocks_done = [0] * threads
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"infinity-io-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def progress(self) -> int:
        return sum(self._blocks_done)

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)

    def in_flight(self) -> list[IoRequest]:
        return self._queue.requests()

    def close(self) -> None:
        for transfer in self._queue.close():
            if transfer.error is not None:
                transfer.request.ticket.set_exception(transfer.error)
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def _serve(self, number: int) -> None:
        while (block := self._queue.take()) is not None:
            transfer, start, stop = block
            error: BaseException | None = None
            try:
                move(transfer.request, start, stop)
            except BaseException as caught:
                error = caught
            self._blocks_done[number] += 1
            if self._queue.block_done(transfer, error):
                ticket = transfer.request.ticket
                if transfer.error is None:
                    ticket.set_done()
                else:
                    ticket.set_exception(transfer.error)


def move(request: IoRequest, start: int, stop: int) -> None:
    """Transfer bytes `start` to `stop` of a request's memory; short transfers are resumed.

    Raises:
        ReadError, WriteError, SwapFullError, ShortIoError: what the system answered, and where.
    """
    call = os.preadv if request.op is Op.READ else os.pwritev
    retries = 0
    while start < stop:
        try:
            moved = call(request.fd, [request.memory[start:stop]], request.offset + start)
        except (InterruptedError, BlockingIOError) as error:
            retries += 1
            if retries > _MAX_RETRIES:
                raise io_error(request, start, stop, error) from error
            continue
        except OSError as error:
            raise io_error(request, start, stop, error) from error
        if moved == 0:
            raise ShortIoError(
                f"{request.op.value} of {request.key!r} ended at offset {request.offset + start} of {request.path}, "
                f"{stop - start} bytes early: the file is shorter than what was stored in it",
                path=request.path,
                offset=request.offset + start,
                nbytes=stop - start,
                key=request.key,
            )
        start += moved


def io_error(request: IoRequest, start: int, stop: int, error: OSError) -> IoError | SwapFullError:
    """The storage error for a system error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return SwapFullError(
            f"no room to write {stop - start} bytes of {request.key!r} at offset {request.offset + start} of "
            f"{request.path}: {error.strerror}. Free space there; the data is still in memory"
        )
    kind = ReadError if request.op is Op.READ else WriteError
    return kind(
        path=request.path,
        offset=request.offset + start,
        nbytes=stop - start,
        errno=error.errno,
        key=request.key,
    )
