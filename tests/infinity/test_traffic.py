"""Closed forms of a step's NVMe traffic: the numbers of the design for a big model, and shares that add up."""

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn

from infinity.config import Precision, Schedule
from infinity.demand import Request
from infinity.devices.cpu import CpuDevice
from infinity.grouping import make_groups
from infinity.groups import FlatGroup
from infinity.models.gpt import Gpt, GptShape
from infinity.optim.kernels import kernel_for
from infinity.placement import Placement, make_placement
from infinity.plan.traffic import KindTraffic, StepTraffic, expected_step_traffic
from infinity.units import partition
from storage.align import PAGE_NBYTES
from tests.zoo import Nested, Net

PLENTY = 1 << 50
SHAPE = GptShape(layers=20, hidden=2048, heads=16, seq=512)  # a billion parameters


@dataclass(frozen=True)
class Case:
    """A placement of the big model and what it is made of."""

    request: Request
    placement: Placement

    @property
    def groups(self) -> list[FlatGroup]:
        return list(self.request.groups)

    @property
    def streamed(self) -> list[FlatGroup]:
        return [group for group in self.groups if group.index not in self.placement.pinned_params]

    @property
    def parameters(self) -> int:
        """Trained parameters that are in no memory for good."""
        return sum(group.layout.payload_numel for group in self.streamed if group.trainable)

    def payload(self, indices: frozenset[int]) -> int:
        return sum(self.groups[index].layout.payload_numel for index in indices)

    def step(self, *, is_first: bool = False, micro_batches: int = 1) -> StepTraffic:
        return expected_step_traffic(
            self.placement, self.groups, self.request.fields, is_first=is_first, micro_batches=micro_batches
        )


@cache
def base(precision: Precision, frozen_blocks: int = 0) -> Request:
    with torch.device("meta"):
        model = Gpt(SHAPE)
    for block in model.blocks[:frozen_blocks]:
        block.requires_grad_(False)
    kernel = kernel_for(precision)
    specs = partition(model, resident_threshold_nbytes=1 << 20)
    groups, units = make_groups(specs, precision, kernel, CpuDevice(PLENTY))
    return Request(
        units=units,
        groups=groups,
        fields=kernel.fields,
        schedule=Schedule.OVERLAPPED,
        schedule_reason="test",
        host_budget_nbytes=PLENTY,
        device_budget_nbytes=PLENTY,
        nvme_budget_nbytes=None,
        chunk_nbytes=None,
        staging_nbytes=0,
    )


def case(precision: Precision, schedule: Schedule, more_nbytes: int = 0, frozen_blocks: int = 0) -> Case:
    """With the smallest host budget that holds every group whole and `more_nbytes`."""
    request = replace(base(precision, frozen_blocks), schedule=schedule)
    smallest = make_placement(request).host_whole_nbytes
    request = replace(request, host_budget_nbytes=smallest + more_nbytes)
    return Case(request, make_placement(request))


BIG = [(Precision.BF16, 14, 12), (Precision.FP32, 16, 12)]


@pytest.mark.parametrize(("precision", "read", "write"), BIG)
def test_bytes_per_parameter_of_the_design(precision: Precision, read: int, write: int) -> None:
    run = case(precision, Schedule.OVERLAPPED)
    size = 2 if precision is Precision.BF16 else 4
    assert run.parameters > 1_000_000_000
    assert run.parameters / sum(group.layout.payload_numel for group in run.groups) > 0.99
    kept = run.payload(run.placement.keep_at_turn) + run.payload(run.placement.keep_at_boundary)
    traffic = run.step()
    assert traffic.read_nbytes == read * run.parameters - size * kept
    assert traffic.write_nbytes == write * run.parameters
    assert (traffic.grad.read_nbytes, traffic.grad.write_nbytes) == (0, 0)
    assert traffic.param.write_nbytes == size * run.parameters
    assert traffic.state.read_nbytes == traffic.state.write_nbytes == (12 - size) * run.parameters


@pytest.mark.parametrize(("precision", "read", "write"), BIG)
def test_never_more_than_the_design_says(precision: Precision, read: int, write: int) -> None:
    for more_nbytes in range(0, 16 << 30, 1 << 30):
        run = case(precision, Schedule.OVERLAPPED, more_nbytes)
        parameters = sum(group.layout.payload_numel for group in run.groups)
        traffic = run.step()
        assert traffic.read_nbytes <= read * parameters
        assert traffic.write_nbytes <= write * parameters
        first = run.step(is_first=True)
        assert first.read_nbytes <= (read - 8) * parameters
        assert first.state.read_nbytes == 0
        assert first.write_nbytes == traffic.write_nbytes


@pytest.mark.parametrize("precision", Precision)
def test_more_host_memory_never_moves_more(precision: Precision) -> None:
    steps = [case(precision, Schedule.OVERLAPPED, more << 28).step() for more in range(0, 60, 3)]
    reads = [traffic.read_nbytes for traffic in steps]
    writes = [traffic.write_nbytes for traffic in steps]
    assert reads == sorted(reads, reverse=True)
    assert writes == sorted(writes, reverse=True)
    assert reads[-1] < reads[0] / 2


def test_everything_in_memory_moves_nothing() -> None:
    run = case(Precision.BF16, Schedule.OVERLAPPED, 64 << 30)
    assert (run.step().read_nbytes, run.step().write_nbytes) == (0, 0)
    assert run.step() == StepTraffic()


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.OVERLAPPED])
def test_what_lies_in_memory_removes_its_share_exactly(schedule: Schedule) -> None:
    run = case(Precision.BF16, schedule)
    streamed = run.streamed[3]
    pinned = replace(run.placement, pinned_params=run.placement.pinned_params | {streamed.index})
    saved = run.payload(frozenset({streamed.index}))
    less, all_of_it = Case(run.request, pinned).step(), run.step()
    reads = 3 if schedule is Schedule.SYNCHRONOUS else 2
    assert all_of_it.param.read_nbytes - less.param.read_nbytes == 2 * reads * saved
    assert all_of_it.param.write_nbytes - less.param.write_nbytes == 2 * saved
    states = replace(pinned, pinned_states=run.placement.pinned_states | {streamed.index})
    least = Case(run.request, states).step()
    assert less.state.read_nbytes - least.state.read_nbytes == 10 * saved
    assert less.state.write_nbytes - least.state.write_nbytes == 10 * saved
    assert least.param == less.param


def test_the_synchronous_schedule_reads_parameters_once_more_and_spills_gradients() -> None:
    run = case(Precision.BF16, Schedule.SYNCHRONOUS)
    traffic = run.step()
    kept = run.payload(run.placement.keep_at_turn) + 2 * run.payload(run.placement.keep_at_boundary)
    spilled = run.payload(run.placement.spilled_gradients - run.placement.lasting_gradients)
    assert traffic.param.read_nbytes == 3 * 2 * run.parameters - 2 * kept
    assert (traffic.grad.read_nbytes, traffic.grad.write_nbytes) == (4 * spilled, 4 * spilled)
    assert spilled > 0.9 * run.parameters


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_accumulation_repeats_forward_and_backward_only(micro_batches: int) -> None:
    run = case(Precision.FP32, Schedule.SYNCHRONOUS)
    none = frozenset[int]()
    nothing_kept = replace(run.placement, keep_at_turn=none, keep_at_boundary=none, lasting_gradients=none)
    run = replace(run, placement=nothing_kept)
    one, several = run.step(), run.step(micro_batches=micro_batches)
    assert several.state == one.state
    assert several.param.write_nbytes == one.param.write_nbytes
    assert several.param.read_nbytes == (2 * micro_batches + 1) * 4 * run.parameters
    assert several.grad.read_nbytes == micro_batches * one.grad.read_nbytes
    assert several.grad.write_nbytes == micro_batches * one.grad.write_nbytes


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_gradients_that_stay_in_transit_save_a_write_and_a_read_of_a_step(micro_batches: int) -> None:
    run = case(Precision.FP32, Schedule.SYNCHRONOUS)
    lasting = run.placement.lasting_gradients
    assert lasting
    without = replace(run, placement=replace(run.placement, lasting_gradients=frozenset()))
    more, less = without.step(micro_batches=micro_batches), run.step(micro_batches=micro_batches)
    assert more.grad.read_nbytes - less.grad.read_nbytes == 4 * run.payload(lasting)
    assert more.grad.write_nbytes - less.grad.write_nbytes == 4 * run.payload(lasting)
    assert (less.param, less.state) == (more.param, more.state)


def test_frozen_parameters_are_only_read() -> None:
    run = case(Precision.BF16, Schedule.OVERLAPPED, frozen_blocks=5)
    frozen = [group for group in run.groups if not group.trainable]
    assert len(frozen) == 5
    alone = expected_step_traffic(run.placement, frozen, run.request.fields, is_first=False)
    assert (alone.write_nbytes, alone.state.read_nbytes, alone.grad.read_nbytes) == (0, 0, 0)
    kept = [g for g in frozen if g.index in run.placement.keep_at_turn]
    kept += [g for g in frozen if g.index in run.placement.keep_at_boundary]
    payload = sum(group.layout.payload_numel for group in frozen)
    assert alone.param.read_nbytes == 4 * payload - 2 * sum(group.layout.payload_numel for group in kept)


def test_padding_is_counted_apart() -> None:
    run = case(Precision.BF16, Schedule.OVERLAPPED)
    parts = [expected_step_traffic(run.placement, [g], run.request.fields, is_first=False) for g in run.groups]
    traffic = run.step()
    for kind in ("param", "state", "grad"):
        whole: KindTraffic = getattr(traffic, kind)
        for name in KindTraffic.__slots__:
            assert getattr(whole, name) == sum(getattr(getattr(part, kind), name) for part in parts)
    sizes = {group.index: group.layout.numel - group.layout.payload_numel for group in run.streamed}
    assert traffic.state.write_padding_nbytes == 10 * sum(sizes.values())
    assert traffic.param.write_padding_nbytes == 2 * sum(sizes.values())
    assert traffic.state.write_padding_nbytes < traffic.state.write_nbytes / 1000


# Shared by units -------------------------------------------------------------------------------------------------


def case_of(model: nn.Module, schedule: Schedule, more_nbytes: int = 0) -> Case:
    kernel = kernel_for(Precision.FP32)
    specs = partition(model, resident_threshold_nbytes=0)
    groups, units = make_groups(specs, Precision.FP32, kernel, CpuDevice(PLENTY))
    request = replace(base(Precision.FP32), units=units, groups=groups, fields=kernel.fields, schedule=schedule)
    smallest = make_placement(request).host_whole_nbytes
    request = replace(request, host_budget_nbytes=smallest + more_nbytes)
    return Case(request, make_placement(request))


def tied() -> nn.Module:
    """Two blocks between an embedding and a head with the same weight, which is the first group."""
    with torch.device("meta"):
        return Net(blocks=2, vocab=1000, tied=True)


@pytest.mark.parametrize("schedule", [Schedule.SYNCHRONOUS, Schedule.OVERLAPPED])
def test_what_units_share_is_read_for_each_of_them(schedule: Schedule) -> None:
    run = case_of(tied(), schedule)
    shared, *others = (group.layout.payload_numel * 4 for group in run.groups)
    assert run.placement.uses == {group.index: 1 + (group.index == 0) for group in run.groups}
    in_step = sum(others) if schedule is Schedule.SYNCHRONOUS else 0
    # Its update comes after the backward of both, too late for the bytes that these have read.
    assert run.step().param.read_nbytes == 2 * sum(others) + 4 * shared + in_step + shared
    assert run.step().param.write_nbytes == shared + sum(others)


def test_accumulation_reads_what_units_share_for_each_of_them() -> None:
    run = case_of(tied(), Schedule.SYNCHRONOUS)
    once, thrice = (run.step(micro_batches=count).param.read_nbytes for count in (1, 3))
    shared, *others = (group.layout.payload_numel * 4 for group in run.groups)
    assert thrice - once == 2 * (2 * sum(others) + 4 * shared)


def test_what_units_share_is_placed_in_memory_first() -> None:
    with torch.device("meta"):
        model = Net(blocks=4)
    model.blocks[3].up.weight = model.blocks[2].up.weight
    keys: set[str] = set()
    for pages in range(1000):
        run = case_of(model, Schedule.OVERLAPPED, pages * PAGE_NBYTES)
        keys = {run.groups[index].key for index in run.placement.pinned_params if "blocks" in run.groups[index].key}
        if keys:
            break
    assert keys == {"blocks.2/float32"}


def test_a_unit_inside_another_finds_what_it_shares_gathered() -> None:
    with torch.device("meta"):
        model = Nested()
    model.first.inner[0].register_parameter("shared", model.first.before)
    run = case_of(model, Schedule.OVERLAPPED)
    assert set(run.placement.uses.values()) == {1}
    assert any(len(group.units) == 2 for group in run.groups)
