"""A simulation ends once a step goes as the one before, and says what a longer one would."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from infinity.config import Schedule
from infinity.plan.drives import DriveModel
from infinity.plan.simulate import Simulated, simulate
from tests.plan.cases import PAGE_NBYTES, make_scenario
from tests.scheduler.planned import UnitShape

EIGHT = [UnitShape((4,)) for _ in range(8)]
SCHEDULES = [Schedule.SYNCHRONOUS, Schedule.OVERLAPPED, Schedule.DEFERRED]


def _said(result: Simulated) -> dict[str, Any]:
    """What a plan tells of a simulation."""
    told = ("step_s", "stalls_s", "compute_s", "busy_s", "read_nbytes", "write_nbytes", "traffic", "peaks")
    return {name: value for name, value in asdict(result).items() if name in told}


def _flat(said: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in said.items():
        flat |= {f"{name}/{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("spare_pages", [0, 40, 84, 10_000])
@pytest.mark.parametrize("drives", [1, 2])
def test_fewer_steps_say_the_same(schedule: Schedule, rate: float, spare_pages: int, drives: int) -> None:
    models, spare_nbytes = [DriveModel(rate, 0.7 * rate)] * drives, spare_pages * PAGE_NBYTES
    scenario = make_scenario(EIGHT, schedule=schedule, drives=models, spare_nbytes=spare_nbytes)
    quick = simulate(scenario, until_repeated=True)
    assert len(quick.steps_s) <= 4
    whole = simulate(scenario, steps=6 if len(quick.steps_s) < 4 else 4)  # some settle later than any plan waits
    assert _flat(_said(quick)) == pytest.approx(_flat(_said(whole)), rel=1e-8, abs=1e-12)


def test_what_repeats_takes_one_step_or_two() -> None:
    """And the first forward of another one.

    The first step finds nothing in memory, unless all of it stays there, and no update that waits for its forward.
    """
    streamed = make_scenario(EIGHT, drives=[DriveModel(1e8, 1e8)], spare_nbytes=40 * PAGE_NBYTES)
    waiting, held = (
        make_scenario(EIGHT, schedule=schedule, spare_nbytes=10_000 * PAGE_NBYTES)
        for schedule in (Schedule.OVERLAPPED, Schedule.SYNCHRONOUS)
    )
    steps = [len(simulate(scenario, until_repeated=True).steps_s) for scenario in (streamed, waiting, held)]
    assert steps == [2, 2, 1]


def test_a_cache_that_fills_is_no_repetition() -> None:
    """Steps are alike as long as it has room, and longer afterwards."""
    slow = DriveModel(1e9, 1e7)
    scenario = make_scenario(EIGHT, drives=[slow], spare_nbytes=40 * PAGE_NBYTES)
    written = simulate(scenario).write_nbytes
    cached = replace(slow, slc_nbytes=8.0 * written, slc_write_bytes_per_s=1e9)
    result = simulate(replace(scenario, drives=[cached]), until_repeated=True)
    assert len(result.steps_s) == 4
    assert result.step_s == simulate(replace(scenario, drives=[cached])).step_s
