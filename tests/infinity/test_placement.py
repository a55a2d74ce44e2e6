"""The placement manager: budgets are ceilings, minima are exact, and more memory never makes a plan worse."""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.config import Precision, Schedule, StateFormat
from infinity.demand import SMALLEST_CHUNKED_NUMEL, Request, Sizes
from infinity.devices.cpu import CpuDevice
from infinity.errors import PlacementError
from infinity.gradients import gradient_nbytes
from infinity.grouping import make_groups
from infinity.groups import ALONE
from infinity.host_division import HostDivision, groups_held_first
from infinity.init import staging_nbytes
from infinity.layout import Sharding
from infinity.optim.hyper import most_nbytes_per_element
from infinity.optim.kernels import kernel_for
from infinity.optim.records import GroupState
from infinity.placement import Placement, make_placement
from infinity.rank_budgets import told_smallest
from infinity.sizes import parse_nbytes
from infinity.units import partition
from tests import zoo
from tests.conftest import MakeEngine

KIB = 1024
PLENTY = 1 << 40
SCHEDULES = (Schedule.SYNCHRONOUS, Schedule.OVERLAPPED, Schedule.DEFERRED)


def request_of(model: nn.Module, precision: Precision = Precision.FP32, **changes: Any) -> Request:
    """What the engine would ask for, with budgets that hold everything unless `changes` says otherwise."""
    specs = partition(model, resident_threshold_nbytes=changes.pop("threshold_nbytes", KIB))
    kernel = kernel_for(precision)
    groups, units = make_groups(specs, precision, kernel, CpuDevice(PLENTY), changes.pop("sharding", ALONE))
    request = Request(
        units=units,
        groups=groups,
        fields=kernel.fields,
        schedule=Schedule.SYNCHRONOUS,
        schedule_reason="test",
        host_budget_nbytes=PLENTY,
        device_budget_nbytes=PLENTY,
        nvme_budget_nbytes=None,
        chunk_nbytes=None,
        staging_nbytes=staging_nbytes(model, units, groups),
    )
    return replace(request, **changes)


def minima(request: Request) -> tuple[int, int]:
    """The smallest host budget that holds every group whole, and the smallest device budget."""
    plan = make_placement(replace(request, host_budget_nbytes=PLENTY, device_budget_nbytes=PLENTY))
    return plan.host_whole_nbytes, plan.device_minimum_nbytes


def smallest_host_nbytes(request: Request) -> int:
    """The smallest host budget that works, as a plan with plenty tells it."""
    plan = make_placement(replace(request, host_budget_nbytes=PLENTY, device_budget_nbytes=PLENTY))
    assert plan.host_minimum_nbytes <= plan.host_whole_nbytes
    return plan.host_minimum_nbytes


class Stack(nn.Module):
    """Blocks of the given sizes on `meta`, with what makes placement hard."""

    def __init__(self, widths: list[int], *, tied: bool, frozen: int, nested: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 40)
        self.norm = nn.LayerNorm(16)
        made = [zoo.Outer(width) if nested else zoo.Block(width, 2 * width) for width in widths]
        self.layers = nn.ModuleList(made)
        for layer in made[:frozen]:
            layer.requires_grad_(False)
        self.head = nn.Linear(40, 29, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@st.composite
def requests(draw: st.DrawFn) -> Request:
    widths = draw(st.lists(st.sampled_from([5, 40, 90, 150]), min_size=2, max_size=5))
    with torch.device("meta"):
        model = Stack(
            widths, tied=draw(st.booleans()), frozen=draw(st.integers(0, len(widths))), nested=draw(st.booleans())
        )
    return request_of(
        model,
        draw(st.sampled_from(Precision)),
        threshold_nbytes=draw(st.sampled_from([0, KIB, 10**6])),
        schedule=draw(st.sampled_from(SCHEDULES)),
        chunk_nbytes=draw(st.sampled_from([None, None, 1, 200_000, PLENTY])),
    )


def everything_nbytes(request: Request) -> int:
    """Bytes with which nothing has to be swapped: for shards, state, gradients, and parts of the largest size."""
    sizes = [group.layout.numel for group in request.groups]
    return 20 * sum(sizes) + 100 * max(sizes)


@st.composite
def budgets(draw: st.DrawFn, request: Request, n: int) -> list[int]:
    """Increasing host budgets from the smallest to one that holds everything."""
    smallest, _ = minima(request)
    largest = smallest + everything_nbytes(request)
    near = st.integers(0, 64 * KIB).map(lambda more: smallest + more)
    return sorted(draw(st.lists(near | st.integers(smallest, largest), min_size=n, max_size=n)))


def plan_at(request: Request, host_budget_nbytes: int) -> Placement:
    return make_placement(replace(request, host_budget_nbytes=host_budget_nbytes))


@dataclass(frozen=True, order=True)
class Worth:
    """What a plan is for, the most useful first. More is better.

    Small groups come before the gradients of others, see [Note: small groups] in host_division.py: a budget that has
    room for one more of them may hold fewer of those.
    """

    small_held: int
    gradients_held: int
    params_pinned: int
    states_pinned: int


def worth(request: Request, plan: Placement) -> Worth:
    sizes = [group.layout.numel for group in request.groups]
    held = [group.index for group in request.groups if group.index not in plan.spilled_gradients]
    small = groups_held_first(Sizes(request), HostDivision(request, Sizes(request)))
    return Worth(
        sum(index in plan.pinned_params and index in held for index in small),
        sum(sizes[index] for index in held),
        sum(request.groups[index].shard_nbytes for index in plan.pinned_params),
        sum(sizes[index] for index in plan.pinned_states)
        + sum(min(count * plan.chunk_numel, sizes[index]) for index, count in plan.pinned_chunks.items()),
    )


# Host -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(requests(), st.data())
def test_host_terms_fit_in_any_budget(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    plan = plan_at(request, budget)
    terms = {term.name: term.nbytes for term in plan.host}
    assert sum(terms.values()) <= budget
    assert all(nbytes >= 0 for nbytes in terms.values())
    assert (terms["window"], terms["gradients"]) == (plan.window_nbytes, plan.gradients_nbytes)
    assert (terms["transit"], terms["pipeline"]) == (plan.transit_nbytes, plan.pipeline_nbytes)
    assert plan.state_pinned_nbytes == terms["pinned"]


@settings(deadline=None, max_examples=25)
@given(requests(), st.data())
def test_every_part_lets_a_step_make_progress(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    plan = plan_at(request, budget)
    streamed = [group for group in request.groups if group.index not in plan.pinned_params]
    assert plan.window_nbytes >= max((group.shard_nbytes for group in streamed), default=0)
    swapped = [g for g in request.groups if g.trainable and g.index not in plan.pinned_states]
    if swapped:
        # One chunk in transit: record, parameters, gradient.
        per_element = sum(field.dtype.itemsize for field in request.fields) + swapped[0].shard_dtype.itemsize + 4
        chunk_numel = min(plan.chunk_numel, max(group.layout.numel for group in swapped))
        assert plan.pipeline_nbytes >= chunk_numel * per_element
    spilled = [request.groups[index] for index in plan.spilled_gradients]
    assert plan.transit_nbytes >= max((4 * group.layout.numel for group in spilled), default=0)
    if request.schedule is not Schedule.OVERLAPPED:
        held = [g for g in request.groups if g.trainable and g.index not in plan.spilled_gradients]
        assert plan.gradients_nbytes >= sum(4 * group.layout.numel for group in held)
    else:
        assert not plan.spilled_gradients
    flowing = plan.window_nbytes + plan.gradients_nbytes + plan.transit_nbytes + plan.pipeline_nbytes
    unspent = budget - sum(term.nbytes for term in plan.host)
    assert flowing + unspent >= request.staging_nbytes


@settings(deadline=None, max_examples=25)
@given(requests())
def test_the_smallest_host_budget_is_exact(request: Request) -> None:
    smallest = smallest_host_nbytes(request)
    plan = plan_at(request, smallest)
    assert plan.host_minimum_nbytes == smallest
    unspent = smallest - sum(term.nbytes for term in plan.host)
    assert unspent == 0 or (plan.window_nbytes == 0 and unspent <= request.staging_nbytes)  # for the first values alone
    with pytest.raises(PlacementError, match=rf"smallest host budget that works \({smallest} bytes\)") as caught:
        plan_at(request, smallest - 1)
    text = str(caught.value)
    assert re.search(rf"the host budget of .* \({smallest - 1} bytes\) is too small for one step", text)
    assert "rank" not in text
    assert re.findall(r"  (\w+): ", text) == [term.name for term in plan.host]
    assert "device" not in text
    printed = re.search(r" (\S+ \w+)  smallest host budget", text)
    assert printed and plan_at(request, parse_nbytes(printed[1])).host_minimum_nbytes == smallest


def test_ranks_are_told_what_each_has_and_what_to_give_for_all() -> None:
    with torch.device("meta"):
        alone = request_of(Stack([90, 40], tied=False, frozen=0, nested=False))
    smallest, (_, device_nbytes) = smallest_host_nbytes(alone), minima(alone)
    request = replace(alone, local_size=2)
    with pytest.raises(PlacementError) as caught:
        plan_at(request, 4 * KIB)
    text = str(caught.value)
    assert "budget of 4 KiB of each rank (4096 bytes; 8 KiB shared by 2 ranks on this machine) is too small" in text
    for_all = r"works \((\d+) bytes\) of each rank; for 2 ranks on this machine give host.budget = .* \((\d+) bytes"
    told = re.search(for_all, text)
    assert told and (int(told[1]), int(told[2])) == (smallest, 2 * smallest)
    with pytest.raises(PlacementError) as caught:  # a device is not shared
        make_placement(replace(request, device_budget_nbytes=device_nbytes - 1))
    assert re.search(rf"device budget of .* of each rank \({device_nbytes - 1} bytes\) is too small", str(caught.value))
    assert "shared by" not in str(caught.value)
    assert plan_at(request, smallest).local_size == 2
    told = told_smallest(3 * KIB, 2, is_shared=True)
    assert told == "of each rank, for which 3 KiB is the smallest that works; for the 2 on this machine 6 KiB"
    assert told_smallest(3 * KIB, 2, is_shared=False) == "of each rank, for which 3 KiB is the smallest that works"
    assert told_smallest(3 * KIB, 1, is_shared=True) == "3 KiB is the smallest that works"


@settings(deadline=None, max_examples=60)
@given(requests(), st.data())
def test_more_memory_is_never_used_worse(request: Request, data: st.DataObject) -> None:
    plans = [plan_at(request, budget) for budget in data.draw(budgets(request, 6))]
    for less, more in pairwise(plans):
        assert worth(request, less) <= worth(request, more)
        assert less.pipeline_nbytes <= more.pipeline_nbytes
        assert less.chunk_numel <= more.chunk_numel
        assert less.host_minimum_nbytes == more.host_minimum_nbytes


@pytest.mark.parametrize(("width", "is_finer"), [(200, False), (1600, True)])
def test_several_drives_have_finer_chunks_where_these_stay_long(width: int, *, is_finer: bool) -> None:
    """Short ones cost more in hand-overs than their order on the drives gains."""
    request = request_of(Stack([width] * 4, tied=False, frozen=0, nested=False))
    whole, _ = minima(request)
    for times in (1.0, 1.5):
        at = replace(request, host_budget_nbytes=int(whole * times))
        one, two = (make_placement(replace(at, n_drives=n_drives)) for n_drives in (1, 2))
        assert one.pipeline_nbytes == two.pipeline_nbytes
        assert two.chunk_numel >= min(one.chunk_numel, 1 << 18)
        assert (two.chunk_numel < one.chunk_numel) == is_finer


def test_small_groups_come_before_gradients_of_others() -> None:
    """Where first values need most of the memory, there is less than small groups need beside the gradients."""
    with torch.device("meta"):
        model = Stack([5, 150], tied=False, frozen=2, nested=False)
    request = replace(request_of(model, Precision.BF16, threshold_nbytes=0), staging_nbytes=749_568)
    plans = [plan_at(request, budget) for budget in range(749_568, 1_200_000, 4096)]
    values = [worth(request, plan) for plan in plans]
    assert values == sorted(values)
    held = [value.gradients_held for value in values]
    assert held != sorted(held)


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk_nbytes", [None, 200_000])
def test_page_by_page_nothing_jumps_back(schedule: Schedule, chunk_nbytes: int | None) -> None:
    with torch.device("meta"):
        request = request_of(Stack([90, 40, 150, 90], tied=False, frozen=1, nested=False), schedule=schedule)
    request = replace(request, chunk_nbytes=chunk_nbytes)
    smallest, _ = minima(request)
    plans = [plan_at(request, smallest + page * 4096) for page in range(1500)]
    values = [worth(request, plan) for plan in plans]
    assert values == sorted(values)
    assert len(set(values)) >= 8
    pipelines = [plan.pipeline_nbytes for plan in plans]
    assert pipelines == sorted(pipelines)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_small_groups_never_take_memory_from_the_pipeline(schedule: Schedule) -> None:
    with torch.device("meta"):
        model = Stack([5, 5], tied=False, frozen=1, nested=False)
    request = request_of(model, Precision.BF16, threshold_nbytes=0, schedule=schedule)
    smallest = smallest_host_nbytes(request)
    plans = [plan_at(request, smallest + more) for more in range(0, 64 * 1024, 256)]
    pipelines = [plan.pipeline_nbytes for plan in plans]
    assert pipelines == sorted(pipelines)
    assert len({len(plan.pinned_params) for plan in plans}) > 1


@settings(deadline=None, max_examples=25)
@given(requests(), st.data())
def test_the_same_question_has_the_same_answer(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    assert plan_at(request, budget) == plan_at(request, budget)


@settings(deadline=None, max_examples=60)
@given(requests(), st.data())
def test_gradients_that_wait_in_transit_fit_there_and_are_the_last(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    plan = plan_at(request, budget)
    lasting = [group for group in request.groups if group.index in plan.lasting_gradients]
    others = [g for g in request.groups if g.index in plan.spilled_gradients - plan.lasting_gradients - plan.chunked]
    assert sum(4 * group.layout.numel for group in lasting) <= plan.transit_nbytes
    assert plan.lasting_gradients <= plan.spilled_gradients - plan.chunked
    assert not lasting or request.schedule is Schedule.SYNCHRONOUS
    for one in lasting:  # its backward comes after those of all that are spilled
        assert all(min(one.units) <= min(other.units) for other in others)
        assert len(one.units) == 1


@settings(deadline=None, max_examples=25)
@given(requests(), st.data())
def test_kept_copies_leave_room_for_the_largest_shard(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    plan = plan_at(request, budget)
    streamed = [group for group in request.groups if group.index not in plan.pinned_params]
    largest = max((group.shard_nbytes for group in streamed), default=0)
    uses = {g.index: [unit.index for unit in request.units if g in unit.groups] for g in streamed}
    by_last_use, by_first_use = sorted(uses, key=lambda i: max(uses[i])), sorted(uses, key=lambda i: min(uses[i]))
    for kept, expected in (
        (plan.keep_at_turn, by_last_use[len(uses) - len(plan.keep_at_turn) :]),
        (plan.keep_at_boundary, by_first_use[: len(plan.keep_at_boundary)]),
    ):
        assert kept == set(expected)
        assert sum(request.groups[index].shard_nbytes for index in kept) + largest <= max(plan.window_nbytes, largest)


@settings(deadline=None, max_examples=25)
@given(requests(), st.data())
def test_the_swap_file_holds_what_host_memory_does_not(request: Request, data: st.DataObject) -> None:
    (budget,) = data.draw(budgets(request, 1))
    plan = plan_at(request, budget)
    state_size = sum(field.dtype.itemsize for field in request.fields)
    expected = 0
    for group in request.groups:
        expected += 0 if group.index in plan.pinned_params else group.shard_nbytes
        if group.trainable and group.index not in plan.pinned_states:
            held = plan.pinned_chunks.get(group.index, 0) * plan.chunk_numel
            expected += max(group.layout.numel - held, 0) * state_size
        expected += 4 * group.layout.numel * (group.index in plan.spilled_gradients)
    assert plan.nvme_nbytes == expected
    assert replace(plan, notes=()) == replace(plan_at(replace(request, nvme_budget_nbytes=expected), budget), notes=())
    assume(expected)
    with pytest.raises(PlacementError, match=rf"need .* \({expected} bytes\), but nvme.budget is"):
        plan_at(replace(request, nvme_budget_nbytes=expected - 1), budget)


@settings(deadline=None, max_examples=60)
@given(requests(), st.sampled_from(StateFormat), st.data())
def test_what_an_engine_stores_fits_in_the_swap_files(
    request: Request, state_format: StateFormat, data: st.DataObject
) -> None:
    """Every key that is made for a placement, as long as it is made: rounding never asks for a byte more."""
    if any(group.shard_dtype is torch.bfloat16 for group in request.groups):
        request = replace(request, fields=kernel_for(Precision.BF16, state_format=state_format).fields)
    plan = plan_at(request, data.draw(st.integers(smallest_host_nbytes(request), minima(request)[0] + 500_000)))
    keys = [group.shard_nbytes for group in request.groups if plan.stores_param(group.index)]
    for group in request.groups:
        if group.trainable:
            records = GroupState.build(group, plan.chunk_numel, request.fields).records
            keys += [record.nbytes for record in records if plan.stores_state(group.index, record.chunk.index)]
        if group.index in plan.spilled_gradients:
            keys.append(gradient_nbytes(group))
    assert sum(keys) <= plan.nvme_nbytes
    assert all(nbytes % 4096 == 0 for nbytes in keys)


@settings(deadline=None, max_examples=25)
@given(requests())
def test_enough_memory_swaps_nothing(request: Request) -> None:
    smallest, _ = minima(request)
    plan = plan_at(request, smallest + everything_nbytes(request))
    assert plan.nvme_nbytes == 0
    assert (plan.window_nbytes, plan.transit_nbytes) == (0, 0)
    assert not plan.spilled_gradients | plan.keep_at_turn | plan.keep_at_boundary
    assert not plan.notes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spilling_is_told(schedule: Schedule) -> None:
    request = request_of(zoo.Net(), schedule=schedule)
    plan = plan_at(request, minima(request)[0])
    if schedule is not Schedule.OVERLAPPED:
        assert len(plan.spilled_gradients) == 6
        assert "gradients of 6 groups do not fit" in plan.notes[0]
        assert "schedule='overlapped'" in plan.notes[0]
    else:
        assert plan.notes == ()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_small_groups_stay_from_the_first_budget_that_holds_them_on(schedule: Schedule) -> None:
    """They are not given up for groups that no longer pass in chunks, nor for larger ones that stay."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(1024, 1024), nn.Linear(64, 96), nn.Linear(1024, 1024))
    request = request_of(model, schedule=schedule)
    small = {0, 2}
    least, (whole, _) = smallest_host_nbytes(request), minima(request)
    budgets_nbytes = [least + (whole - least) * part // 20 for part in range(100)]
    plans = [plan_at(request, budget) for budget in budgets_nbytes]
    stays = [small <= plan.pinned_params & plan.pinned_states - plan.spilled_gradients for plan in plans]
    assert stays == sorted(stays)
    assert any(plan.chunked and is_held for plan, is_held in zip(plans, stays, strict=True))
    assert [bool(plan.chunked) for plan in plans] == [budget < whole for budget in budgets_nbytes]
    assert all(is_held or plan.chunked for plan, is_held in zip(plans, stays, strict=True))


# In chunks --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(requests(), st.data())
def test_chunked_groups_are_the_largest_and_no_more_than_needed(request: Request, data: st.DataObject) -> None:
    least, (whole, _) = smallest_host_nbytes(request), minima(request)
    plan = plan_at(request, data.draw(st.integers(least, whole + 100_000)))
    assert sum(term.nbytes for term in plan.host) <= plan.host_budget_nbytes
    assert bool(plan.chunked) == (plan.host_budget_nbytes < whole)
    sizes = [group.layout.numel for group in request.groups]
    resident = {group.index for unit in request.units if unit.resident for group in unit.groups}
    if plan.chunked:
        smallest = min(sizes[index] for index in plan.chunked)
        assert plan.chunked == {index for index, numel in enumerate(sizes) if numel >= smallest} - resident
        assert plan.passage_nbytes >= 2 * plan.passage_numel * 4
        assert str(plan.host_whole_nbytes) in plan.notes[0]
    kept_whole = [g for g in request.groups if g.index not in plan.chunked | plan.pinned_params]
    assert plan.window_nbytes >= max((group.shard_nbytes for group in kept_whole), default=0)
    assert not plan.chunked & (plan.pinned_params | plan.keep_at_turn | plan.keep_at_boundary)
    assert {index for index in plan.chunked if request.groups[index].trainable} <= plan.spilled_gradients


@settings(deadline=None, max_examples=60)
@given(requests())
def test_groups_are_held_whole_where_the_next_one_is_read_ahead_too(request: Request) -> None:
    whole, _ = minima(request)
    if smallest_host_nbytes(request) == whole:  # nothing could pass in chunks
        return
    plan = plan_at(request, whole)
    moving = sum(g.shard_nbytes for g in request.groups if g.index not in plan.pinned_params)
    assert plan.window_nbytes >= min(2 * Sizes(request).working_set_nbytes, moving)
    state_nbytes, size = most_nbytes_per_element(request.fields), max(g.shard_dtype.itemsize for g in request.groups)
    if any(group.trainable and group.index not in plan.pinned_states for group in request.groups):
        assert plan.pipeline_nbytes >= 3 * plan.chunk_numel * (state_nbytes + size + 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_smallest_budget_does_not_depend_on_the_largest_parameter(
    schedule: Schedule, precision: Precision
) -> None:
    found = []
    for rows in (10_000, 1_000_000):
        model = nn.Sequential(nn.Embedding(rows, 64, device="meta"), nn.Linear(64, 64, device="meta"))
        request = request_of(model, precision, schedule=schedule, staging_nbytes=0)
        found.append(smallest_host_nbytes(request))
    assert found[0] == found[1] < 1_000_000 * 64 * 2 / 100


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_chunk_what_is_too_large_of_their_part(stage: int) -> None:
    """What counts is what a rank holds: in stage 3 a part of a group, before that all of it."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(64, 64))
    for n_ranks in (2, 128):
        request = request_of(model, sharding=Sharding(0, n_ranks, stage), staging_nbytes=0)
        smallest = smallest_host_nbytes(request)
        is_large = request.groups[0].param_span.numel > SMALLEST_CHUNKED_NUMEL
        assert is_large == (stage < 3 or n_ranks == 2) == (0 in plan_at(request, smallest).chunked)
        assert smallest < 2**20 < 4 * 2048 * 2048 // 2


# Device -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(requests())
def test_the_smallest_device_budget_is_exact(request: Request) -> None:
    _, smallest = minima(request)
    plan = make_placement(replace(request, device_budget_nbytes=smallest))
    assert plan.device_minimum_nbytes == smallest == sum(term.nbytes for term in plan.device)
    with pytest.raises(PlacementError, match=rf"smallest device budget that works \({smallest} bytes\)") as caught:
        make_placement(replace(request, device_budget_nbytes=smallest - 1))
    assert all(f"{term.name}: {term.why}" in str(caught.value) for term in plan.device)
    assert "host budget" not in str(caught.value)


def test_both_refusals_come_at_once() -> None:
    request = request_of(zoo.Net())
    host, device = minima(request)
    with pytest.raises(PlacementError) as caught:
        make_placement(replace(request, host_budget_nbytes=1, device_budget_nbytes=1))
    assert re.findall(r"smallest (\w+) budget that works \((\d+) bytes\)", str(caught.value)) == [
        ("device", str(device)),
        ("host", str(host)),
    ]


def test_device_memory_of_units_by_hand() -> None:
    with torch.device("meta"):
        model = Stack([40, 90], tied=True, frozen=1, nested=False)
    request = request_of(model)
    embed, frozen, trained, resident = (group.flat_nbytes for group in request.groups)
    plan = make_placement(request)
    assert {term.name: term.nbytes for term in plan.device} == {
        "resident": resident,
        "resident gradients": resident,
        "shared gradients": embed,  # two units use it: complete after the second
        "largest unit": 2 * trained,
    }
    assert frozen < trained


def test_nested_units_are_on_the_device_together() -> None:
    request = request_of(zoo.Nested())
    sizes = {group.key: group.flat_nbytes for group in request.groups}
    largest = next(term for term in make_placement(request).device if term.name == "largest unit")
    assert largest.nbytes == 2 * (sizes["first/float32"] + sizes["first.inner.0/float32"])
    assert "first.inner.0 and what encloses it" in largest.why


# End to end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [zoo.Net, zoo.Nested, zoo.Frozen, lambda: zoo.Net(tied=True)])
def test_the_smallest_budgets_are_enough_for_training(make: Any, schedule: Schedule, offload: MakeEngine) -> None:
    chosen: dict[str, Any] = {"schedule": schedule.value, "precision": "fp32"}
    plan = offload(zoo.build(make), **chosen).plan.placement
    chosen["host"] = {"budget": plan.host_minimum_nbytes}
    chosen["device"] = {"kind": "cpu", "budget": plan.device_minimum_nbytes}
    model, plain = zoo.build(make), zoo.build(make)
    offload(model, **chosen)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for step in range(2):
        losses = []
        for net, update in ((model, optimizer), (plain, expected)):
            loss = zoo.loss_of(net, zoo.batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            update.step()
            update.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]


def test_updates_of_small_units_do_not_wait_for_the_next_forward() -> None:
    """They are too short to balance anything, and would wait in the place of others."""
    with torch.device("meta"):
        model = Stack([5, 150] * 6, tied=False, frozen=0, nested=False)
    request = request_of(model, schedule=Schedule.OVERLAPPED)
    left = make_placement(request).updated_in_forward
    names = [unit.name for unit in request.units if left & {group.index for group in unit.groups}]
    assert len(names) >= 2
    assert all(int(name.removeprefix("layers.")) % 2 for name in names), names


def test_no_update_waits_for_the_next_forward_where_steps_are_durable() -> None:
    """A step is committed when all of it has been updated."""
    with torch.device("meta"):
        model = Stack([150] * 8, tied=False, frozen=0, nested=False)
    request = request_of(model, schedule=Schedule.OVERLAPPED)
    assert make_placement(request).updated_in_forward
    assert not make_placement(replace(request, is_durable=True)).updated_in_forward
