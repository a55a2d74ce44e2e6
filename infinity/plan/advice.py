"""What to change: the same plan with one thing different, the knobs tried against each other, and sweeps of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from infinity.config import Precision, Schedule, StateFormat
from infinity.errors import ConfigError, PlacementError
from infinity.plan.planner import Draft, PlanRequest, StepPlan, Workload, draft_plan, finish_plan
from infinity.plan.scenario import Scenario
from infinity.plan.side_by_side import side_by_side
from infinity.plan.simulate import Simulated, simulate_long
from infinity.sizes import format_nbytes, option_nbytes, parse_nbytes

_MOST_SWEPT = 64
_NEAREST_TRIES = 12  # doublings of memory, less one
_MOST_MORE_DRIVES = 8


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed. `plan` is None when it would not fit, and `problem` says why."""

    what: str
    plan: StepPlan | None
    problem: str = ""


def plan_with_changes(
    request: PlanRequest, *, keep_spans: bool = False, on_plan: Callable[[StepPlan], object] = lambda plan: None
) -> tuple[StepPlan, list[Change]]:
    """A plan, and what could be changed.

    One more drive, more memory, a larger batch, another schedule, smaller state: each planned by itself.

    Args:
        keep_spans: of the plan itself, for its timeline.
        on_plan: told the plan as soon as it is made.

    Raises:
        PlacementError: as `make_plan`.
    """
    draft = draft_plan(request)
    drafted = [_drafted(what, changed) for what, changed in _changes(request, draft.rank.placement.schedule)]
    plans: list[StepPlan] = []

    def made(simulated: Simulated) -> None:
        plans.append(finish_plan(draft, simulated))
        on_plan(plans[0])

    simulated = side_by_side(_figures, [(draft.scenario, keep_spans), *_wanted(drafted)], on_first=made)
    return plans[0], _finished(drafted, simulated[1:])


def _changes(request: PlanRequest, present: Schedule) -> Iterator[tuple[str, PlanRequest]]:
    hardware, workload = request.hardware, request.workload
    if hardware.drives:
        last = hardware.drives[-1]
        more = replace(hardware, drives=(*hardware.drives, last))
        yield f"one more drive like {last.name}", replace(request, hardware=more)
    if workload.host_budget_nbytes is None:
        doubled = 2 * hardware.host_memory_nbytes
        yield (
            f"{format_nbytes(doubled)} of host memory",
            replace(request, hardware=replace(hardware, host_memory_nbytes=doubled)),
        )
    yield f"--batch {2 * workload.batch}", with_workload(request, batch=2 * workload.batch)
    if workload.accumulate == 1:
        yield "--accumulate 2", with_workload(request, accumulate=2, schedule=Schedule.AUTO)
    else:
        slices = workload.accumulate * workload.micro_batches
        together = with_workload(
            request, batch=workload.batch * workload.accumulate, accumulate=1, micro_batches=slices
        )
        yield f"--batch {together.workload.batch} --micro-batches {slices} --accumulate 1", together
    others = [schedule for schedule in _schedules(workload, workload.accumulate) if schedule is not present]
    # It waits where others go on, and is told only where there is no other.
    for schedule in [each for each in others if each is not Schedule.SYNCHRONOUS] or others:
        yield f"--schedule {schedule.value}", with_workload(request, schedule=schedule)
    recompute = "--no-recompute" if workload.recompute else "--recompute"
    yield recompute, with_workload(request, recompute=not workload.recompute)
    if workload.precision is not Precision.FP32 and workload.state_format is StateFormat.FP32:
        for smaller in (StateFormat.BF16, StateFormat.INT8):
            what = f"--state-format {smaller.value} (moments are rounded)"
            yield what, with_workload(request, state_format=smaller)


def with_workload(
    request: PlanRequest,
    *,
    batch: int | None = None,
    accumulate: int | None = None,
    micro_batches: int | None = None,
    schedule: Schedule | None = None,
    recompute: bool | None = None,
    state_format: StateFormat | None = None,
) -> PlanRequest:
    """The same request with another workload."""
    workload = request.workload
    batch = workload.batch if batch is None else batch
    micro_batches = workload.micro_batches if micro_batches is None else micro_batches
    workload = replace(
        workload,
        batch=batch,
        accumulate=workload.accumulate if accumulate is None else accumulate,
        micro_batches=min(micro_batches, batch),
        schedule=workload.schedule if schedule is None else schedule,
        recompute=workload.recompute if recompute is None else recompute,
        state_format=workload.state_format if state_format is None else state_format,
    )
    return replace(request, workload=workload)


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A change whose plan has not been simulated."""

    what: str
    draft: Draft | None
    problem: str = ""


def _drafted(what: str, request: PlanRequest) -> _Drafted:
    try:
        return _Drafted(what, draft_plan(request))
    except PlacementError as error:
        return _Drafted(what, None, str(error).splitlines()[0])


def _planned(drafted: Sequence[_Drafted]) -> list[Change]:
    """Changes with their plans, of which as many are simulated at once as there are cores."""
    return _finished(drafted, side_by_side(_figures, _wanted(drafted)))


def _wanted(drafted: Sequence[_Drafted]) -> list[tuple[Scenario, bool]]:
    return [(each.draft.scenario, False) for each in drafted if each.draft is not None]


def _finished(drafted: Sequence[_Drafted], simulated: Iterable[Simulated]) -> list[Change]:
    """Changes, with what those that fit came to."""
    left = iter(simulated)
    return [
        Change(each.what, None if each.draft is None else finish_plan(each.draft, next(left)), each.problem)
        for each in drafted
    ]


def _figures(wanted: tuple[Scenario, bool]) -> Simulated:
    """Without the transfers, at which nobody looks, and which would take long to get from one process to another."""
    scenario, keep_spans = wanted
    return replace(simulate_long(scenario, keep_spans=keep_spans), transfers=[])


def _schedules(workload: Workload, accumulate: int) -> list[Schedule]:
    """What a loop that accumulates so many batches may use."""
    needs_all = accumulate > 1 or workload.precision is Precision.FP16
    return [Schedule.SYNCHRONOUS, Schedule.DEFERRED, *([] if needs_all else [Schedule.OVERLAPPED])]


def search(request: PlanRequest) -> list[Change]:
    """Every way to run the same tokens per step: accumulation, schedules, recomputation. Fastest first.

    A batch that is too large for the device is tried in slices.
    """
    together = request.workload.batch * request.workload.accumulate
    found = []
    for accumulate in _divisors(together):
        for schedule in _schedules(request.workload, accumulate):
            for recompute in (True, False):
                batch = together // accumulate
                changed = with_workload(
                    request, batch=batch, accumulate=accumulate, schedule=schedule, recompute=recompute
                )
                words = f"--schedule {schedule.value} --{'recompute' if recompute else 'no-recompute'}"
                found.append(_whole_or_sliced(changed, words))
    return sorted(_planned(found), key=lambda change: change.plan.step_s if change.plan is not None else float("inf"))


def _divisors(number: int) -> list[int]:
    """In rising order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _whole_or_sliced(request: PlanRequest, words: str) -> _Drafted:
    workload = request.workload
    rest = f"--accumulate {workload.accumulate} {words}"
    whole = _drafted(f"--batch {workload.batch} {rest}", with_workload(request, micro_batches=1))
    if whole.draft is not None or not workload.recompute or workload.batch == 1:
        return whole
    what = f"--batch {workload.batch} --micro-batches {workload.batch} {rest}"
    sliced = _drafted(what, with_workload(request, micro_batches=workload.batch))
    return whole if sliced.draft is None else sliced


def nearest_that_works(request: PlanRequest) -> Change | None:
    """The least change with which a request that does not fit would.

    Tried in this order: recomputing, smaller batches, more drives, more host memory, more memory on the device as well.
    """
    for what, changed in _nearest(request):
        drafted = _drafted(what, changed)
        if drafted.draft is not None:
            return _planned([drafted])[0]
    return None


def _nearest(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    workload, hardware = request.workload, request.hardware
    if not workload.recompute:
        yield "--recompute", with_workload(request, recompute=True)
    batch = workload.batch
    while batch > 1:
        batch //= 2
        yield f"--batch {batch} --recompute", with_workload(request, batch=batch, recompute=True)
    if hardware.drives:
        last = hardware.drives[-1]
        for count in range(1, _MOST_MORE_DRIVES + 1):
            more = replace(hardware, drives=(*hardware.drives, *[last] * count))
            yield f"{count} more of drive {last.name}", replace(request, hardware=more)
    for more_device in range(_NEAREST_TRIES):
        for more_host in range(_NEAREST_TRIES):
            if more_device or more_host:
                yield from _with_more_memory(request, 1 << more_device, 1 << more_host)


def _with_more_memory(request: PlanRequest, device: int, host: int) -> Iterator[tuple[str, PlanRequest]]:
    """So many times the memory of the device and of the host; with the batch as it is, and with the smallest."""
    hardware = request.hardware
    bigger, words = hardware, []
    if device > 1:
        gpu = replace(hardware.gpu, memory_nbytes=hardware.device_memory_nbytes * device)
        bigger = replace(bigger, gpu=gpu)
        words.append(f"--device-memory {option_nbytes(gpu.memory_nbytes)}")
    if host > 1:
        bigger = replace(bigger, host_memory_nbytes=hardware.host_memory_nbytes * host)
        words.append(f"--host-memory {option_nbytes(bigger.host_memory_nbytes)}")
    unlimited = replace(request.workload, host_budget_nbytes=None)
    wanted = replace(request, hardware=bigger, workload=unlimited)
    yield " ".join(words), wanted
    yield " ".join([*words, "--batch 1 --recompute"]), with_workload(wanted, batch=1, recompute=True)


# Sweeps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sweep:
    """One knob over a range: `values` as text, and the plan at each."""

    name: str
    values: list[str]
    points: list[Change]


def sweep(request: PlanRequest, text: str) -> Sweep:
    """Plan at every value of a range such as `host-memory=64GiB..512GiB` (doubling) or `drives=1..8`.

    Raises:
        ConfigError: the text is not understood.
    """
    name, _, span = text.partition("=")
    first, dots, last = span.partition("..")
    if name not in _KNOBS or not dots:
        raise ConfigError(f"--sweep {text}: allowed: NAME=FIRST..LAST with NAME one of {', '.join(_KNOBS)}")
    parse, step, change = _KNOBS[name]
    try:
        low, high = parse(first), parse(last)
    except ValueError as error:
        raise ConfigError(f"--sweep {text}: {error}") from None
    if not 0 < low <= high:
        raise ConfigError(f"--sweep {text}: the first value must be positive and not above the last")
    values = [low]
    while step(values[-1]) <= high:
        values.append(step(values[-1]))
        if len(values) > _MOST_SWEPT:
            raise ConfigError(f"--sweep {text}: more than {_MOST_SWEPT} values; use a smaller range")
    show = format_nbytes if parse is parse_nbytes else str
    points = _planned([_drafted(show(value), change(request, value)) for value in values])
    return Sweep(name, [show(value) for value in values], points)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _with_drives(request: PlanRequest, count: int) -> PlanRequest:
    drives = request.hardware.drives
    if not drives:
        raise ConfigError("--sweep drives needs a --drive to repeat")
    return replace(request, hardware=replace(request.hardware, drives=(drives[0],) * count))


def _with_memory(request: PlanRequest, nbytes: int) -> PlanRequest:
    workload = replace(request.workload, host_budget_nbytes=None)
    return PlanRequest(request.model, replace(request.hardware, host_memory_nbytes=nbytes), workload)


def _with_accumulate(request: PlanRequest, count: int) -> PlanRequest:
    is_refused = count > 1 and request.workload.schedule is Schedule.OVERLAPPED
    return with_workload(request, accumulate=count, schedule=Schedule.AUTO if is_refused else None)


def _with_gpus(request: PlanRequest, count: int) -> PlanRequest:
    return replace(request, hardware=replace(request.hardware, gpus=count))


def _with_nodes(request: PlanRequest, count: int) -> PlanRequest:
    return replace(request, hardware=replace(request.hardware, nodes=count))


_Knob = tuple[Callable[[str], int], Callable[[int], int], Callable[[PlanRequest, int], PlanRequest]]
_KNOBS: dict[str, _Knob] = {
    "host-memory": (parse_nbytes, lambda value: 2 * value, _with_memory),
    "drives": (_whole, lambda value: value + 1, _with_drives),
    "batch": (_whole, lambda value: 2 * value, lambda request, value: with_workload(request, batch=value)),
    "accumulate": (_whole, lambda value: 2 * value, _with_accumulate),
    "gpus": (_whole, lambda value: 2 * value, _with_gpus),
    "nodes": (_whole, lambda value: 2 * value, _with_nodes),
}


def gains(base: StepPlan, changes: Sequence[Change]) -> list[tuple[Change, float | None]]:
    """Each change with its tokens per second over those of `base`, largest first; what does not fit comes last."""
    rated = [(c, c.plan.tokens_per_s / base.tokens_per_s if c.plan is not None else None) for c in changes]
    return sorted(rated, key=lambda pair: -(pair[1] if pair[1] is not None else -1.0))
