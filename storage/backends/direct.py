"""O_DIRECT transfers on worker threads: the default data path.

`preadv` and `pwritev` release the GIL; Python work is per block, a few microseconds for a millisecond of I/O, and is
measured: `cost`.
"""

from __future__ import annotations

import threading
import time
from typing import Unpack

from storage.backends.cost import IoCost
from storage.backends.queue import Block
from storage.backends.serving import QueuedBackend, QueueOptions
from storage.backends.system import SystemCalls, move, without_frames
from storage.errors import StorageError
from storage.types import IoRequest

_MEASURED_NBYTES = 64 << 10  # of smaller blocks, one in so many is measured:
_SAMPLED = 8


class DirectBackend(QueuedBackend):
    """Serves requests with `preadv`/`pwritev` on a few threads.

    Args:
        threads: how many blocks are at the device at the same time.
        block_nbytes: size of one system call; a page multiple.
        calls: the system calls; tests put others in.
        options: see `QueueOptions`.
    """

    name = "direct"
    opens_direct = True

    def __init__(
        self, *, threads: int, block_nbytes: int, calls: SystemCalls | None = None, **options: Unpack[QueueOptions]
    ) -> None:
        super().__init__(costs=threads, block_nbytes=block_nbytes, **options)
        self._calls = calls or SystemCalls()
        self._start(
            [
                threading.Thread(target=self._serve, args=(cost,), name=f"infinity-io-{number}", daemon=True)
                for number, cost in enumerate(self._costs)
            ]
        )

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)

    def close(self) -> None:
        self._shut_down()

    def _serve(self, cost: IoCost) -> None:
        queue, seat = self._queue, self._queue.sit_down()
        began_s = time.thread_time()
        while (block := queue.take(seat)) is not None:
            weight = _weight(block, cost.operations)
            now_s = time.thread_time() if weight else 0.0
            if weight:
                cost.python_s = max(0.0, now_s - began_s - cost.system_s - cost.check_s)
            error = self._serve_block(block, cost, weight, now_s)
            cost.operations += 1
            transfer = block[0]
            if queue.block_done(transfer, error, seat):
                transfer.complete()
            del block, transfer, error  # an idle worker keeps nobody's memory alive

    def _serve_block(self, block: Block, cost: IoCost, weight: int, began_s: float) -> BaseException | None:
        """Move a block and have it checked; what went wrong. Measured, and counted `weight` times, unless that is 0."""
        transfer, start, stop = block
        request = transfer.request
        check_s = 0.0
        error: BaseException | None = None
        try:
            move(self._calls, request, start, stop, eio_retries=self._eio_retries)
            if request.check is not None:
                moved_s = time.thread_time() if weight else 0.0
                request.check(start, stop)
                check_s = time.thread_time() - moved_s if weight else 0.0
        except StorageError as caught:  # it says itself what happened where
            error = without_frames(caught)
        except BaseException as caught:  # whatever it is, the ticket has to carry it
            error = caught
        if weight:
            cost.check_s += weight * check_s
            cost.system_s += weight * (time.thread_time() - began_s - check_s)
        return error


def _weight(block: Block, operations: int) -> int:
    """How many blocks a measurement of this one stands for; 0: it is not measured.

    The thread's own CPU time is a system call, half a microsecond each: too much for every small block.
    """
    _, start, stop = block
    if stop - start >= _MEASURED_NBYTES:
        return 1
    return _SAMPLED if operations % _SAMPLED == _SAMPLED - 1 else 0
