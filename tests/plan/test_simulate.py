"""The simulated rank: the engine's own policies move what the closed forms say, never faster than its bounds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.config import Schedule
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.models.gpt import GptShape
from infinity.optim.hyper import StateField
from infinity.passage import TRANSIT_NUMEL
from infinity.plan.bounds import lower_bounds, moved_nbytes, nvme_s, scenario_traffic
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Hardware, gpu_named, parse_drives
from infinity.plan.model import model_plan
from infinity.plan.planner import PlanRequest, Workload, draft_plan
from infinity.plan.scenario import Scenario, Speeds, UnitTime
from infinity.plan.simulate import simulate, simulate_long
from infinity.plan.training_thread import TrainingThread
from infinity.plan.virtual import PlanLoop
from infinity.sizes import GIB, MIB
from storage.types import Op
from tests.plan.cases import PAGE_NBYTES, SPEEDS, TIME, make_scenario
from tests.scheduler.planned import UnitShape

SCHEDULES = [Schedule.SYNCHRONOUS, Schedule.OVERLAPPED, Schedule.DEFERRED]
EIGHT = [UnitShape((4,)) for _ in range(8)]
THOROUGH = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spare_pages", [0, 10, 40, 400])
def test_a_step_moves_what_the_closed_forms_say(schedule: Schedule, spare_pages: int) -> None:
    scenario = make_scenario(EIGHT, schedule=schedule, spare_nbytes=spare_pages * PAGE_NBYTES)
    result = simulate(scenario)
    assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(scenario))


def test_the_same_scenario_gives_the_same_numbers_to_the_byte() -> None:
    texts = {json.dumps(asdict(simulate(make_scenario(EIGHT), keep_spans=True))) for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spare_pages", [0, 40, 400])
def test_a_durable_step_writes_what_host_memory_keeps_too(schedule: Schedule, spare_pages: int) -> None:
    scenario = make_scenario(EIGHT, schedule=schedule, spare_nbytes=spare_pages * PAGE_NBYTES)
    durable = replace(scenario, placement=replace(scenario.placement, is_durable=True))
    result = simulate(durable)
    assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(durable))
    gradients = result.traffic.get("write/grad", 0)
    assert result.write_nbytes - gradients == sum(group.shard_nbytes * 2 for group in scenario.groups)  # and its state


def test_with_everything_in_host_memory_a_step_computes_and_waits_for_links_only() -> None:
    speeds = Speeds(h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12, kernel_s=1e-15)
    scenario = make_scenario(EIGHT, spare_nbytes=10_000 * PAGE_NBYTES, speeds=speeds)
    result = simulate(scenario)
    assert (result.read_nbytes, result.write_nbytes) == (0, 0)
    assert result.step_s == pytest.approx(8 * 3e-3, rel=1e-3)


def test_a_cpu_copies_only_what_host_memory_alone_holds() -> None:
    """It computes with the shards in the window where they are: they count neither in a step nor in its bound."""
    speeds = Speeds(h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e12, kernel_s=1e-15, is_async=False)
    drives = [DriveModel(1e12, 1e12)]
    streamed = make_scenario(EIGHT, schedule=Schedule.OVERLAPPED, drives=drives, speeds=speeds)
    pinned = make_scenario(EIGHT, schedule=Schedule.OVERLAPPED, spare_nbytes=10_000 * PAGE_NBYTES, speeds=speeds)
    copied_s = 2 * sum(group.shard_nbytes for group in pinned.groups) / 1e6
    assert not streamed.placement.pinned_params
    for scenario, least_s in ((streamed, 8 * 3e-3), (pinned, 8 * 3e-3 + copied_s)):
        assert max(lower_bounds(scenario).values()) == pytest.approx(least_s, rel=1e-2)
        assert simulate(scenario).step_s == pytest.approx(least_s, rel=0.2)


def test_a_slow_drive_binds() -> None:
    scenario = make_scenario(EIGHT, drives=[DriveModel(1e6, 1e6)], spare_nbytes=40 * PAGE_NBYTES)
    bounds = lower_bounds(scenario)
    assert max(bounds, key=lambda name: bounds[name]) == "nvme"
    assert simulate(scenario).step_s >= bounds["nvme"] * 0.999


def test_deferred_updates_run_in_the_order_of_the_next_forward() -> None:
    """Those of kept copies, which could start first, came before those of pinned shards that are used sooner."""
    scenario = make_scenario(EIGHT, schedule=Schedule.DEFERRED, spare_nbytes=84 * PAGE_NBYTES)
    assert scenario.placement.pinned_params == {0, 1, 2, 3, 4}
    assert scenario.placement.keep_at_boundary == {5, 6, 7}
    transfers = simulate(scenario).transfers
    last = max(moved.tag.step for moved in transfers)
    writes = [m.key for m in transfers if m.op is Op.WRITE and m.tag.kind == "state" and m.tag.step == last]
    assert list(dict.fromkeys(key.split(".")[0] for key in writes)) == [f"unit{number}" for number in range(8)]


def test_a_second_drive_makes_what_binds_faster() -> None:
    shapes = [UnitShape((256,)) for _ in range(8)]  # of 4 MiB: every drive holds a part of each shard
    one = make_scenario(shapes, drives=[DriveModel(1e8, 1e8)], spare_nbytes=20 * 64 * PAGE_NBYTES)
    two = replace(one, drives=[DriveModel(1e8, 1e8)] * 2)
    assert simulate(one).step_s / simulate(two).step_s == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_passes_in_chunks_keeps_two_drives_busy(schedule: Schedule) -> None:
    """Its first half lies on one drive, its second half on the other: in order, one drive would wait for the other."""
    shapes = [UnitShape((1024,)) for _ in range(3)]  # of 16 MiB
    spare_nbytes, speeds = 24 << 20, replace(SPEEDS, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12, kernel_s=1e-12)
    two = [DriveModel(1e9, 1e9, duplex=1.0)] * 2
    asked = {"schedule": schedule, "spare_nbytes": spare_nbytes, "speeds": speeds, "in_chunks": True}
    scenario = make_scenario(shapes, drives=two, **asked)
    assert scenario.placement.chunked == {0, 1, 2}
    one = replace(scenario, drives=[DriveModel(2e9, 2e9, duplex=1.0)])
    assert simulate(scenario).step_s <= 1.2 * simulate(one).step_s


def test_of_several_drives_the_one_that_works_longest_in_a_step_counts() -> None:
    """Not the one that has worked longest since the beginning, by what it has worked more than another one before."""

    async def main() -> float:
        thread = TrainingThread(make_scenario(EIGHT, drives=[DriveModel(1e9, 1e9)] * 2))
        first, second = (server.busy_s for server in thread.machinery.store.servers)
        first[Op.WRITE], second[Op.WRITE] = 10.0, 5.0
        thread.begin_step()
        first[Op.WRITE], second[Op.WRITE] = 11.0, 8.0
        thread.machinery.close()
        return thread.busy_s()["drive write"]

    with asyncio.Runner(loop_factory=PlanLoop) as runner:
        assert runner.run(main()) == 3.0


def test_compute_times_and_stalls_add_up_to_the_step() -> None:
    scenario = make_scenario(EIGHT, drives=[DriveModel(5e7, 5e7)])
    result = simulate(scenario)
    assert result.compute_s + sum(result.stalls_s.values()) == pytest.approx(result.step_s, rel=1e-9)


def test_copies_of_a_cpu_are_made_by_the_training_thread() -> None:
    asynchronous = make_scenario(EIGHT, spare_nbytes=10_000 * PAGE_NBYTES)
    itself = replace(asynchronous, speeds=replace(SPEEDS, is_async=False))
    copies_s = 8 * 4 * PAGE_NBYTES * (2 + 1) / 1e9  # up twice, down once
    assert simulate(itself).step_s >= 8 * 3e-3 + copies_s
    assert simulate(asynchronous).step_s < simulate(itself).step_s


def test_host_memory_bandwidth_is_shared_between_drives_and_optimizer() -> None:
    plenty = make_scenario(EIGHT, spare_nbytes=20 * PAGE_NBYTES, time=UnitTime(0.0, 0.0))
    scarce = replace(plenty, speeds=replace(SPEEDS, dram_bytes_per_s=1e9))
    assert lower_bounds(scarce)["host memory"] > lower_bounds(scarce)["optimizer"]
    assert simulate(scarce).step_s > simulate(plenty).step_s


def test_an_update_moves_its_gradient_parameter_and_state_through_host_memory() -> None:
    scenario = make_scenario(EIGHT)  # fp32 parameters with one field of fp32 each
    assert scenario.update_nbytes == 4 + 2 * (4 + 4)
    split = replace(scenario, fields=(StateField("lo", torch.int16), *(StateField(n, torch.float32) for n in "mv")))
    assert split.update_nbytes == 4 + 2 * (4 + 2 + 8)
    coded = replace(scenario, fields=(StateField("m", torch.uint8), StateField("scale", torch.float32, 256)))
    assert coded.update_nbytes == 4 + 2 * (4 + 1 + 4 / 256)


def test_hand_overs_lengthen_what_waits_for_them() -> None:
    scenario = make_scenario(EIGHT, schedule=Schedule.SYNCHRONOUS, spare_nbytes=20 * PAGE_NBYTES)
    late = replace(scenario, speeds=replace(SPEEDS, hand_over_s=1e-3))
    before, after = simulate(scenario), simulate(late)
    # At least: the last read to the loop, to the worker, and back.
    assert after.step_s >= before.step_s + 3e-3
    assert (after.read_nbytes, after.write_nbytes) == (before.read_nbytes, before.write_nbytes)


def test_kernels_beside_computing_on_shared_cores_take_their_part_of_it() -> None:
    speeds = replace(SPEEDS, is_async=False, kernel_s=1e-7)
    alone = make_scenario(EIGHT, schedule=Schedule.OVERLAPPED, spare_nbytes=10_000 * PAGE_NBYTES, speeds=speeds)
    shared = replace(alone, speeds=replace(speeds, contention=Contention(kernel=1.0)))
    before, after = simulate(alone), simulate(shared)
    assert before.compute_s == pytest.approx(8 * 3e-3)
    # Nearly all kernels run beside the backward; what one of them takes is lost once.
    lost_s = after.compute_s - before.compute_s
    assert 0.5 * before.busy_s["optimizer"] <= lost_s <= before.busy_s["optimizer"] * (1 + 1e-9)
    apart = make_scenario(EIGHT, schedule=Schedule.SYNCHRONOUS, spare_nbytes=10_000 * PAGE_NBYTES, speeds=speeds)
    together = replace(apart, speeds=replace(speeds, contention=Contention(kernel=1.0)))
    assert simulate(together).step_s == pytest.approx(simulate(apart).step_s)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transfers_that_end_beside_computing_take_their_part_of_it(schedule: Schedule) -> None:
    quiet = make_scenario(EIGHT, schedule=schedule, spare_nbytes=40 * PAGE_NBYTES)
    busy = replace(quiet, speeds=replace(SPEEDS, contention=Contention(transfer_s=1e-5, byte_s=1e-11)))
    before, after = simulate(quiet, keep_spans=True), simulate(busy, keep_spans=True)
    assert (after.read_nbytes, after.write_nbytes) == (before.read_nbytes, before.write_nbytes)
    computing = [(span.start_s, span.end_s) for span in after.spans if span.lane == "compute"]
    beside = [
        moved for moved in after.transfers if any(start_s < moved.end_s <= end_s for start_s, end_s in computing)
    ]
    lost_s = after.compute_s - before.compute_s
    assert lost_s == pytest.approx(1e-5 * len(beside) + 1e-11 * sum(moved.nbytes for moved in beside), abs=1e-12)
    assert beside


def test_coarse_chunks_take_what_those_do_that_they_stand_for() -> None:
    fine = make_scenario([UnitShape((400,)) for _ in range(8)], schedule=Schedule.OVERLAPPED)
    fine = replace(fine, placement=replace(fine.placement, chunk_numel=SHARD_ALIGN_NUMEL))
    fine = replace(fine, speeds=replace(SPEEDS, contention=Contention(transfer_s=1e-5, byte_s=1e-11)))
    coarse = fine.coarse()
    grown = coarse.placement.chunk_numel / fine.placement.chunk_numel
    assert grown > 1
    assert coarse.speeds.contention == Contention(0.0, 1e-5 * grown, 1e-11)


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.DEFERRED])
def test_gradients_go_down_in_larger_chunks_where_there_would_be_very_many(schedule: Schedule) -> None:
    model = model_plan(
        GptShape(8, 3072, 24, 512), seq=512, batch=1, activation_itemsize=2, resident_threshold_nbytes=MIB
    )
    hardware = Hardware(gpu_named("rtx4090"), parse_drives(["2x7:3.4"]), 6 * GIB)
    few = draft_plan(PlanRequest(model, hardware, Workload(batch=4, schedule=schedule))).scenario
    costly = Contention(transfer_s=1e-30)  # chunks are not made larger where each takes something from computing
    many = replace(few, speeds=replace(few.speeds, contention=costly))
    assert few.transit_numel > many.transit_numel == TRANSIT_NUMEL
    quick, exact = simulate_long(few), simulate_long(many)
    assert len(quick.transfers) < len(exact.transfers)
    assert quick.step_s == pytest.approx(exact.step_s, rel=1e-3)
    assert quick.traffic == exact.traffic


def test_a_run_that_settles_late_is_told_as_it_settled() -> None:
    shapes = [UnitShape((pages,)) for pages in (2, 16, 4, 8, 16, 8)]
    drive = DriveModel(3e6, 3e6, latency_s=0.0, duplex=0.5)
    scenario = make_scenario(shapes, spare_nbytes=80 * PAGE_NBYTES, drives=[drive])
    later = simulate(scenario, steps=12).steps_s
    lengths = [last_s - first_s for first_s, last_s in pairwise([0.0, *later])]
    assert lengths[3] < 0.96 * lengths[-1]  # not yet
    assert lengths[-2] == pytest.approx(lengths[-1])
    assert simulate_long(scenario).step_s == pytest.approx(lengths[-1])


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.DEFERRED])
@pytest.mark.parametrize("rate", [1e7, 1e9])
@pytest.mark.parametrize("spare_pages", [0, 40])
def test_of_many_micro_batches_the_first_tell_about_the_others(
    schedule: Schedule, rate: float, spare_pages: int
) -> None:
    spare = spare_pages * PAGE_NBYTES
    scenario = make_scenario(
        EIGHT, schedule=schedule, drives=[DriveModel(rate, rate)], spare_nbytes=spare, micro_batches=20
    )
    whole, quick = simulate(scenario), simulate_long(scenario)
    assert len(quick.transfers) < len(whole.transfers)
    assert (quick.read_nbytes, quick.write_nbytes, quick.traffic) == (
        whole.read_nbytes,
        whole.write_nbytes,
        whole.traffic,
    )
    assert quick.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert quick.compute_s == pytest.approx(whole.compute_s)
    began_s = quick.steps_s[-2] if len(quick.steps_s) > 1 else 0.0
    assert quick.steps_s[-1] - began_s == pytest.approx(quick.step_s)
    stalled_s = sum(whole.stalls_s.values())
    assert sum(quick.stalls_s.values()) == pytest.approx(stalled_s, rel=0.01, abs=0.01 * whole.step_s)


def test_a_step_of_a_billion_micro_batches_is_predicted() -> None:
    scenario = make_scenario(EIGHT, schedule=Schedule.SYNCHRONOUS, micro_batches=10**9)
    result = simulate_long(scenario)
    assert result.step_s >= 10**9 * 8 * (TIME.forward_s + TIME.backward_s)
    assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(scenario))


def test_several_ranks_gather_what_they_upload() -> None:
    alone = make_scenario(EIGHT, spare_nbytes=10_000 * PAGE_NBYTES)
    speeds = replace(SPEEDS, gather_bytes_per_s=1e7, reduce_bytes_per_s=1e7)
    together = replace(alone, speeds=speeds)
    gather_s = 2 * 8 * 4 * PAGE_NBYTES / 1e7
    assert lower_bounds(together)["all-gather"] == pytest.approx(gather_s)
    assert simulate(together).step_s >= gather_s


LARGE = [UnitShape((30,)), *EIGHT[:3], UnitShape((-40,)), UnitShape((30, 2))]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spare_pages", [0, 3, 30])
def test_chunked_groups_move_what_the_closed_forms_say(schedule: Schedule, spare_pages: int, is_async: bool) -> None:
    scenario = make_scenario(
        LARGE,
        schedule=schedule,
        spare_nbytes=spare_pages * PAGE_NBYTES,
        speeds=replace(SPEEDS, is_async=is_async),
        micro_batches=1 if schedule is Schedule.OVERLAPPED else 2,
        in_chunks=True,
    )
    placement = scenario.placement
    assert placement.chunked
    result = simulate(scenario)
    assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(scenario))
    assert 0 < result.peaks["passage"] <= placement.passage_nbytes
    assert result.peaks["window"] <= placement.window_nbytes
    assert result.end_s >= len(result.steps_s) * max(lower_bounds(scenario).values()) * (1 - 1e-6)


def test_several_ranks_gather_and_average_what_passes_in_chunks() -> None:
    alone = make_scenario(LARGE, schedule=Schedule.SYNCHRONOUS, in_chunks=True)
    chunked = [alone.groups[index] for index in alone.placement.chunked]
    assert len(chunked) > 1
    slow = simulate(replace(alone, speeds=replace(SPEEDS, gather_bytes_per_s=1e6, reduce_bytes_per_s=1e6)))
    between_ranks_s = sum((2 + group.trainable) * group.flat_nbytes for group in chunked) / 1e6
    assert slow.step_s >= simulate(alone).step_s + 0.9 * between_ranks_s


def test_drives_and_optimizer_work_at_the_same_time_where_half_of_the_state_is_held() -> None:
    """With the state of the first half of the model in memory they worked one after the other, a third longer."""
    shapes, drive = [UnitShape((16,)) for _ in range(16)], DriveModel(5e7, 5e7, latency_s=0.0, duplex=1.0)
    speeds, time = replace(SPEEDS, kernel_s=5e-8), UnitTime(1e-4, 2e-4)
    scenario = make_scenario(shapes, spare_nbytes=560 * PAGE_NBYTES, drives=[drive], speeds=speeds, time=time)
    assert len(scenario.placement.pinned_states) == len(shapes) // 2
    bounds = lower_bounds(scenario)
    assert bounds["nvme"] + bounds["optimizer"] > 1.5 * max(bounds.values())
    assert simulate(scenario).step_s <= 1.2 * max(bounds.values())


# Properties -----------------------------------------------------------------------------------------------------------


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    pages = st.sampled_from([1, 2, 3, 6, -2])
    shapes = [UnitShape((draw(pages),)) for _ in range(draw(st.integers(1, 6)))]
    if draw(st.booleans()):
        shapes.append(UnitShape((1,), resident=True))
    schedule = draw(st.sampled_from(SCHEDULES))
    rates = st.sampled_from([1e6, 1e7, 1e8, 1e9])
    model = DriveModel(
        draw(rates),
        draw(rates),
        latency_s=draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        duplex=draw(st.sampled_from([0.0, 0.5, 1.0])),
        read_share=draw(st.sampled_from([0.2, 0.5, 0.875])),
    )
    return make_scenario(
        shapes,
        schedule=schedule,
        spare_nbytes=draw(st.integers(0, 60)) * PAGE_NBYTES // 2,
        drives=[model] * draw(st.integers(1, 2)),
        time=UnitTime(draw(st.sampled_from([0.0, 1e-3, 0.1])), draw(st.sampled_from([0.0, 2e-3, 0.2]))),
        speeds=replace(SPEEDS, is_async=draw(st.booleans()), kernel_s=draw(st.sampled_from([1e-10, 1e-7]))),
        micro_batches=1 if schedule is Schedule.OVERLAPPED else draw(st.integers(1, 3)),
    )


@THOROUGH
@given(
    scenario=scenarios(),
    hand_over_s=st.sampled_from([0.0, 1e-4, 1e-2]),
    contention=st.sampled_from([NO_CONTENTION, Contention(1.0, 1e-3, 1e-8)]),
)
def test_any_run_ends_within_its_budgets_and_not_before_its_bounds(
    scenario: Scenario, hand_over_s: float, contention: Contention
) -> None:
    speeds = replace(scenario.speeds, hand_over_s=hand_over_s, contention=contention)
    scenario = replace(scenario, speeds=speeds)
    result = simulate(scenario)
    placement = scenario.placement
    limits = {
        "window": placement.window_nbytes,
        "gradients": placement.gradients_nbytes,
        "transit": placement.transit_nbytes,
        "pipeline": placement.pipeline_nbytes,
        "device": placement.device_budget_nbytes,
    }
    assert all(result.peaks[name] <= limit for name, limit in limits.items())
    assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(scenario))
    read, write = moved_nbytes(scenario_traffic(scenario))
    steps = len(result.steps_s)
    assert result.end_s >= steps * max(lower_bounds(scenario).values()) * (1 - 1e-6)
    assert result.end_s >= steps * nvme_s(scenario, read, write) * (1 - 1e-6)


@THOROUGH
@given(scenario=scenarios(), hand_over_s=st.sampled_from([0.0, 1e-4, 1e-2]))
def test_no_read_starts_before_the_write_that_it_must_see_has_landed(scenario: Scenario, hand_over_s: float) -> None:
    result = simulate(replace(scenario, speeds=replace(scenario.speeds, hand_over_s=hand_over_s)))
    for number, read in enumerate(result.transfers):
        if read.op is Op.READ:
            for write in result.transfers[number:]:
                overlaps = write.offset < read.offset + read.nbytes and read.offset < write.offset + write.nbytes
                is_before = write.op is Op.WRITE and write.key == read.key and overlaps
                assert not (is_before and write.submitted_s < read.submitted_s), (read, write)


@THOROUGH
@given(scenario=scenarios())
def test_a_faster_drive_never_makes_a_run_slower(scenario: Scenario) -> None:
    faster = [
        replace(d, read_bytes_per_s=2 * d.read_bytes_per_s, write_bytes_per_s=2 * d.write_bytes_per_s)
        for d in scenario.drives
    ]
    before, after = simulate(scenario).end_s, simulate(replace(scenario, drives=faster)).end_s
    assert after <= before * 1.02
