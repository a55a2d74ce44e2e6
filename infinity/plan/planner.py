"""From a model, hardware and a workload to a plan: does it fit, where everything lies, and how long a step takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from infinity.config import Precision, Schedule, StateFormat
from infinity.demand import Request
from infinity.errors import PlacementError
from infinity.groups import FlatGroup, Unit
from infinity.optim.hyper import StateField
from infinity.optim.kernels import kernel_for
from infinity.placement import Placement, make_placement, place_for_any_loop
from infinity.plan.bounds import lower_bounds, moved_nbytes, scenario_traffic
from infinity.plan.budgets import (
    describe_device_room,
    describe_host_room,
    device_room_nbytes,
    host_room_nbytes,
    least_host_memory_nbytes,
)
from infinity.plan.hardware import Hardware
from infinity.plan.model import BACKWARD_FLOPS, ModelPlan
from infinity.plan.ranks import rank_groups
from infinity.plan.rates import rank_drive, rank_speeds
from infinity.plan.scenario import Scenario, UnitTime
from infinity.plan.simulate import ENOUGH_MICRO_BATCHES, MOST_MICRO_BATCHES, Simulated, simulate_long
from infinity.plan.spread import drive_shares
from infinity.plan.traffic import StepTraffic
from infinity.plan.wear import DriveWear, predict_wear
from infinity.sizes import format_nbytes, option_nbytes
from infinity.unit_advice import unfound_units
from infinity.units import RESIDENT_NAME

_AMPLE_NBYTES = 1 << 60
_LONGEST_STEP_S = 5e5  # so that a simulation of several, each longer than its bound, stays within its clock
_SECONDS_OF_A_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained. `batch` is what one rank runs forward and backward at once; a step has `accumulate` of them.

    `micro_batches` are the slices in which a unit runs a batch while it is gathered.
    """

    batch: int
    accumulate: int = 1
    micro_batches: int = 1
    precision: Precision = Precision.BF16
    state_format: StateFormat = StateFormat.FP32
    schedule: Schedule = Schedule.AUTO
    recompute: bool = True
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a plan is made from; the same request always gives the same plan."""

    model: ModelPlan
    hardware: Hardware
    workload: Workload

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.workload.batch * self.workload.accumulate * self.model.seq * self.hardware.ranks

    @property
    def activation_nbytes(self) -> int:
        """Of one rank, at the turn from forward to backward."""
        work = self.workload
        return self.model.activation_nbytes(recompute=work.recompute, batches=work.batch, slices=work.micro_batches)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds. `notes` tell what was decided and assumed, in words."""

    units: Sequence[Unit]
    groups: Sequence[FlatGroup]
    fields: tuple[StateField, ...]
    placement: Placement
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A finished plan.

    Attributes:
        step_s: predicted seconds of a step, never below `bound_s`.
        bounds_s: what each resource needs for a step by itself, largest first.
        simulated: the timeline of the step, of one rank.
        traffic: NVMe bytes of one rank in closed form; the simulation moves the same.
        flops_utilisation: of the GPUs' peak, counting what the model needs (no recomputation).
        balanced_tokens: tokens of a step from which on computing takes longer than everything else, when the batch
            grows; None where nothing computes.
        by_drive: bytes of a step that each drive of one node reads and writes, for all its ranks, padding included.
        wear: of the same drives.
    """

    request: PlanRequest
    rank: RankPlan
    scenario: Scenario
    simulated: Simulated
    step_s: float
    bounds_s: dict[str, float]
    traffic: StepTraffic
    tokens_per_s: float
    flops_utilisation: float
    balanced_tokens: float | None
    by_drive: list[tuple[int, int]]
    wear: list[DriveWear]

    @property
    def bound_s(self) -> float:
        """Least seconds of a step: what its slowest resource needs alone."""
        return max(self.bounds_s.values())


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that fits, but for its timeline: what takes long has not been simulated."""

    request: PlanRequest
    rank: RankPlan
    scenario: Scenario
    bounds_s: dict[str, float]


def make_plan(request: PlanRequest, *, keep_spans: bool = False) -> StepPlan:
    """Plan one step.

    Raises:
        PlacementError: it does not fit; the arithmetic and the smallest memory that works. Or a step would take weeks.
    """
    draft = draft_plan(request)
    return finish_plan(draft, simulate_long(draft.scenario, keep_spans=keep_spans))


def draft_plan(request: PlanRequest) -> Draft:
    """The first part of `make_plan`, which is the one that raises."""
    rank = plan_rank(request)
    scenario = make_scenario(request, rank)
    bounds = dict(sorted(lower_bounds(scenario).items(), key=lambda item: -item[1]))
    _refuse_endless(bounds)
    return Draft(request, rank, scenario, bounds)


def finish_plan(draft: Draft, simulated: Simulated) -> StepPlan:
    """The last part of `make_plan`, with what the scenario of the first one came to."""
    request, bounds = draft.request, draft.bounds_s
    step_s = max(simulated.step_s, *bounds.values())
    tokens = request.tokens_per_step
    hardware, model = request.hardware, request.model
    useful = model.step_flops(recompute=False) * request.workload.batch * request.workload.accumulate
    others = max((s for name, s in bounds.items() if name != "compute"), default=0.0)
    compute_s = bounds["compute"]
    traffic = scenario_traffic(draft.scenario)
    by_drive = _by_drive(hardware, *moved_nbytes(traffic))
    return StepPlan(
        request=request,
        rank=draft.rank,
        scenario=draft.scenario,
        simulated=simulated,
        step_s=step_s,
        bounds_s=bounds,
        traffic=traffic,
        tokens_per_s=tokens / step_s,
        flops_utilisation=useful / (step_s * hardware.gpu.flops_per_s),
        balanced_tokens=tokens * others / compute_s if compute_s else None,
        by_drive=by_drive,
        wear=predict_wear(hardware.drives, [written for _, written in by_drive], step_s),
    )


def _refuse_endless(bounds_s: dict[str, float]) -> None:
    """Bounds in falling order."""
    name, bound_s = next(iter(bounds_s.items()))
    if bound_s > _LONGEST_STEP_S:
        raise PlacementError(
            f"a step would take {bound_s / _SECONDS_OF_A_DAY:,.0f} days or more, by what {name} needs alone; plans end "
            f"at {_LONGEST_STEP_S / _SECONDS_OF_A_DAY:,.1f} days. Give a faster one, or a smaller model or batch"
        )


def _by_drive(hardware: Hardware, read_nbytes: int, write_nbytes: int) -> list[tuple[int, int]]:
    """What each drive of a node moves, from what one rank does."""
    read, write = read_nbytes * hardware.gpus, write_nbytes * hardware.gpus
    shares = drive_shares([drive.model for drive in hardware.drives], read, write)
    return [(round(read * share), round(write * share)) for share in shares]


def plan_rank(request: PlanRequest) -> RankPlan:
    """Where everything of one rank lies.

    Raises:
        PlacementError: it does not fit.
    """
    model, hardware, workload = request.model, request.hardware, request.workload
    kernel = kernel_for(workload.precision, state_format=workload.state_format)
    groups, units = rank_groups(model.specs, workload.precision, kernel, is_gpu=hardware.has_gpu, ranks=hardware.ranks)
    schedule, reason = _schedule(workload)
    wanted = Request(
        units=units,
        groups=groups,
        fields=kernel.fields,
        schedule=schedule,
        schedule_reason=reason,
        host_budget_nbytes=host_budget_nbytes(request),
        device_budget_nbytes=device_budget_nbytes(request),
        nvme_budget_nbytes=_drive_space(hardware),
        chunk_nbytes=None,
        staging_nbytes=0,
        local_size=hardware.gpus,
        n_drives=len(hardware.drives),
    )
    try:
        placement = place_for_any_loop(wanted, reason) if schedule is Schedule.AUTO else make_placement(wanted)
    except PlacementError as error:
        raise PlacementError(f"{error}{_told_reserve(request, wanted)}") from None
    _refuse_without_drives(placement, hardware)
    return RankPlan(units, groups, kernel.fields, placement, _notes(request))


def device_budget_nbytes(request: PlanRequest) -> int:
    """What is left on the device for parameters and gradients.

    Raises:
        PlacementError: the activations alone do not fit.
    """
    if request.workload.device_budget_nbytes is not None:
        return request.workload.device_budget_nbytes
    room, activations = device_room_nbytes(request.hardware), request.activation_nbytes
    if room > activations:
        return room - activations
    fitting = _largest_batch(request, room)
    if fitting == 0:
        smaller = "Even a batch of 1 needs a shorter sequence, or a device with more memory"
    else:
        smaller = f"Use a smaller batch ({fitting} at most) or a shorter sequence"
        if not request.workload.recompute:
            smaller += ", or recompute activations"
        elif request.workload.micro_batches < request.workload.batch:
            smaller += ", or cut the batch with --micro-batches"
    raise PlacementError(
        f"the activations of a batch of {request.workload.batch} x {request.model.seq} tokens take "
        f"{format_nbytes(activations)}, and {describe_device_room(request.hardware)}. {smaller}"
    )


def _largest_batch(request: PlanRequest, room_nbytes: int) -> int:
    """The largest batch of which the activations fit; 0: none does."""
    work, model = request.workload, request.model
    return bisect_left(
        range(1, work.batch + 1),
        room_nbytes,
        key=lambda n: model.activation_nbytes(recompute=work.recompute, batches=n, slices=min(work.micro_batches, n)),
    )


def host_budget_nbytes(request: PlanRequest) -> int:
    """What one rank may use of the host memory of its node."""
    given_nbytes = request.workload.host_budget_nbytes
    return host_room_nbytes(request.hardware) if given_nbytes is None else given_nbytes


def _told_reserve(request: PlanRequest, refused: Request) -> str:
    """Why the host budget is less than the memory of a node, and the least memory that works; empty where it is not."""
    if request.workload.host_budget_nbytes is not None:
        return ""
    roomy = replace(refused, host_budget_nbytes=_AMPLE_NBYTES, device_budget_nbytes=_AMPLE_NBYTES)
    is_auto = refused.schedule is Schedule.AUTO
    schedules = (Schedule.DEFERRED, Schedule.SYNCHRONOUS) if is_auto else (refused.schedule,)  # all that are tried
    placed = [make_placement(replace(roomy, schedule=each, nvme_budget_nbytes=None)) for each in schedules]
    need_nbytes = max(placement.host_minimum_nbytes for placement in placed)
    if refused.host_budget_nbytes >= need_nbytes:
        return ""
    least = option_nbytes(least_host_memory_nbytes(request.hardware, need_nbytes))
    return f"\n{describe_host_room(request.hardware)}; the smallest that works: --host-memory {least}"


def _schedule(workload: Workload) -> tuple[Schedule, str]:
    """The schedule of a workload, and why; `AUTO` where it depends on what fits."""
    if workload.schedule is not Schedule.AUTO:
        return workload.schedule, "asked for"
    if workload.precision is Precision.FP16:
        return Schedule.AUTO, "an overflow may skip the step, which is known only with all gradients"
    if workload.accumulate > 1:
        return Schedule.AUTO, "accumulation needs all gradients before the first update"
    return Schedule.OVERLAPPED, "auto: no accumulation, so units are updated during backward"


def _drive_space(hardware: Hardware) -> int | None:
    """What one rank may put on the drives of its node; None where a capacity is not known."""
    capacities = [drive.capacity_nbytes for drive in hardware.drives]
    return sum(capacities) // hardware.gpus if capacities and all(capacities) else None


def _refuse_without_drives(placement: Placement, hardware: Hardware) -> None:
    if placement.nvme_nbytes and not hardware.drives:
        need = least_host_memory_nbytes(hardware, placement.host_budget_nbytes + placement.nvme_nbytes)
        raise PlacementError(
            f"{format_nbytes(placement.nvme_nbytes * hardware.gpus)} do not fit in host memory and there is no drive. "
            f"Add --drive, or host memory: about {format_nbytes(need)} hold everything"
        )


def _notes(request: PlanRequest) -> tuple[str, ...]:
    hardware, model = request.hardware, request.model
    notes = [
        *hardware.notes,
        f"compute: {hardware.efficiency:.0%} of the peak of {hardware.gpu.flops_per_s / 1e12:.1f} TFLOPS "
        f"({hardware.gpu.source}) in large products",
        f"host memory: {hardware.dram_bytes_per_s / 1e9:.0f} GB/s; link: {hardware.link_bytes_per_s / 1e9:.1f} GB/s "
        "each way",
    ]
    notes += [f"drive {drive.name}: {drive.source}" for drive in dict.fromkeys(hardware.drives) if drive.source]
    if not model.is_traced:
        notes.append(
            f"the forward of this model could not be followed for --seq {model.seq} ({model.untraced}): "
            "2 operations per parameter and token are assumed, and "
            "activations are not counted"
        )
    if request.workload.accumulate > MOST_MICRO_BATCHES:
        notes.append(
            f"of {request.workload.accumulate} batches of a step the first {ENOUGH_MICRO_BATCHES} are simulated; each "
            "of the others takes what the last of these adds"
        )
    if (unfound := unfound_units(model.module, model.specs)) is not None:
        notes.append(unfound)
    return tuple(notes)


# Scenario -----------------------------------------------------------------------------------------------------------


def make_scenario(request: PlanRequest, rank: RankPlan) -> Scenario:
    """What the simulator is told about one rank."""
    hardware = request.hardware
    by_name = {unit.name: unit.index for unit in rank.units}
    order = [by_name[name] for name in request.model.order if name in by_name]
    streamed = {unit.index for unit in rank.units if not unit.resident}
    return Scenario(
        units=rank.units,
        groups=rank.groups,
        fields=rank.fields,
        placement=rank.placement,
        times=_times(request, rank.units),
        speeds=rank_speeds(hardware),
        drives=[rank_drive(drive.model, hardware.gpus) for drive in hardware.drives],
        micro_batches=request.workload.accumulate,
        order=order if set(order) == streamed else (),
    )


def _times(request: PlanRequest, units: Sequence[Unit]) -> dict[int, UnitTime]:
    """Seconds of each unit; what lies outside of all units counts to the resident one, or to the last."""
    model, workload, flops_per_s = request.model, request.workload, request.hardware.flops_per_s
    backward = BACKWARD_FLOPS + workload.recompute
    overhead_s = request.hardware.unit_s * workload.micro_batches
    seconds = {unit.index: 0.0 for unit in units}
    last = units[-1].index
    by_name = {unit.name: unit.index for unit in units}
    by_name[RESIDENT_NAME] = next((unit.index for unit in units if unit.resident), last)
    for name, work in model.work.items():
        index = by_name.get(name, last)
        seconds[index] += work.forward_flops * workload.batch / flops_per_s + overhead_s
    return {index: UnitTime(each, each * backward) for index, each in seconds.items()}
