"""Covering designs: few places of a matrix of settings in which every pair of values occurs that is possible."""

from __future__ import annotations

import itertools
from collections import Counter
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


def spread(possible: Sequence[Place]) -> list[int]:
    """Numbers of places that together have every value of every axis, each of them about as often as its likes.

    Chosen greedily in order: the same every time.
    """
    found = [set(place.items()) for place in possible]
    missing = set().union(*found)
    often = Counter[tuple[str, Any]]()
    chosen = []
    while missing:
        best = max(range(len(found)), key=lambda n: (len(found[n] & missing), -sum(often[value] for value in found[n])))
        missing -= found[best]
        often.update(found[best])
        chosen.append(best)
    return chosen


def fast_places(settings: Sequence[Place], *, somewhere: bool = False) -> set[int]:
    """Numbers of the places of a test that the fast run takes. Values need not be hashable.

    With up to two settings all of them, with more those that every pair of values needs.

    Args:
        somewhere: only one for every value, which is for settings that have little to do with each other, such as kinds
            of models and schedules.
    """
    numbers: dict[tuple[str, int], int] = {}
    possible = [
        {name: numbers.setdefault((name, id(value)), len(numbers)) for name, value in place.items()}
        for place in settings
    ]
    if somewhere:
        return set(spread(possible))
    is_large = len(_independent(possible)) > 2
    return set(cover(possible) if is_large else range(len(possible)))


def _independent(possible: Sequence[Place]) -> set[tuple[int, ...]]:
    """Of each axis how its values change from place to place; those that are given together change together."""
    orders = set()
    for axis in possible[0]:
        seen: dict[Any, int] = {}
        orders.add(tuple(seen.setdefault(place[axis], len(seen)) for place in possible))
    return orders
