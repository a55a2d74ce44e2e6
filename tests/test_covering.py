"""What the fast run takes of a test with many settings."""

from __future__ import annotations

from collections import Counter

from tests.covering import fast_places, pairs, places, spread

THREE = places({"schedule": "sod", "drives": (1, 2, 3), "host": (0.5, 1.0)})


def test_up_to_two_settings_are_all_taken() -> None:
    two = places({"schedule": "sod", "drives": (1, 2, 3)})
    assert fast_places(two) == set(range(9))
    together = [place | {"threads": 2 * place["drives"]} for place in two]
    assert fast_places(together) == set(range(9))


def test_of_three_settings_every_pair_is_taken() -> None:
    chosen = [THREE[number] for number in fast_places(THREE)]
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, THREE))
    assert len(chosen) < len(THREE)


def test_values_that_cannot_be_hashed_are_settings_too() -> None:
    small, large = {"budget": 1}, {"budget": 2}
    assert len(fast_places(places({"host": (small, large), "a": (1, 2), "b": (1, 2)}))) == 4


def test_somewhere_every_value_is_taken_about_as_often_as_others() -> None:
    kinds = places({"model": range(9), "schedule": "sod"})
    chosen = [kinds[number] for number in spread(kinds)]
    assert {number for number, place in enumerate(kinds) if place in chosen} == fast_places(kinds, somewhere=True)
    assert sorted(place["model"] for place in chosen) == list(range(9))
    assert set(Counter(place["schedule"] for place in chosen).values()) == {3}
