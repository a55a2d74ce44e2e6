"""The memory of the fake GPU: pages of a file, in use by regions or free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAGE_NBYTES = 4096
"""Regions start at multiples of this and occupy whole multiples of it."""


@dataclass(frozen=True, slots=True, eq=False)
class FakeRegion:
    """Device memory in use. Its pages need not lie together in the file, so free memory is never too fragmented."""

    nbytes: int
    owner: str
    spans: tuple[tuple[int, int], ...]  # (file offset, nbytes), whole pages

    @property
    def block_nbytes(self) -> int:
        """What it occupies of the capacity: `nbytes` in whole pages."""
        return sum(nbytes for _, nbytes in self.spans)


class Pages:
    """Free pages of the device, as (offset, nbytes) spans by offset that never touch each other."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.total_nbytes = self.free_nbytes = capacity_nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._spans = [(0, self.total_nbytes)]

    def take(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Spans of `nbytes` together, lowest first; the caller knows that they are free."""
        self.free_nbytes -= nbytes
        spans = []
        while nbytes:
            offset, span_nbytes = self._spans.pop(0)
            if span_nbytes > nbytes:
                self._spans.insert(0, (offset + nbytes, span_nbytes - nbytes))
                span_nbytes = nbytes
            spans.append((offset, span_nbytes))
            nbytes -= span_nbytes
        return tuple(spans)

    def give_back(self, spans: tuple[tuple[int, int], ...]) -> None:
        """Spans of `take` are free again."""
        merged: list[tuple[int, int]] = []
        for offset, nbytes in sorted([*self._spans, *spans]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        self._spans = merged
        self.free_nbytes += sum(nbytes for _, nbytes in spans)


def each_piece(
    region: FakeRegion, memory: memoryview, offset_nbytes: int, do: Callable[[int, memoryview], None]
) -> None:
    """Call `do(file offset, part of memory)` for every part of memory that lies in one span of the region."""
    rest = memory.cast("B")
    for start, span_nbytes in region.spans:
        if offset_nbytes >= span_nbytes:
            offset_nbytes -= span_nbytes
            continue
        piece = rest[: span_nbytes - offset_nbytes]
        if piece:
            do(start + offset_nbytes, piece)
        rest, offset_nbytes = rest[len(piece) :], 0
