"""Chunks of a key take turns on the drives, whatever part of it each drive holds."""

from __future__ import annotations

import pytest

from infinity.chunk_order import spread_over_drives
from infinity.optim.drive_turns import evenly


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("n_drives", [2, 3, 8])
def test_every_chunk_comes_once(count: int, n_drives: int) -> None:
    assert sorted(spread_over_drives(range(count), n_drives)) == list(range(count))


def test_one_drive_is_read_in_the_order_of_its_bytes() -> None:
    assert spread_over_drives(range(9), 1) == list(range(9))


@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.8, 0.2), (0.3, 0.3, 0.4), (0.25, 0.25, 0.25, 0.25)])
def test_any_few_that_follow_each_other_ask_every_drive_for_its_part(parts: tuple[float, ...]) -> None:
    count, at_a_time = 500, 20
    order = spread_over_drives(range(count), len(parts))
    for first in range(count - at_a_time):
        run = [chunk / count for chunk in order[first : first + at_a_time]]
        passed = 0.0
        for part in parts:
            found = sum(passed <= place < passed + part for place in run) / at_a_time
            assert found == pytest.approx(part, abs=0.11)  # all or nothing where chunks come in order
            passed += part


@pytest.mark.parametrize("count", [1, 2, 17, 20, 64])
@pytest.mark.parametrize("n_drives", [2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_drives_are_as_far_with_their_parts_after_any_number_of_chunks(count: int, n_drives: int, first: int) -> None:
    """Records lie whole on one drive after another, parameters and gradients in one part per drive."""
    loads = [[0] * n_drives for _ in range(count)]
    for number, load in enumerate(loads):
        load[(number + first) % n_drives] += 20
        load[number * n_drives // count] += 8
    order = evenly(loads)
    assert sorted(order) == list(range(count))
    totals = [sum(load) for load in zip(*loads, strict=True)]
    done = [0] * n_drives
    for number in order:
        done = [before + more for before, more in zip(done, loads[number], strict=True)]
        parts = [nbytes / total for nbytes, total in zip(done, totals, strict=True) if total]
        assert max(parts) - min(parts) <= 2 * max(map(max, loads)) / min(total for total in totals if total)


def test_a_drive_that_holds_nothing_of_a_group_is_not_waited_for() -> None:
    assert sorted(evenly([[5, 0, 0], [5, 0, 0], [0, 5, 0]])) == [0, 1, 2]
    assert evenly([]) == []
