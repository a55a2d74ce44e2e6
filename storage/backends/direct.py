"""O_DIRECT transfers on worker threads: the default data path.

`preadv` and `pwritev` release the GIL; Python work is per block, a few microseconds for a millisecond of I/O, and is
measured: `cost`.
"""

from __future__ import annotations

import logging
import threading
import time

from storage.backends.cost import IoCost
from storage.backends.queue import Block, BlockQueue
from storage.backends.system import SystemCalls, move, without_frames
from storage.errors import StorageError
from storage.types import IoRequest

_log = logging.getLogger(__name__)


class DirectBackend:
    """Serves requests with `preadv`/`pwritev` on a few threads.

    Args:
        threads: how many blocks are at the device at the same time.
        block_nbytes: size of one system call; a page multiple.
        calls: the system calls; tests put others in.
        close_timeout_s: how long `close` waits for calls that are in the kernel.
        eio_retries: how often a block is tried again after EIO.
        write_memory_nbytes: see `BlockQueue`.
    """

    name = "direct"
    opens_direct = True

    def __init__(
        self,
        *,
        threads: int,
        block_nbytes: int,
        calls: SystemCalls | None = None,
        close_timeout_s: float = 30.0,
        eio_retries: int = 0,
        write_memory_nbytes: int | None = None,
    ) -> None:
        self._queue = BlockQueue(block_nbytes, write_memory_nbytes)
        self._calls = calls or SystemCalls()
        self._close_timeout_s = close_timeout_s
        self._eio_retries = eio_retries
        self._costs = [IoCost() for _ in range(threads)]  # one per thread, which alone writes it: no lock is needed
        self._threads = [
            threading.Thread(target=self._serve, args=(self._costs[number],), name=f"infinity-io-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def progress(self) -> int:
        return sum(cost.operations for cost in self._costs)

    @property
    def cost(self) -> IoCost:
        return IoCost.total(self._costs)

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)

    def promote(self, key: str) -> None:
        self._queue.promote(key)

    def in_flight(self) -> list[IoRequest]:
        return self._queue.requests()

    def close(self) -> None:
        for transfer in self._queue.close():
            transfer.complete()
        deadline_s = time.monotonic() + self._close_timeout_s
        # A completion's callback may close: then one of the threads is this one, and has nothing in service.
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = self._queue.abandon() if any(thread.is_alive() for thread in others) else []
        for transfer in stuck:
            _log.error("%s of %s never ended", transfer.request.op.value, transfer.request.key)
            transfer.complete()

    def _serve(self, cost: IoCost) -> None:
        queue, seat = self._queue, self._queue.sit_down()
        resumed_s = time.thread_time()
        while (block := queue.take(seat)) is not None:
            left_s = time.thread_time()
            cost.python_s += left_s - resumed_s
            error, resumed_s = self._serve_block(block, cost, left_s)
            cost.operations += 1
            transfer = block[0]
            if queue.block_done(transfer, error, seat):
                transfer.complete()
            del block, transfer, error  # an idle worker keeps nobody's memory alive

    def _serve_block(self, block: Block, cost: IoCost, began_s: float) -> tuple[BaseException | None, float]:
        """Move a block and have it checked; what went wrong, and the thread's CPU time at the end."""
        transfer, start, stop = block
        request = transfer.request
        error: BaseException | None = None
        try:
            move(self._calls, request, start, stop, eio_retries=self._eio_retries)
            if request.check is not None:
                moved_s = time.thread_time()
                cost.system_s += moved_s - began_s
                request.check(start, stop)
                ended_s = time.thread_time()
                cost.check_s += ended_s - moved_s
                return None, ended_s
        except StorageError as caught:  # it says itself what happened where
            error = without_frames(caught)
        except BaseException as caught:  # whatever it is, the ticket has to carry it
            error = caught
        ended_s = time.thread_time()
        cost.system_s += ended_s - began_s
        return error, ended_s
