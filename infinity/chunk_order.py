"""The order in which chunks of one key are moved, so that every drive has something to do.

A key that is cut lies on the drives in parts, one behind another (`storage.shares`). Chunks in the order of their bytes
would all come from the first drive, then all from the next: few are moved at a time, so the others would wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_GOLDEN = (5**0.5 - 1) / 2


def spread_over_drives(chunks: Iterable[_T], n_drives: int) -> Sequence[_T]:
    """The chunks of a key, in an order in which any few that follow each other lie all over it.

    Multiples of the golden ratio, modulo 1, leave no large gap after any number of them, wherever one begins; so the
    drives take turns as their parts ask for, whatever these are. On one drive the order is that of the bytes.
    """
    return spread(chunks) if n_drives > 1 else list(chunks)


def spread(row: Iterable[_T]) -> list[_T]:
    """A row in an order of which the first few, however many, lie all over it. What was first stays first."""
    row = list(row)
    by_place = sorted(range(len(row)), key=lambda number: number * _GOLDEN % 1.0)
    order = [0] * len(row)
    for place, number in enumerate(by_place):
        order[number] = place
    return [row[place] for place in order]
