"""Where the training thread is in the predicted order of accesses, and what it comes to next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice

from infinity.order import Access, Mode, Phase, Trace


class Course:
    """The trace under way and the position in it. At the end of a training iteration is a barrier: what lies past it is
    known once the optimizer step has been submitted.

    Args:
        passes_window: whether a unit has shards that do not lie in host memory; asked once for a trace.
    """

    def __init__(self, passes_window: Callable[[int], bool]) -> None:
        self._passes_window = passes_window
        self._trace: Trace = ()
        self._position = 0
        self._places_of: Trace | None = None  # the trace that `_places` are of
        self._places: list[int] = []  # of accesses whose shards pass the window
        self.mode = Mode.TRAIN
        self.barrier_open = False

    def move(self, mode: Mode, trace: Trace, position: int) -> None:
        """The training thread is at `trace[position]`."""
        self.mode, self._trace, self._position = mode, trace, position

    def leave(self) -> None:
        """Nothing is expected any more."""
        self._trace, self._position = (), 0

    @property
    def phase(self) -> Phase:
        """Of the access that the training thread is at, or has just left."""
        return self._trace[max(self._position - 1, 0)].phase

    def upcoming(self) -> Iterator[tuple[int, Access]]:
        """Accesses from the position on, with how many come before each: at most one round, and not past a barrier."""
        length = len(self._trace)
        for distance in range(length - self._position if self._ends_at_barrier else length):
            yield distance, self._trace[(self._position + distance) % length]

    def upcoming_reads(self) -> Iterator[tuple[int, Access]]:
        """Those of units that pass the window. Where most of a model lies in host memory they are few, and looked for
        whenever anything happens."""
        if self._places_of is not self._trace:
            self._places_of = self._trace
            self._places = [place for place, access in enumerate(self._trace) if self._passes_window(access.unit)]
        trace, position, places = self._trace, self._position, self._places
        first = bisect_left(places, position)
        for place in islice(places, first, None):
            yield place - position, trace[place]
        if not self._ends_at_barrier:
            for place in islice(places, first):
                yield place + len(trace) - position, trace[place]

    @property
    def _ends_at_barrier(self) -> bool:
        return self.mode is Mode.TRAIN and not self.barrier_open
