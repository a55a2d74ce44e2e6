"""What is advised where nothing fits: the least change with which something does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from infinity.config import Precision, Schedule
from infinity.errors import PlacementError
from infinity.models.gpt import GptShape
from infinity.plan.advice import nearest_that_works, plan_with_changes, search, sweep
from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Drive, Hardware, gpu_named, parse_drives
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.planner import PlanRequest, StepPlan, Workload, make_plan
from infinity.plan.report import plan_json
from infinity.sizes import GIB, MIB


@cache
def model() -> ModelPlan:
    shape = GptShape(4, 1024, 16, 128)
    return model_plan(shape, seq=128, batch=1, activation_itemsize=2, resident_threshold_nbytes=MIB)


def request(
    *, device_nbytes: int = 24 * GIB, host_nbytes: int = 5 * GIB, drive: str = "", batch: int = 4, **work: Any
) -> PlanRequest:
    gpu = replace(gpu_named("rtx4090"), memory_nbytes=device_nbytes)
    hardware = Hardware(gpu, parse_drives([drive] if drive else []), host_nbytes)
    return PlanRequest(model(), hardware, Workload(batch=batch, **work))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (request(device_nbytes=1024 * MIB + 64 * MIB, drive="3:2", batch=64), r"--batch \d+ --recompute"),
        (request(host_nbytes=4 * GIB + 64 * MIB, drive="3:2:400MB"), r"\d more of drive 3:2 GB/s"),
        (request(host_nbytes=4 * GIB), r"--host-memory 8GiB"),
        (request(device_nbytes=512 * MIB, host_nbytes=4 * GIB), r"--device-memory \d+(MiB|GiB) --host-memory 8GiB.*"),
    ],
)
def test_the_nearest_plan_is_the_least_change(wanted: PlanRequest, expected: str) -> None:
    with pytest.raises(PlacementError):
        make_plan(wanted)
    nearest = nearest_that_works(wanted)
    assert nearest is not None and nearest.plan is not None
    assert re.fullmatch(expected, nearest.what), nearest.what


def test_a_cache_does_not_carry_steps_that_follow_each_other() -> None:
    """Three steps fit into it, so that they were predicted with its rate; a run has thousands."""
    least = int(model().parameters * 5)
    drive = DriveModel(7e9, 0.2e9, duplex=1.0, slc_nbytes=100e9, slc_write_bytes_per_s=5e9)
    wanted = request(drive="7:5", host_budget_nbytes=least)
    cached = replace(wanted, hardware=replace(wanted.hardware, drives=(Drive("cached", drive),)))
    plan = make_plan(cached)
    _, written = plan.by_drive[0]
    assert 0 < written < drive.slc_nbytes / 4
    assert plan.step_s >= written / drive.write_bytes_per_s * 0.999
    assert "fills up" in plan.wear[0].warning


def test_steps_of_days_are_planned_and_of_weeks_refused() -> None:
    least = int(model().parameters * 5)
    slow = make_plan(request(drive="3e-6:3e-6", host_budget_nbytes=least))
    assert slow.step_s > 1e5 and slow.simulated.end_s > 5e5
    with pytest.raises(PlacementError, match=r"would take [\d,]+ days or more, by what nvme needs alone"):
        make_plan(request(drive="1e-8:1e-8", host_budget_nbytes=least))


def test_batches_of_any_size_are_searched() -> None:
    """By the divisors of the tokens, not by every number below."""
    found = search(request(drive="3:2", batch=10**12 + 39))  # a prime
    assert all(change.plan is None for change in found)
    assert len(found) == 10


@pytest.mark.parametrize(
    ("schedule", "accumulate", "others"),
    [
        (Schedule.OVERLAPPED, 1, ["deferred"]),
        (Schedule.DEFERRED, 1, ["overlapped"]),
        (Schedule.SYNCHRONOUS, 1, ["deferred", "overlapped"]),
        (Schedule.DEFERRED, 2, ["synchronous"]),
        (Schedule.SYNCHRONOUS, 2, ["deferred"]),
    ],
)
def test_schedules_that_could_be_faster_are_told(schedule: Schedule, accumulate: int, others: list[str]) -> None:
    _, changes = plan_with_changes(request(drive="3:2", schedule=schedule, accumulate=accumulate))
    assert [each.what for each in changes if "schedule" in each.what] == [f"--schedule {name}" for name in others]


def test_a_plan_is_the_same_beside_its_changes() -> None:
    asked = request(drive="3:2", host_budget_nbytes=int(model().parameters * 5))
    told: list[StepPlan] = []
    plan, changes = plan_with_changes(asked, keep_spans=True, on_plan=told.append)
    assert told == [plan]
    alone = make_plan(asked, keep_spans=True)
    assert plan_json(plan) == plan_json(alone)
    assert plan.simulated.spans == alone.simulated.spans != []
    assert all(change.plan is None or not change.plan.simulated.spans for change in changes)
    assert plan_with_changes(asked)[0].simulated.spans == []


def test_slices_of_one_batch_read_less_than_batches_that_are_added_up() -> None:
    least = int(model().parameters * 5)
    apart = request(drive="0.5:0.3", batch=2, accumulate=4, schedule=Schedule.SYNCHRONOUS, host_budget_nbytes=least)
    (change,) = [each for each in plan_with_changes(apart)[1] if "--micro-batches" in each.what]
    assert change.what == "--batch 8 --micro-batches 4 --accumulate 1"
    together, before = change.plan, make_plan(apart)
    assert together is not None
    assert together.request.tokens_per_step == before.request.tokens_per_step
    # Four forwards and backwards read the parameters; the update reads state once in both.
    assert before.traffic.param.read_nbytes > 2.5 * together.traffic.param.read_nbytes > 0
    assert before.traffic.state.read_nbytes == together.traffic.state.read_nbytes
    assert together.step_s < before.step_s


def test_slices_keep_the_activations_of_one_slice_where_they_are_recomputed() -> None:
    whole, sliced = (request(batch=8, micro_batches=n).activation_nbytes for n in (1, 8))
    of_a_block = max(work.saved_nbytes for name, work in model().work.items() if name.startswith("blocks"))
    assert whole - sliced == 7 * of_a_block
    kept = [request(batch=8, micro_batches=n, recompute=False).activation_nbytes for n in (1, 8)]
    assert kept[0] == kept[1] > whole


def test_a_search_cuts_what_is_too_large_for_the_device() -> None:
    whole = request(drive="3:2", batch=8)
    need = [replace(whole, workload=replace(whole.workload, micro_batches=n)).activation_nbytes for n in (1, 8)]
    least = make_plan(whole).rank.placement.device_minimum_nbytes
    tight = request(device_nbytes=GIB + need[1] + least, drive="3:2", batch=8)
    assert need[0] > need[1]
    names = [change.what for change in search(tight) if change.plan is not None]
    assert any(name.startswith("--batch 8 --micro-batches 8 --accumulate 1") for name in names)
    assert not any(name.startswith("--batch 8 --accumulate 1 ") for name in names)


def test_what_may_skip_a_step_is_not_updated_during_backward() -> None:
    half = request(drive="3:2", precision=Precision.FP16)
    plan = make_plan(half)
    assert plan.rank.placement.schedule is not Schedule.OVERLAPPED
    names = [change.what for change in (*plan_with_changes(half)[1], *search(half))]
    assert not any("--schedule overlapped" in name for name in names)
    # Gathered in 16 bits, as on a GPU.
    whole = make_plan(request(drive="3:2", precision=Precision.FP32))
    assert 2 * max(g.flat_nbytes for g in plan.rank.groups) == max(g.flat_nbytes for g in whole.rank.groups)


def test_accumulation_is_swept_with_a_schedule_that_allows_it() -> None:
    swept = sweep(request(drive="3:2", schedule=Schedule.OVERLAPPED), "accumulate=1..2")
    first, second = (point.plan for point in swept.points)
    assert first is not None and second is not None
    assert first.rank.placement.schedule is Schedule.OVERLAPPED
    assert second.rank.placement.schedule is not Schedule.OVERLAPPED
