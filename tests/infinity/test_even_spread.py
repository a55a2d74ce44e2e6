"""What is chosen of a row is spread evenly over it, and fills its room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.even_spread import evenly_chosen


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        (0, []),
        (1, [0]),
        (2, [0, 3]),
        (3, [0, 2, 4]),
        (4, [0, 2, 3, 5]),
        (5, [0, 2, 3, 4, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
        (99, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_of_things_alike_every_so_many(room: int, chosen: list[int]) -> None:
    assert evenly_chosen([1] * 6, room) == chosen


def test_what_is_left_goes_to_the_first_that_fit() -> None:
    assert evenly_chosen([8, 2, 8, 2], 5) == [1, 3]
    assert evenly_chosen([8], 7) == []
    assert evenly_chosen([], 7) == []


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 1000))
def test_nothing_fits_any_more_and_every_part_has_its_part(sizes: list[int], room: int) -> None:
    chosen = evenly_chosen(sizes, room)
    taken = sum(sizes[number] for number in chosen)
    assert taken <= room
    assert all(taken + size > room for number, size in enumerate(sizes) if number not in chosen)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 1200))
def test_of_things_alike_the_first_n_have_their_part(count: int, size: int, room: int) -> None:
    chosen = evenly_chosen([size] * count, room)
    for n in range(count + 1):
        held = sum(number < n for number in chosen)
        assert abs(held - n * min(room / (size * count), 1.0)) <= 2
