"""Which way gradients go to host memory, for runs and for plans alike."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from infinity.config import Schedule
from infinity.gradient_ways import GradientWay, GradientWays
from infinity.gradients import GroupGradient
from infinity.host_block import HostBlock
from infinity.placement import make_placement
from storage.budget import TierBudget
from storage.pool import HostPool
from tests.infinity.test_passing_gradients import NBYTES, wide
from tests.infinity.test_placement import Stack, request_of, smallest_host_nbytes

ARRIVAL = {"is_whole": True, "is_final": True, "is_measured": False}
WAITS = GradientWays(spilled=frozenset({0, 1, 2}), lasting=frozenset({1}), chunked=frozenset({2}))
AT_ONCE = GradientWays(spilled=frozenset({2}), chunked=frozenset({2}), part_numel=64)
WHOLE, IN_PARTS, IN_CHUNKS = GradientWay


@pytest.mark.parametrize(
    ("ways", "index", "unlike", "way"),
    [
        (WAITS, 0, {}, IN_CHUNKS),
        (WAITS, 0, {"is_final": False}, IN_CHUNKS),  # what comes later is added to it
        (WAITS, 0, {"is_whole": False}, WHOLE),
        (WAITS, 0, {"is_measured": True}, WHOLE),
        (WAITS, 1, {}, WHOLE),  # it waits for the step in host memory
        (WAITS, 2, {"is_whole": False, "is_final": False, "is_measured": True}, IN_CHUNKS),
        (WAITS, 3, {}, WHOLE),
        (AT_ONCE, 2, {}, IN_CHUNKS),
        (AT_ONCE, 3, {}, IN_PARTS),
        (AT_ONCE, 3, {"is_final": False}, WHOLE),
        (AT_ONCE, 3, {"is_whole": False}, WHOLE),
        (AT_ONCE, 3, {"is_measured": True}, WHOLE),
    ],
)
def test_way_of_a_new_gradient(ways: GradientWays, index: int, unlike: dict[str, bool], way: GradientWay) -> None:
    arrival: dict[str, Any] = ARRIVAL | unlike
    nothing_yet = GroupGradient(wide(index), None)
    assert ways.of(index, None, **arrival) is ways.of(index, nothing_yet, **arrival) is way


def test_ways_under_a_placement() -> None:
    request = request_of(Stack([40] * 4, tied=False, frozen=0, nested=False))
    request = replace(request, host_budget_nbytes=smallest_host_nbytes(request) * 5 // 4)
    for schedule in (Schedule.SYNCHRONOUS, Schedule.OVERLAPPED):
        placement = make_placement(replace(request, schedule=schedule))
        ways = GradientWays.under(placement)
        assert ways.spilled == placement.spilled_gradients
        assert ways.lasting == placement.lasting_gradients
        assert ways.chunked == placement.chunked
        assert ways.part_numel == (placement.chunk_numel if schedule is Schedule.OVERLAPPED else None)
        if schedule is Schedule.SYNCHRONOUS:
            assert len({ways.spilled, ways.lasting, ways.chunked}) == 3  # none can stand for another


@pytest.mark.parametrize("is_spilled", [True, False])
def test_what_is_added_to_comes_whole_unless_it_never_does(*, is_spilled: bool) -> None:
    budget = TierBudget("gradients", NBYTES)
    with closing(HostPool(1 << 20)) as pool:
        gradient = GroupGradient(wide(0), None)
        gradient.is_spilled = is_spilled
        if not is_spilled:
            gradient.block = HostBlock.take(pool, budget.request(NBYTES, "gradient"), "gradient")
        ways = [ways.of(index, gradient, **ARRIVAL) for ways, index in ((WAITS, 0), (AT_ONCE, 3), (WAITS, 2))]
        gradient.release()
    assert ways == [WHOLE, WHOLE, IN_CHUNKS]
