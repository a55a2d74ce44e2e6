"""Covering designs: few places of a matrix of settings in which every pair of values occurs that is possible."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Place = Mapping[str, Any]
Pair = tuple[tuple[str, Any], ...]


def places(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All places of a matrix, the last axis changing fastest."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairs(place: Place) -> set[Pair]:
    """The pairs of values, with their axes, in one place."""
    return set(itertools.combinations(place.items(), 2))


def cover(possible: Sequence[Place], given: Sequence[Place] = ()) -> list[int]:
    """Numbers of places that, with the `given` ones, have every pair that any has.

    Chosen greedily in order: the same every time.
    """
    found = [pairs(place) for place in possible]
    missing = set().union(*found).difference(*map(pairs, given))
    chosen = []
    while missing:
        best = max(range(len(found)), key=lambda number: len(found[number] & missing))
        missing -= found[best]
        chosen.append(best)
    return chosen
