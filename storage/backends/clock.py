"""Clocks for backends that make transfers late on purpose: the real one, and one that tests move by hand."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)

Action = Callable[[], None]


class Clock(Protocol):
    """Tells the time, and calls back at a time. Actions must be short; they may use the clock themselves."""

    def now_s(self) -> float:
        """Seconds since some fixed moment."""

    def call_at(self, when_s: float, action: Action) -> None:
        """Call `action` once, not before `when_s`; never from inside `call_at`. Dropped when the clock is closed."""

    def close(self) -> None:
        """Drop what is pending. Idempotent."""


class _Agenda:
    """Actions by time; those of the same time in the order they came. Not thread safe."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def add(self, when_s: float, action: Action) -> None:
        heapq.heappush(self._entries, (when_s, next(self._numbers), action))

    def next_s(self) -> float | None:
        return self._entries[0][0] if self._entries else None

    def pop_due(self, now_s: float) -> Action | None:
        if self._entries and self._entries[0][0] <= now_s:
            return heapq.heappop(self._entries)[2]
        return None

    def clear(self) -> None:
        self._entries.clear()


class SystemClock:
    """Real time; actions run on one thread of the clock, which starts with the first of them."""

    def __init__(self) -> None:
        self._agenda = _Agenda()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def now_s(self) -> float:
        return time.monotonic()

    def call_at(self, when_s: float, action: Action) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._agenda.add(when_s, action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infinity-io-clock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._agenda.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (action := self._wait_for_next()) is not None:
            try:
                action()
            except Exception:
                _log.exception("an action of the clock failed")
            del action  # an idle clock keeps nobody's memory alive

    def _wait_for_next(self) -> Action | None:
        with self._changed:
            while not self._is_closed:
                action = self._agenda.pop_due(self.now_s())
                if action is not None:
                    return action
                next_s = self._agenda.next_s()
                self._changed.wait(None if next_s is None else max(0.0, next_s - self.now_s()))
            return None


class ManualClock:
    """Time stands still until `advance`; due actions run in its caller's thread, in order.

    Example:
        >>> clock = ManualClock()
        >>> clock.call_at(2.0, lambda: print("at", clock.now_s()))
        >>> clock.advance(1.5)
        >>> clock.advance(1.0)
        at 2.0
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._agenda = _Agenda()
        self._is_closed = False
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            return self._now_s

    def call_at(self, when_s: float, action: Action) -> None:
        with self._lock:
            if not self._is_closed:
                self._agenda.add(when_s, action)

    def next_s(self) -> float | None:
        """When the next action is due; None when there is none."""
        with self._lock:
            return self._agenda.next_s()

    def advance(self, seconds: float) -> None:
        """Let time pass; it stops at every action on the way, and actions may add others."""
        with self._lock:
            end_s = self._now_s + seconds
        while (action := self._step(end_s)) is not None:
            action()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._agenda.clear()

    def _step(self, end_s: float) -> Action | None:
        with self._lock:
            next_s = self._agenda.next_s()
            if next_s is None or next_s > end_s:
                self._now_s = end_s
                return None
            self._now_s = max(self._now_s, next_s)
            return self._agenda.pop_due(self._now_s)
