"""Ctrl-C and SIGTERM: they end a command wherever it is, except where an exception would do harm or be lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_STOPS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.02  # what loses an exception is over by then
_IMPORTING = "<frozen importlib._bootstrap>"


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C: what was opened gets closed."""

    def __str__(self) -> str:
        return "stopped by SIGTERM"


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, and SIGTERM Terminated, whatever the main thread is doing.

    Python calls signal handlers between two instructions of the main thread, wherever it is. What they raise is lost in
    callbacks of weak references, finalizers and callbacks from C, and in the initialisation of some extension modules
    (those of numpy.random, for example). So a stop that arrives during an import waits for its end, unless it is asked
    for a second time, and one that is lost elsewhere is asked for again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stops = _Stops()
    hook_before, sys.unraisablehook = sys.unraisablehook, stops.look_at
    heeded = [n for n in _STOPS if n == signal.SIGTERM or _is_heeded(n)]
    before = {number: signal.signal(number, stops.stop) for number in heeded}
    try:
        yield
    finally:
        _put_back(before)
        sys.unraisablehook = hook_before
        stops.forget()


class _Stops:
    """Handles the signals, and asks again for stops that are lost or came too early.

    By a timer and not by a thread: a callback may run while its thread holds any lock of Python's libraries.
    """

    def __init__(self) -> None:
        self._hook = sys.unraisablehook
        self._alarm_before: signal._HANDLER | None = None
        self._timer_before = (0.0, 0.0)
        self._is_armed = False
        self._has_waited = False  # a stop arrived during an import
        self._number: int = signal.SIGINT

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if not self._has_waited and _is_importing(frame):
            self._has_waited = True
            self._ask_later(number)
        else:
            self.forget()  # what it would ask for is raised now
            self._raise(number)

    def look_at(self, unraisable: sys.UnraisableHookArgs) -> None:
        """The hook for exceptions that nobody can catch."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._ask_later(signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT)
        else:
            self._hook(unraisable)

    def forget(self) -> None:
        """Ask for nothing more, and leave the timer as it was. Idempotent."""
        if self._is_armed:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm_before or signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, *self._timer_before)

    def _ask_later(self, number: int) -> None:
        self._number = number
        if not self._is_armed:
            self._is_armed = True
            self._alarm_before = signal.signal(signal.SIGALRM, self._ask_again)
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)

    def _ask_again(self, number: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            return  # until the next alarm
        self.forget()
        if signal.getsignal(self._number) == self.stop:  # else see `undisturbed` and `deferred`
            self._raise(self._number)
        signal.raise_signal(self._number)

    @staticmethod
    def _raise(number: int) -> NoReturn:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Whether this code runs in the middle of an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect inside: for closing, which is bounded, and has to come to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    try:
        yield
    finally:
        _put_back(before)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end: for imports, which an exception in their middle leaves half done.

    Some of torch's modules even swallow it, and the run would go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not arrived:
            print("stopping as soon as everything is loaded", file=sys.stderr)
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in filter(_is_heeded, _STOPS)}
    try:
        yield
    finally:
        _put_back(before)
    if arrived:
        raise Terminated if arrived[0] == signal.SIGTERM else KeyboardInterrupt


def _is_heeded(number: int) -> bool:
    """What is ignored stays so: a shell that starts a job in the background lets it ignore Ctrl-C."""
    return signal.getsignal(number) is not signal.SIG_IGN


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers that were there before, by signal."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
