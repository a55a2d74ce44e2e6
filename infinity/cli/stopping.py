"""Ctrl-C and SIGTERM: they end a command wherever it is, except where an exception would do harm or be lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.01  # what drops an exception is over by then


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken like Ctrl-C: what was opened gets closed."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, and SIGTERM Terminated, whatever the main thread is doing.

    Python calls signal handlers between two instructions of the main thread, wherever it is, and drops what they raise
    inside callbacks of weak references (every import runs one), finalizers and callbacks from C. A stop that is dropped
    there is asked for again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    dropped = _DroppedStops()
    terminate_before, hook_before = signal.signal(signal.SIGTERM, stop), sys.unraisablehook
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        dropped.forget()
        signal.signal(signal.SIGTERM, terminate_before)


class _DroppedStops:
    """The hook for exceptions that nobody can catch: asks again for a stop that is among them.

    By a timer and not by a thread: a callback may run while its thread holds any lock of Python's libraries.
    """

    def __init__(self) -> None:
        self._hook = sys.unraisablehook
        self._alarm_before: signal._HANDLER | None = None
        self._timer_before = (0.0, 0.0)
        self._is_armed = False
        self._number = signal.SIGINT

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hook(unraisable)
            return
        self._number = signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT
        if not self._is_armed:
            self._is_armed = True
            self._alarm_before = signal.signal(signal.SIGALRM, self._ask_again)
            self._timer_before = signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    def forget(self) -> None:
        """Ask for nothing more, and leave the timer as it was. Idempotent."""
        if self._is_armed:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm_before or signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, *self._timer_before)

    def _ask_again(self, number: int, frame: FrameType | None) -> None:
        self.forget()
        signal.raise_signal(self._number)  # for whoever heeds it by now: see `undisturbed` and `deferred`


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect inside: for closing, which is bounded, and has to come to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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

    # What is ignored stays so: a shell that starts a job in the background lets it ignore Ctrl-C.
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise Terminated if arrived[0] == signal.SIGTERM else KeyboardInterrupt
