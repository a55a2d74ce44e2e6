"""How fast a checkpoint is written behind training: it leaves most of the time to training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 4  # works one part in so many of the time


class Pace:
    """Rests after every piece of work, three times as long as that took, until somebody is in a hurry.

    What a save copies and reads takes the drives and the memory that training uses; done at once it holds training up,
    done in small pieces it goes into the gaps that training leaves. `rest` is called by the thread that writes, `hurry`
    by any.

    Args:
        on_work: told of every piece of work.
        clock: gives seconds.

    Attributes:
        rests: how often it has rested.
    """

    def __init__(self, on_work: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rests = 0
        self._on_work = on_work
        self._clock = clock
        self._is_in_a_hurry = threading.Event()
        self._since_s = self._clock()

    def hurry(self) -> None:
        """Somebody waits: no rests from now on, and the present one ends."""
        self._is_in_a_hurry.set()

    def begin(self) -> None:
        """Work begins: what has been before does not count."""
        self._since_s = self._clock()

    def rest(self) -> None:
        """A piece of work has been done; returns when it is time for the next one."""
        self._on_work()
        if not self._is_in_a_hurry.is_set():
            self.rests += 1
            self._is_in_a_hurry.wait((SHARE - 1) * (self._clock() - self._since_s))
        self._since_s = self._clock()
