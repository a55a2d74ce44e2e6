"""Virtual threads and virtual memory of a simulation: what the engine's policies run on where nothing is real.

The policies hand work to executors and hold host memory. Here a job runs in no time and *charges* the seconds that it
would take; memory is a range of addresses behind which there is nothing until somebody touches it, and nobody does.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack

from infinity.plan.solo_loop import SoloLoop

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named by Python since 3.13; this is Linux's value
_GROWTH_NBYTES = 1 << 30
_LIMIT_S = 1.6e7  # of simulated time; where a float holds no nanoseconds, timers of a loop are never due


class VirtualWorker(Executor):
    """One thread on virtual time: jobs run one after the other, each as long as it charges.

    Used on the thread of its `PlanLoop` only. `spans` are the jobs so far, as (start_s, end_s).
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._local_s = 0.0  # the time of the job under way, ahead of the loop's
        self.spans: list[tuple[float, float]] = []

    def charge(self, duration_s: float) -> None:
        """The job under way works for so long."""
        self._local_s += duration_s

    def wait_until(self, time_s: float) -> None:
        """The job under way waits for something that is over at `time_s`."""
        self._local_s = max(self._local_s, time_s)

    def run(self, loop: PlanLoop, job: Callable[[], _T]) -> asyncio.Future[_T]:
        """A future that has the job's result, or what it raised, when it is over. Both ways take a hand-over."""
        future: asyncio.Future[_T] = loop.create_future()
        loop.call_later(loop.hand_over_s, self._take, lambda: self._start(loop, job, future))
        return future

    def _take(self, start: Callable[[], None]) -> None:
        self._waiting.append(start)
        self._serve()

    def _serve(self) -> None:
        if not self._is_busy and self._waiting:
            self._is_busy = True
            self._waiting.popleft()()

    def _start(self, loop: PlanLoop, job: Callable[[], _T], future: asyncio.Future[_T]) -> None:
        start_s = self._local_s = loop.time()
        loop.at_work = self
        try:
            outcome: Callable[[], None] = partial(future.set_result, job())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        finally:
            loop.at_work = None
        self.spans.append((start_s, self._local_s))
        loop.call_at(self._local_s, self._end)
        loop.call_at(self._local_s + loop.hand_over_s, self._tell, future, outcome)

    def _end(self) -> None:
        self._is_busy = False
        self._serve()

    @staticmethod
    def _tell(future: asyncio.Future[Any], outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            outcome()


class PlanLoop(SoloLoop):
    """A virtual loop for simulations: its threads are virtual workers. `at_work` is the one whose job runs now.

    Args:
        hand_over_s: from the loop to a thread, and back.
    """

    def __init__(self, hand_over_s: float = 0.0) -> None:
        super().__init__(limit_s=_LIMIT_S)
        self.hand_over_s = hand_over_s
        self.at_work: VirtualWorker | None = None

    def charge(self, duration_s: float) -> None:
        """The job under way works for so long."""
        if self.at_work is not None:
            self.at_work.charge(duration_s)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Without an executor the job has a virtual thread of its own."""
        if executor is None:
            executor = VirtualWorker()
        if not isinstance(executor, VirtualWorker):
            raise TypeError("a simulation has virtual workers only")
        return executor.run(self, partial(func, *args))


class VirtualFence:
    """Implements `infinity.devices.base.Fence`: a copy that is over at a time known beforehand. Can be awaited."""

    def __init__(self, loop: PlanLoop, ready_s: float) -> None:
        self._loop = loop
        self.ready_s = ready_s

    @property
    def done(self) -> bool:
        """Whether that time has come."""
        return self._loop.time() >= self.ready_s

    def wait(self, timeout_s: float | None = None) -> None:
        """The job under way waits."""
        if self._loop.at_work is not None:
            self._loop.at_work.wait_until(self.ready_s)

    def __await__(self) -> Generator[Any, None, None]:
        while not self.done:
            yield from asyncio.sleep(self.ready_s - self._loop.time()).__await__()


class Link:
    """Copies one after the other at one rate. `spans` are (label, start_s, end_s)."""

    def __init__(self, loop: PlanLoop, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._loop = loop
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = 0.0
        self.spans: list[tuple[str, float, float]] = []

    def copy(self, label: str, nbytes: int, *, not_before_s: float = 0.0) -> VirtualFence:
        """Queue a copy that cannot start before a given time."""
        start_s = max(self._free_s, self._loop.time(), not_before_s)
        self._free_s = start_s + self._latency_s + nbytes / self._bytes_per_s
        self.spans.append((label, start_s, self._free_s))
        return VirtualFence(self._loop, self._free_s)


class SparseMemory:
    """Addresses without memory behind them. All blocks share one range, which nothing may read or write."""

    def __init__(self) -> None:
        self._range = memoryview(bytearray())

    def map(self, nbytes: int) -> memoryview:
        """A block for a `HostPool`."""
        if nbytes > len(self._range):
            size = -(-nbytes // _GROWTH_NBYTES) * _GROWTH_NBYTES
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._range = memoryview(mmap.mmap(-1, size, flags=flags))
        return self._range[:nbytes]
