"""Who is inside the model: which thread runs an outermost forward, and whether that forward is still under way.

[Note: interrupted forwards]
torch runs the hooks behind a module after an `Exception`, but not after a KeyboardInterrupt or another BaseException.
So a forward may begin and never be seen to end. Whether one is under way is asked of the call stack when that
matters: when a forward begins while another one seems to run.

An engine serves one thread at a time: what is gathered, the order of uses, and which gradients are complete belong to
one iteration.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Set
from types import FrameType

from torch import nn

from infinity.errors import IterationError
from infinity.territory import Territory

_CALL = "_wrapped_call_impl"  # what `module(...)` runs
_BACKWARD = "_engine_run_backward"  # what every kind of backward runs


class Occupancy:
    """Counts nested calls of a model and its parts. Written by the thread inside; the lock covers the way in."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module) for module in Territory(model).modules()}
        self._lock = threading.Lock()
        self._thread = 0
        self._depth = 0

    @property
    def is_inside(self) -> bool:
        """Whether a forward is under way."""
        return self._depth > 0

    def enter(self, *, backward_is_open: bool) -> bool:
        """A forward of the model, or of a part with units in it, begins. True when it is an outermost one.

        Args:
            backward_is_open: a backward has begun and has not been seen to end.

        Raises:
            IterationError: another thread is inside the model, in a forward or a backward.
        """
        with self._lock:
            self._notice_interrupted(calls_of_this=1)
            if self._depth:
                self._refuse_other_thread()
            elif backward_is_open and _others_in_backward():
                raise IterationError(f"a forward begins while another thread runs a backward. {_ONE_THREAD}")
            self._thread = threading.get_ident()
            self._depth += 1
            return self._depth == 1

    def check(self) -> None:
        """A unit is used in a forward.

        Raises:
            IterationError: another thread is inside the model.
        """
        if self._depth and self._thread != threading.get_ident():
            with self._lock:
                self._notice_interrupted(calls_of_this=0)
                self._refuse_other_thread()

    def leave(self) -> bool:
        """A forward of the model is over, or was refused. True when it was the outermost one."""
        if self._thread != threading.get_ident():
            return False
        self._depth = max(self._depth - 1, 0)
        return self._depth == 0

    def has_gone(self) -> bool:
        """Whether no forward is under way any more, whether or not it was seen to end."""
        with self._lock:
            self._notice_interrupted(calls_of_this=0)
            return not self._depth

    def clear(self) -> None:
        """Nobody is inside any more."""
        self._depth = 0

    def _notice_interrupted(self, calls_of_this: int) -> None:
        if self._depth:
            own = calls_of_this if self._thread == threading.get_ident() else 0
            if not _is_called(self._thread, self._modules, beyond=own):
                self._depth = 0

    def _refuse_other_thread(self) -> None:
        if self._depth and self._thread != threading.get_ident():
            raise IterationError(f"a forward begins while another thread is inside the model. {_ONE_THREAD}")


_ONE_THREAD = "An engine serves one thread at a time; put a lock around forward and backward, or offload two models"


def _is_called(thread: int, modules: Set[int], beyond: int) -> bool:
    """Whether more than `beyond` calls of any of the modules (by id) are under way on a thread."""
    is_this = thread == threading.get_ident()
    frame: FrameType | None = sys._getframe() if is_this else _frames().get(thread)  # None when it has ended
    while frame is not None:
        if frame.f_code.co_name == _CALL and id(frame.f_locals.get("self")) in modules:
            beyond -= 1
            if beyond < 0:
                return True
        frame = frame.f_back
    return False


def _others_in_backward() -> bool:
    me = threading.get_ident()
    return any(thread != me and _is_in_backward(frame) for thread, frame in _frames().items())


def _is_in_backward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _BACKWARD:
            return True
        frame = frame.f_back
    return False


def _frames() -> dict[int, FrameType]:
    """What every thread is running.

    Python holds the lock on its list of threads meanwhile. A garbage collection in that moment may free a tensor, which
    lets other threads run, and one that is just starting waits for that lock: none of them goes on (fixed in newer
    versions of Python, which do not collect then either).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
