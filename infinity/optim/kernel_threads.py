"""A few threads for kernels that release the GIL."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.closing import Closing

_MOST_THREADS = 8  # update kernels are bound by memory bandwidth well before that
_RUN_TIMEOUT_S = 600.0  # a chunk takes milliseconds; only a machine that stopped gets here


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class KernelThreads(Closing):
    """Runs the parts of one kernel call side by side. Owned by whoever builds it; `close()` joins the threads.

    `count` includes the calling thread, so one thread means none are started. `None` takes what the machine has.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            count = min(usable_cores(), _MOST_THREADS)
        if count < 1:
            raise ValueError(f"at least one thread is needed, got {count}")
        self.count = count
        self._closed = False
        self._pool = ThreadPoolExecutor(count - 1, thread_name_prefix="infinity-kernel") if count > 1 else None

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run all parts, the first on the calling thread, and wait for them. Raises what the first failed one raised.

        RuntimeError when closed, TimeoutError when a part does not come back.
        """
        if self._closed:
            raise RuntimeError("these kernel threads are closed")
        if self._pool is None:
            for part in parts:
                part()
            return
        futures = [self._pool.submit(part) for part in parts[1:]]
        try:
            for part in parts[:1]:
                part()
        finally:
            # Also after a failure: the others write into the caller's memory until they are done.
            failures = [future.exception(_RUN_TIMEOUT_S) for future in futures]
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Join the threads, which end with the parts they run: kernels wait for nothing. Idempotent."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
