"""O_DIRECT transfers on worker threads: the default data path.

`preadv` and `pwritev` release the GIL; Python work is per block, a few microseconds for a millisecond of I/O.
"""

from __future__ import annotations

import logging
import threading
import time

from storage.backends.queue import BlockQueue
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
    ) -> None:
        self._queue = BlockQueue(block_nbytes)
        self._calls = calls or SystemCalls()
        self._close_timeout_s = close_timeout_s
        self._eio_retries = eio_retries
        self._blocks_done = [0] * threads  # one counter per thread, so that none needs a lock
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

    def _serve(self, number: int) -> None:
        while (block := self._queue.take()) is not None:
            transfer, start, stop = block
            error: BaseException | None = None
            try:
                move(self._calls, transfer.request, start, stop, eio_retries=self._eio_retries)
                if transfer.request.check is not None:
                    transfer.request.check(start, stop)
            except StorageError as caught:  # it says itself what happened where
                error = without_frames(caught)
            except BaseException as caught:  # whatever it is, the ticket has to carry it
                error = caught
            self._blocks_done[number] += 1
            if self._queue.block_done(transfer, error):
                transfer.complete()
            del block, transfer, error  # an idle worker keeps nobody's memory alive
