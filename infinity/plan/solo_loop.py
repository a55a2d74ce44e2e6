"""A loop on virtual time for one thread alone: what `VirtualTimeLoop` does, at a fraction of its price.

Nothing outside can wake it, so it asks no selector; its callbacks and timers are kept as they are, without handles that
know their context and without comparisons written in Python. A simulation spends most of its time in between tasks.
"""

from __future__ import annotations

import asyncio
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVarTuple, Unpack

from infinity.testing.clock import VirtualDeadlockError, describe_tasks

_Ts = TypeVarTuple("_Ts")

_RESOLUTION_S = 1e-9  # timers that are due within this are due
_LONGEST_JUMP_S = 86_400.0  # as real loops wait


class _Call(asyncio.TimerHandle):
    """A callback that is due now or later. Instead of the attributes of its base it has its own."""

    __slots__ = ("args", "function", "when_s")

    def __init__(self, when_s: float, function: Callable[..., object] | None, args: tuple[Any, ...]) -> None:
        self.when_s = when_s
        self.function = function
        self.args = args

    def __repr__(self) -> str:
        return f"<call of {self.function} at {self.when_s:g} s>"

    def when(self) -> float:
        return self.when_s

    def cancel(self) -> None:
        self.function, self.args = None, ()

    def cancelled(self) -> bool:
        return self.function is None


class SoloLoop(asyncio.SelectorEventLoop):
    """Jumps to its next timer when nothing is ready; timers of the same moment run in the order in which they were set.

    Callbacks run in the context of whoever runs the loop. What one raises ends the run.

    Args:
        limit_s: virtual time after which VirtualDeadlockError is raised: something polls what never comes.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._now_s = 0.0
        self._ready_calls: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._n_timers = 0
        self._is_running = self._is_stopping = self._is_made = False
        super().__init__()  # calls some of the methods below
        self._is_made = True

    def __del__(self) -> None:
        """One whose making was interrupted (Ctrl-C) has not all that its end would close."""
        if self._is_made:
            super().__del__()

    # What asyncio and its tasks call ---------------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = _Call(self._now_s, callback, args)
        self._ready_calls.append(call)
        return call

    call_soon_threadsafe = call_soon  # there is no other thread

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        call = _Call(when, callback, args)
        self._n_timers += 1
        heappush(self._timers, (when, self._n_timers, call))
        return call

    def is_running(self) -> bool:
        return self._is_running

    def stop(self) -> None:
        """After the callbacks that are ready now."""
        self._is_stopping = True

    def run_forever(self) -> None:
        """Until `stop`.

        Raises:
            VirtualDeadlockError: nothing can ever happen again, or it goes on for ever.
        """
        ready, timers = self._ready_calls, self._timers
        self._is_running = True
        _set_running_loop(self)
        try:
            while not self._is_stopping:
                while timers and timers[0][2].function is None:
                    heappop(timers)
                if not ready:
                    self._jump()
                if timers:
                    due_s = self._now_s + _RESOLUTION_S
                    while timers and timers[0][0] < due_s:
                        ready.append(heappop(timers)[2])
                for _ in range(len(ready)):  # what these make ready comes after timers that are due by then
                    call = ready.popleft()
                    if (function := call.function) is not None:
                        function(*call.args)
        finally:
            self._is_running = self._is_stopping = False
            _set_running_loop(None)

    def _jump(self) -> None:
        if not self._timers:
            raise VirtualDeadlockError(
                f"deadlock at virtual time {self._now_s:g} s: nothing is ready and no timer is set\n"
                f"{describe_tasks(self)}"
            )
        due_s = self._timers[0][0]
        if due_s > self._now_s:
            self._now_s = min(due_s, self._now_s + _LONGEST_JUMP_S)
            if self._now_s > self._limit_s:
                raise VirtualDeadlockError(f"still running at virtual time {self._now_s:g} s\n{describe_tasks(self)}")
