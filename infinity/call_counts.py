"""How often every unit has been called, and how many of those calls have had their backward.

[Note: when a gradient is complete]
After the backward of a unit, unless the unit ran several times, shares parameters with another unit, or was used
outside its own forward; then at the end of backward. A forward is counted when it runs in training mode and as long as
its graph lives, a backward when it is over; a group is complete early only when both counts agree.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from infinity.groups import Unit
from infinity.hooks import live_with_graph


class _Forward:
    """One outermost forward in training mode: how often every unit ran. Lives as long as the graph that it made."""

    __slots__ = ("__weakref__", "calls")

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()


class CallCounts:
    """Counts for one iteration. Used by the training thread."""

    def __init__(self) -> None:
        self._forwards: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._running: _Forward | None = None
        self._kept: list[_Forward] = []  # of graphs whose end cannot be seen
        self._backwards: Counter[int] = Counter()

    def begin_forward(self, *, trains: bool) -> None:
        """An outermost forward begins."""
        self._running = None
        if trains:
            self._running = _Forward()
            self._forwards.add(self._running)

    def called(self, unit: Unit) -> None:
        """A unit runs in the forward under way; a recomputation in a backward does not count."""
        if self._running is not None:
            self._running.calls[unit.index] += 1

    def end_forward(self, output: Any) -> None:
        """The forward is over; its calls count as long as the graph behind `output` lives. None when it failed."""
        forward, self._running = self._running, None
        if forward is not None and output is not None and not live_with_graph(output, forward):
            self._kept.append(forward)

    def drop_forward(self) -> None:
        """The forward under way was interrupted."""
        self._running = None

    def end_backward_of(self, unit: Unit) -> bool:
        """The backward of one call is over; whether that was the last one there is to come."""
        self._backwards[unit.index] += 1
        return self._backwards[unit.index] == sum(forward.calls[unit.index] for forward in self._forwards)

    def end_backward(self) -> None:
        """No backward is running any more."""
        self._backwards.clear()

    def called_several_times(self) -> set[int]:
        """Indices of the units that ran more than once in forwards whose graph lives."""
        calls = sum((forward.calls for forward in self._forwards), Counter[int]())
        return {unit for unit, count in calls.items() if count > 1}

    def clear(self) -> None:
        """The step is over: counts start again."""
        self._backwards.clear()
        self._forwards.clear()
        self._kept.clear()
