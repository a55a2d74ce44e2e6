"""The same work for many things at once, in forks of this process: they have loaded all that it has.

Every process takes the next thing that none has taken, and this one works as well. What a fork does not give back,
because its work failed or something ended it, is worked out here: an error is raised where it can be caught.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from tempfile import TemporaryFile
from typing import BinaryIO, NoReturn, TypeVar

from infinity.optim.kernel_threads import usable_cores

_T = TypeVar("_T")
_R = TypeVar("_R")

_STOPS = (signal.SIGINT, signal.SIGTERM)
_NUMBERS = array("I")


def side_by_side(
    work: Callable[[_T], _R],
    things: Sequence[_T],
    *,
    n_processes: int | None = None,
    on_first: Callable[[_R], object] = lambda made: None,
) -> list[_R]:
    """What `work` makes of each, in order. It may change nothing, and what it makes has to be picklable.

    Args:
        on_first: told what it makes of the first thing, by this process, as soon as it has; others are under way then.
        n_processes: with this one; None: as many as there are cores, or only this one where it cannot be forked.
    """
    if n_processes is None:
        n_processes = usable_cores() if _can_fork() else 1
    n_forks = min(n_processes, len(things)) - 1
    if n_forks < 1:
        made = [work(thing) for thing in things[:1]]
        for first in made:
            on_first(first)
        return made + [work(thing) for thing in things[1:]]
    with ExitStack() as stack:
        numbers = stack.enter_context(TemporaryFile(buffering=0))
        numbers.write(array(_NUMBERS.typecode, range(1, len(things))))
        numbers.seek(0)

        def share() -> dict[int, _R]:
            made = {}
            with suppress(Exception):  # it is raised below, of the first thing that raises one
                for number in _taken(numbers):
                    made[number] = work(things[number])
            return made

        pipes = []
        with suppress(OSError):  # as many as the system allows
            for _ in range(n_forks):
                pipes.append(stack.enter_context(_fork(share)))
        first = work(things[0])
        on_first(first)
        shared = {0: first} | share()
        for pipe in pipes:
            with suppress(EOFError, pickle.UnpicklingError):  # something ended it
                shared |= pickle.load(pipe)
    return [shared[number] if number in shared else work(thing) for number, thing in enumerate(things)]


def _can_fork() -> bool:
    """Whether no other thread can hold a lock, which would stay held in a fork, and the system is made for forks."""
    return sys.platform == "linux" and threading.active_count() == 1


def _taken(numbers: FileIO) -> Iterator[int]:
    """Numbers that no other process takes: they share the place up to which the file has been read.

    Ends early when whoever started this process is gone, for then nobody waits for it.
    """
    parent = os.getppid()
    while os.getppid() == parent and (number := numbers.read(_NUMBERS.itemsize)):
        yield int.from_bytes(number, sys.byteorder)


@contextmanager
def _fork(work: Callable[[], object]) -> Iterator[BinaryIO]:
    """A fork of this process that writes what it makes, pickled, to the pipe given. It is ended at the end."""
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe:
        with open(writing, "wb") as given, _stops_held_back():
            child = _forked()
            if child == 0:
                _work_and_end(work, given)
        try:
            yield pipe
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@contextmanager
def _stops_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM arrive at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forked() -> int:
    with warnings.catch_warnings():
        # Python warns of all threads there are. Those of libraries that compute wait for work, and know forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _work_and_end(work: Callable[[], object], given: BinaryIO) -> NoReturn:
    """All that a fork does. Nothing else of what this process was about to do is left to it."""
    try:
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        pickle.dump(work(), given)
        given.flush()
    finally:
        os._exit(0)
