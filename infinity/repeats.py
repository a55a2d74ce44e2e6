"""Units that run several times in a row, as the layers of ALBERT do: read and uploaded once.

Such a unit *lingers*: it stays gathered after its run until another unit is about to be gathered, so that at no time
more is gathered than one unit at a time needs. Its repetitions are no part of the order of uses. That a unit repeats is
learned when it has happened once; until then, and where another unit runs in between, each run is a use of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.groups import Unit
from infinity.order import Access


class Repeats:
    """Decides which unit lingers. Used by the training thread.

    Args:
        release: releases what a unit has gathered.
    """

    def __init__(self, release: Callable[[Unit], None]) -> None:
        self._release = release
        self._repeating: set[int] = set()
        self._last: Access | None = None
        self._lingering: Unit | None = None

    def begin(self) -> None:
        """An iteration begins: the first use repeats nothing."""
        self._last = None

    def is_repetition(self, access: Access) -> bool:
        """A unit was gathered for a use: whether the one before was the same, which is remembered."""
        if access == self._last:
            self._repeating.add(access.unit)
            return True
        self._last = access
        return False

    def make_way(self, unit: Unit | None = None) -> None:
        """Another unit than `unit` lingers no more: memory is about to be asked for, or the forward is over."""
        lingering = self._lingering
        if lingering is not None and lingering is not unit:
            self._lingering = None
            self._release(lingering)

    def run_over(self, unit: Unit) -> None:
        """A run of a unit is over: release it, or let it linger."""
        self.make_way(unit)
        if unit.index in self._repeating:
            self._lingering = unit
        else:
            self._release(unit)

    def forget(self) -> None:
        """Everything has been released by other means."""
        self._lingering = None
