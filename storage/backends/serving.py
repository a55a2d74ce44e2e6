"""What the backends share that serve requests themselves: the queue and its options, and what serving costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypedDict

from storage.backends.cost import IoCost
from storage.backends.queue import BlockQueue, shut_down
from storage.types import IoRequest


class CostMeasured:
    """Counts blocks, and CPU time, for each of `threads` threads."""

    def __init__(self, threads: int = 1) -> None:
        self._costs = [IoCost() for _ in range(threads)]  # one per thread, which alone writes it: no lock is needed

    @property
    def progress(self) -> int:
        return sum(cost.operations for cost in self._costs)

    @property
    def cost(self) -> IoCost:
        return IoCost.total(self._costs)


class QueueOptions(TypedDict, total=False):
    """How a queue of blocks is served.

    Attributes:
        close_timeout_s: how long `close` waits for what is in the kernel; 30 seconds if nothing is said.
        eio_retries: how often a block is tried again after EIO; not at all if nothing is said.
        write_memory_nbytes: see `BlockQueue`.
    """

    close_timeout_s: float
    eio_retries: int
    write_memory_nbytes: int | None


class QueuedBackend(CostMeasured):
    """A backend whose threads take blocks from a `BlockQueue`. Subclasses start the threads and move the blocks.

    Args:
        costs: how many threads note what they cost.
        block_nbytes: most bytes of a block; a page multiple.
    """

    def __init__(
        self,
        *,
        costs: int,
        block_nbytes: int,
        close_timeout_s: float = 30.0,
        eio_retries: int = 0,
        write_memory_nbytes: int | None = None,
    ) -> None:
        super().__init__(costs)
        self._queue = BlockQueue(block_nbytes, write_memory_nbytes)
        self._close_timeout_s = close_timeout_s
        self._eio_retries = eio_retries
        self._threads: Sequence[threading.Thread] = ()

    def promote(self, key: str) -> None:
        self._queue.promote(key)

    def in_flight(self) -> list[IoRequest]:
        return self._queue.requests()

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start the threads that serve; all of them, or none when the system has no more."""
        self._threads = threads
        try:
            for thread in threads:
                thread.start()
        except BaseException:
            self._threads = [thread for thread in threads if thread.ident is not None]
            self._shut_down()
            raise

    def _shut_down(self, wake: Callable[[], None] = lambda: None) -> None:
        """Close the queue; `wake` as in `shut_down`."""
        shut_down(self._queue, self._threads, self._close_timeout_s, wake)
