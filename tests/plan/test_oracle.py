"""The engine's scheduler against the best schedule there is, on small steps."""

from __future__ import annotations

import random

import pytest

from infinity.plan.drives import DriveModel
from infinity.plan.scenario import Scenario, Speeds, UnitTime
from infinity.plan.simulate import simulate
from storage.types import Op
from tests.plan.cases import PAGE_NBYTES, make_scenario
from tests.plan.oracle import Oracle, problem_of
from tests.scheduler.planned import UnitShape

_INSTANT = Speeds(h2d_bytes_per_s=1e18, d2h_bytes_per_s=1e18, kernel_s=1e-9, is_async=False)
_GAP = 1.10


def random_case(seed: int, most_units: int = 6) -> Scenario:
    """Trained units of any sizes and times around a drive of any speed; nothing is pinned."""
    chance = random.Random(seed)
    while True:
        shapes = [UnitShape((chance.choice([1, 1, 2, 3, 6]),)) for _ in range(chance.randint(2, most_units))]
        rate = chance.choice([2e6, 1e7, 5e7, 2e8])
        scenario = make_scenario(
            shapes,
            spare_nbytes=chance.randint(0, 40) * PAGE_NBYTES // 2,
            drives=[DriveModel(rate, rate * chance.choice([0.5, 1.0, 1.5]), latency_s=0.0, duplex=1.0)],
            time=UnitTime(chance.choice([1e-4, 1e-3, 5e-3]), chance.choice([2e-4, 2e-3, 1e-2])),
            speeds=_INSTANT,
        )
        placed = scenario.placement
        if not (placed.pinned_params or placed.pinned_states or placed.pinned_chunks):
            return scenario


def makespan_s(scenario: Scenario) -> float:
    """Seconds until one step is computed and written, when nothing follows it."""
    result = simulate(scenario, steps=1, is_last=True)
    return max(result.steps_s[0], *(t.end_s for t in result.transfers if t.op is Op.WRITE))


def check(seed: int, most_units: int = 6) -> None:
    scenario = random_case(seed, most_units)
    ours_s = makespan_s(scenario)
    limit_s = ours_s / _GAP
    found_s = Oracle(problem_of(scenario)).shortest_s(below_s=limit_s)
    assert found_s >= limit_s, f"seed {seed}: {ours_s:.6f} s, but {found_s:.6f} s can be done"


@pytest.mark.parametrize("seed", range(40))
def test_a_small_step_is_within_ten_percent_of_the_best(seed: int) -> None:
    check(seed, most_units=4)


def test_updates_go_first_while_backward_waits_for_memory_that_they_give_back() -> None:
    """Else the state of the last unit waits behind shards that backward has no memory to use: 11.3 % above the best."""
    check(1293)


@pytest.mark.parametrize("block", range(20))
def test_five_hundred_small_steps_are_within_ten_percent_of_the_best(block: int) -> None:
    for seed in range(1000 + 25 * block, 1000 + 25 * (block + 1)):
        check(seed)


@pytest.mark.parametrize("seed", range(20))
def test_the_oracle_is_never_slower_than_the_engine(seed: int) -> None:
    """Else it would obey constraints that do not exist, and the comparison would mean nothing."""
    scenario = random_case(seed, most_units=3)
    assert Oracle(problem_of(scenario)).shortest_s() <= makespan_s(scenario) * (1 + 1e-6)
