"""Clocks, and an asyncio loop whose time is virtual: schedules of seconds run in microseconds, and always the same way.

In a test:

    run_virtual(main())                           # any coroutine, on a fresh VirtualTimeLoop

or for every coroutine test of a folder, in its `conftest.py` (pytest-asyncio 1.4 or later):

    def pytest_asyncio_loop_factories(config, item):
        return {"virtual": VirtualTimeLoop}
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context
from itertools import count
from typing import Any, Protocol, Self, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_CLOCK_RESOLUTION_S = 1e-9
_JOB_TIMEOUT_S = 60.0


class Clock(Protocol):
    """Where blocking code gets its time from."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def sleep(self, duration_s: float) -> None:
        """Return when `duration_s` has passed; at once when it is not positive."""


class RealClock:
    """The time of the machine, the same that asyncio loops use."""

    def now_s(self) -> float:
        """`time.monotonic`, in seconds."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Block this thread for so many seconds."""
        if duration_s > 0:
            time.sleep(duration_s)


class VirtualClock:
    """Time that passes only when somebody sleeps: a sleep returns at once, later. Thread safe."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds of virtual time."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        if duration_s > 0:
            with self._lock:
                self._now_s += duration_s


class VirtualDeadlockError(RuntimeError):
    """Nothing on a virtual loop can ever happen again, or it goes on for ever; the message names the pending tasks."""


class _Moment(float):
    """The time of a timer. Of two that are equal, the one that was set first comes first."""

    number: int

    def __new__(cls, when: float, number: int) -> Self:
        moment = super().__new__(cls, when)
        moment.number = number
        return moment

    def __lt__(self, other: float) -> bool:
        if isinstance(other, _Moment) and float.__eq__(self, other):
            return self.number < other.number
        return float.__lt__(self, other)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that jumps to its next timer instead of waiting for it.

    Where a real loop would hang - nothing is ready, no timer is set - it raises VirtualDeadlockError out of
    `run_until_complete` (and so out of the test), naming the pending tasks and the lines they wait at. Jobs given to
    `run_in_executor` and `asyncio.to_thread` are waited for while the time stands still. Other threads are unknown to
    the loop: where they complete what the loop waits for, give it real time for them with `thread_grace_s`.

    Timers of the same moment run in the order in which they were set, so what is handed to a queue at one time stays in
    order. A real loop promises that only for different moments, and no two of its moments are the same.

    Args:
        clock: the time of the loop, to be shared with blocking code; default its own, starting at zero.
        thread_grace_s: real seconds to wait for other threads before a deadlock is declared.
        limit_s: virtual time after which VirtualDeadlockError is raised: something polls what never comes.
    """

    def __init__(
        self, clock: VirtualClock | None = None, *, thread_grace_s: float = 0.0, limit_s: float = 1_000_000.0
    ) -> None:
        self.clock = VirtualClock() if clock is None else clock
        self._thread_grace_s = thread_grace_s
        self._limit_s = limit_s
        self._n_jobs = 0
        self._timers = count()
        super().__init__(_JumpingSelector(self._wait))
        self._clock_resolution = _CLOCK_RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds."""
        return self.clock.now_s()

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return super().call_at(_Moment(when, next(self._timers)), callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        self._n_jobs += 1
        future.add_done_callback(self._job_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._n_jobs += 1  # the base class waits for a thread that joins the workers
        try:
            await super().shutdown_default_executor()
        finally:
            self._n_jobs -= 1

    def _job_done(self, _: asyncio.Future[Any]) -> None:
        self._n_jobs -= 1

    def _wait(self, select: Callable[[float], _Events], timeout_s: float | None) -> _Events:
        """What the loop does when it has nothing to run before `timeout_s` (None: ever)."""
        if self._n_jobs:
            if events := select(_JOB_TIMEOUT_S):
                return events
            raise VirtualDeadlockError(f"a thread job did not finish in {_JOB_TIMEOUT_S:g} s\n{describe_tasks(self)}")
        if timeout_s is None:
            if self._thread_grace_s and (events := select(self._thread_grace_s)):
                return events
            raise VirtualDeadlockError(
                f"deadlock at virtual time {self.time():g} s: nothing is ready and no timer is set; "
                f"what another thread completes needs VirtualTimeLoop(thread_grace_s=...)\n{describe_tasks(self)}"
            )
        self.clock.sleep(timeout_s)
        if self.time() > self._limit_s:
            raise VirtualDeadlockError(f"still running at virtual time {self.time():g} s\n{describe_tasks(self)}")
        return []


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """The pending tasks of a loop and the lines they wait at."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"  {task.get_name()}: {_where(task)}" for task in tasks]
    return "\n".join(["pending tasks:", *lines]) if lines else "no task is pending"


def run_virtual(main: Coroutine[Any, Any, _T], *, thread_grace_s: float = 0.0) -> _T:
    """Run a coroutine on a fresh `VirtualTimeLoop` and return its result; tasks it leaves behind are cancelled.

    Where a loop runs in this thread already, as in a notebook, that waits, and the coroutine runs in another thread.
    """

    def run() -> _T:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(thread_grace_s=thread_grace_s)) as runner:
            return runner.run(main)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, thread_name_prefix="infinity-virtual") as thread:
        return thread.submit(run).result()


_Events = list[tuple[selectors.SelectorKey, int]]


class _JumpingSelector(selectors.BaseSelector):
    """A selector that asks `wait` what to do where it would sleep; file descriptors are still watched."""

    def __init__(self, wait: Callable[[Callable[[float], _Events], float | None], _Events]) -> None:
        self._real = selectors.DefaultSelector()
        self._wait = wait

    def select(self, timeout: float | None = None) -> _Events:
        events = self._real.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        return self._wait(self._real.select, timeout)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that a suspended task waits at, and the coroutine it runs."""
    coroutine: Any = task.get_coro()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    line = "not started"
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return f"{name} waits at {line}"
