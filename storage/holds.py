"""Spans of swap files that somebody still reads as they are: neither overwritten nor given to other keys meanwhile.

What a snapshot of a store refers to is held. A write of held bytes goes elsewhere (copy on write, without a copy: the
whole span is new anyway), and an extent that its key leaves is given back when the last hold on it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from storage.types import Extent


class Holds:
    """Which extents are held, and by how many. Not thread safe: its store's lock guards it."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, list[tuple[int, int]]]] = {}  # by hold and drive: (start, stop), sorted
        self._waiting: list[Extent] = []  # nobody's any more, but held
        self._count = 0

    def hold(self, extents: Sequence[Extent]) -> int:
        """Hold extents until `let_go` is called with the number that this returns."""
        by_drive: dict[int, list[tuple[int, int]]] = {}
        for extent in extents:
            by_drive.setdefault(extent.drive, []).append((extent.offset, extent.offset + extent.nbytes))
        self._count += 1
        self._held[self._count] = {drive: sorted(spans) for drive, spans in by_drive.items()}
        return self._count

    def covers(self, extent: Extent) -> bool:
        """Whether an allocated extent is held. Extents are only ever split, so it is held whole or not at all."""
        for by_drive in self._held.values():
            spans = by_drive.get(extent.drive)
            if spans:
                place = bisect_right(spans, (extent.offset, 1 << 62)) - 1
                if place >= 0 and extent.offset < spans[place][1]:
                    return True
        return False

    def keep_back(self, extents: Sequence[Extent]) -> list[Extent]:
        """Keys have left these extents; those that can be given back now."""
        if not self._held:
            return list(extents)
        free: list[Extent] = []
        for extent in extents:
            (self._waiting if self.covers(extent) else free).append(extent)
        return free

    def begin_again(self, in_use: Sequence[Extent]) -> list[Extent]:
        """The store goes back to keys that use these extents; what is held beyond them, and waits for its holds.

        It is cut wherever a hold begins or ends, so that each extent is held whole or not at all.
        """
        self._waiting = []
        for drive in sorted({drive for by_drive in self._held.values() for drive in by_drive}):
            changes: Counter[tuple[int, bool]] = Counter()  # at an offset: so many holds, or keys, more
            for by_drive in self._held.values():
                for start, stop in by_drive.get(drive, ()):
                    changes[start, True] += 1
                    changes[stop, True] -= 1
            for extent in in_use:
                if extent.drive == drive:
                    changes[extent.offset, False] += 1
                    changes[extent.end, False] -= 1
            holds = keys = 0
            for start, stop in pairwise(sorted({offset for offset, _ in changes})):
                holds += changes[start, True]
                keys += changes[start, False]
                if holds and not keys:
                    self._waiting.append(Extent(drive, start, stop - start))
        return list(self._waiting)

    def let_go(self, number: int) -> list[Extent]:
        """End a hold; the extents that can be given back now. Idempotent."""
        if self._held.pop(number, None) is None:
            return []
        waiting, self._waiting = self._waiting, []
        return self.keep_back(waiting)
