"""The extent allocator: which spans of a swap file are free. Pure, not thread safe; its store is the one writer."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from storage.align import is_aligned
from storage.errors import SwapFullError


class ExtentAllocator:
    """Spans of `[0, capacity)`, allocated best fit, coalesced when freed. Offsets and sizes are page multiples."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self._free: list[tuple[int, int]] = (
            [(0, capacity_nbytes)] if capacity_nbytes else []
        )  # (offset, nbytes), sorted
        self._used: dict[int, int] = {}

    @classmethod
    def restore(cls, capacity_nbytes: int, used: Iterable[tuple[int, int]]) -> ExtentAllocator:
        """An allocator in which the spans `used`, as (offset, nbytes), are allocated already.

        Raises:
            ValueError: spans overlap, leave the capacity, or are not page multiples.
        """
        allocator = cls(0)
        allocator.capacity_nbytes = capacity_nbytes
        end = 0
        for offset, nbytes in sorted(used):
            if offset < end or nbytes <= 0 or offset + nbytes > capacity_nbytes or not is_aligned(offset | nbytes):
                raise ValueError(f"{nbytes} bytes at {offset} overlap others, or leave the {capacity_nbytes} there are")
            if offset > end:
                allocator._free.append((end, offset - end))
            allocator._used[offset] = nbytes
            end = offset + nbytes
        if capacity_nbytes > end:
            allocator._free.append((end, capacity_nbytes - end))
        return allocator

    @property
    def free_nbytes(self) -> int:
        """Bytes that are free, in however many parts."""
        return sum(nbytes for _, nbytes in self._free)

    @property
    def largest_free_nbytes(self) -> int:
        """Bytes of the largest free part."""
        return max((nbytes for _, nbytes in self._free), default=0)

    @property
    def free_tail_nbytes(self) -> int:
        """Of the free span that ends where the file does."""
        return self._free[-1][1] if self._free and sum(self._free[-1]) == self.capacity_nbytes else 0

    def used(self) -> list[tuple[int, int]]:
        """Allocated spans as (offset, nbytes), by offset."""
        return sorted(self._used.items())

    def grow(self, nbytes: int) -> None:
        """Add `nbytes` at the end."""
        start = self.capacity_nbytes
        self.capacity_nbytes += nbytes
        self._insert(start, nbytes)

    def allocate(self, nbytes: int) -> int:
        """Offset of a new span.

        Raises:
            SwapFullError: no free span is large enough.
            ValueError: `nbytes` is not a positive page multiple.
        """
        if nbytes <= 0 or not is_aligned(nbytes):
            raise ValueError(f"an extent of {nbytes} bytes was asked for; sizes are positive multiples of 4096")
        fitting = [(size, offset) for offset, size in self._free if size >= nbytes]
        if not fitting:
            raise SwapFullError(
                f"the swap file has no free span of {nbytes} bytes; {self.free_nbytes} of {self.capacity_nbytes} bytes "
                f"are free, the largest span is {self.largest_free_nbytes}"
            )
        size, offset = min(fitting)
        place = bisect_left(self._free, (offset, size))
        if size == nbytes:
            del self._free[place]
        else:
            self._free[place] = (offset + nbytes, size - nbytes)
        self._used[offset] = nbytes
        return offset

    def split(self, offset: int, nbytes: int) -> None:
        """Make two of the span allocated at `offset`: the first has `nbytes`, the second can be freed on its own.

        Raises:
            ValueError: no span was allocated there, it is not longer than that, or `nbytes` is not a page multiple.
        """
        whole_nbytes = self._used.get(offset, 0)
        if not 0 < nbytes < whole_nbytes or not is_aligned(nbytes):
            raise ValueError(f"the {whole_nbytes} bytes allocated at {offset} cannot be split after {nbytes}")
        self._used[offset] = nbytes
        self._used[offset + nbytes] = whole_nbytes - nbytes

    def free(self, offset: int) -> int:
        """Give a span back; its size.

        Raises:
            ValueError: no span was allocated at `offset`.
        """
        nbytes = self._used.pop(offset, None)
        if nbytes is None:
            raise ValueError(f"no extent is allocated at offset {offset}")
        self._insert(offset, nbytes)
        return nbytes

    def _insert(self, offset: int, nbytes: int) -> None:
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and self._free[place][0] == offset + nbytes:
            nbytes += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before, size = self._free.pop(place - 1)
            offset, nbytes = before, size + nbytes
        insort(self._free, (offset, nbytes))
