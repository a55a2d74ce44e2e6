"""A real run as the scheduler saw it, in a file that the simulator replays, on this machine's drives or on others.

The file holds what the scheduler was given (units, groups, placement), the order in which units were used, the seconds
the training thread worked in each use, as measured, and what the drives did. A replay simulates exactly that.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from infinity.errors import ConfigError
from infinity.groups import FlatGroup, Unit
from infinity.observe.trace import TraceEvent
from infinity.optim.hyper import StateField
from infinity.order import Phase
from infinity.placement import Placement
from infinity.plan.drives import DriveModel
from infinity.plan.observed import Calibration, RunObserver, scenario_of
from infinity.plan.phases import Moment
from infinity.plan.reading import read_json
from infinity.plan.scenario import Scenario, UnitTime
from infinity.runtime import Runtime
from infinity.units import Owned
from storage.paths import StrPath

FORMAT, VERSION = "infinity-scheduler-trace", 1
LEAST_STEPS = 3
USE_CATEGORY = "use"  # of the events that tell when a unit is used


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A flat group. `units` are those that gather it; dtypes are named as in torch."""

    key: str
    shapes: list[tuple[str, list[int]]]
    trainable: bool
    shard_dtype: str
    compute_dtype: str
    units: list[int]


@dataclass(frozen=True, slots=True)
class RecordedUnit:
    """A unit with its groups, and the seconds of one use in each phase."""

    name: str
    groups: list[int]
    resident: bool
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class SchedulerTrace:
    """A recorded run.

    Attributes:
        order: unit indices in the order of the forward; `uses` are those of one whole step, as (phase, unit).
        fields: name, dtype and block of every part of the optimizer's state.
        calibration: of the kernels and drives, from all steps but the first.
        measured_s: median seconds of those steps.
        traffic: bytes of the last step, padding included, as counted: read, written.
    """

    machine: dict[str, Any]
    units: list[RecordedUnit]
    groups: list[RecordedGroup]
    fields: list[tuple[str, str, int]]
    placement: Placement
    order: list[int]
    uses: list[tuple[str, int]]
    micro_batches: int
    calibration: Calibration
    measured_s: float
    traffic: tuple[int, int]

    def __post_init__(self) -> None:
        if not (0 < self.measured_s < math.inf and self.micro_batches > 0):
            raise ValueError(f"{self.measured_s} s a step of {self.micro_batches} micro-batches")
        groups, units = set(range(len(self.groups))), set(range(len(self.units)))
        streamed = {index for index, unit in enumerate(self.units) if not unit.resident}
        named = {number for unit in self.units for number in unit.groups}
        if not named <= groups or not {number for group in self.groups for number in group.units} <= units:
            raise ValueError("units and groups do not belong together")
        if len(set(self.order)) != len(self.order) or not set(self.order) <= streamed:
            raise ValueError("the order names a unit twice, or one that is not gathered")

    def scenario(self, drives: Sequence[DriveModel] = ()) -> Scenario:
        """What the simulator replays. `drives` go in the place of those of the run."""
        groups = [_group(index, recorded) for index, recorded in enumerate(self.groups)]
        units = [
            Unit(index, unit.name, nn.Module(), tuple(groups[number] for number in unit.groups), unit.resident)
            for index, unit in enumerate(self.units)
        ]
        times = {index: UnitTime(unit.forward_s, unit.backward_s) for index, unit in enumerate(self.units)}
        calibration = replace(self.calibration, drives=tuple(drives) or self.calibration.drives)
        return scenario_of(
            units=units,
            groups=groups,
            fields=tuple(StateField(name, _dtype(dtype), block) for name, dtype, block in self.fields),
            placement=self.placement,
            times=times,
            calibration=calibration,
            micro_batches=self.micro_batches,
            order=self.order,
        )


def record(
    runtime: Runtime,
    observer: RunObserver,
    *,
    machine: Mapping[str, Any],
    micro_batches: int,
    traffic: Mapping[str, int],
) -> SchedulerTrace:
    """The run so far. Its first step is left out: it reads no state and fills caches.

    Args:
        traffic: of the last step, as `Engine.traffic` counts it.

    Raises:
        ConfigError: fewer than `LEAST_STEPS` steps have run.
    """
    events = runtime.trace.events()
    moments = observer.moments[1:]
    if len(moments) < LEAST_STEPS:
        raise ConfigError(f"--scheduler-trace needs {LEAST_STEPS} steps or more: the first step is left out")
    moments = _remembered(moments, events)
    calibration = observer.calibrate(moments)
    steps = [_uses_between(events, *pair) for pair in pairwise(moments)]
    times = _use_times(steps, calibration.thread_s / micro_batches)
    uses = [(phase.value, _index_of(runtime.units, name)) for name, phase, _ in steps[-1]]
    forward = [unit for phase, unit in uses if phase == Phase.FORWARD.value]
    return SchedulerTrace(
        machine=dict(machine),
        units=[_recorded_unit(unit, times) for unit in runtime.units],
        groups=[_recorded_group(group) for group in runtime.groups],
        fields=[(each.name, str(each.dtype), each.block_numel) for each in runtime.kernel.fields],
        placement=runtime.placement,
        order=list(dict.fromkeys(forward)),
        uses=uses,
        micro_batches=micro_batches,
        calibration=calibration,
        measured_s=calibration.measured_s,
        traffic=(
            traffic["nvme_read_bytes"] + traffic["nvme_read_padding_bytes"],
            traffic["nvme_write_bytes"] + traffic["nvme_write_padding_bytes"],
        ),
    )


def _uses_between(events: Sequence[TraceEvent], first: Moment, last: Moment) -> list[tuple[str, Phase, float]]:
    """Uses of units in one step with the seconds that the training thread worked in each, waits left out.

    A use lasts until the next; the last one of a step has the optimizer step behind it.
    """
    mine = [event for event in events if first.at_s <= event.start_s < last.at_s]
    starts = [event for event in mine if event.category.startswith(USE_CATEGORY)]
    stalls = [event for event in mine if event.category == "stall"]
    paused_s = last.paused_s - first.paused_s
    found = []
    for number, use in enumerate(starts):
        begin_s = use.start_s if number else first.at_s + paused_s
        end_s = starts[number + 1].start_s if number + 1 < len(starts) else last.at_s
        waited_s = sum(s.duration_s for s in stalls if begin_s <= s.start_s < end_s)
        phase = Phase(use.category.removeprefix(f"{USE_CATEGORY} "))
        found.append((use.name, phase, max(end_s - begin_s - waited_s, 0.0)))
    return found


def _remembered(moments: Sequence[Moment], events: Sequence[TraceEvent]) -> list[Moment]:
    """The ends of those steps that the trace still holds as a whole; it forgets the oldest events of a long run.

    Raises:
        ConfigError: it does not hold even one.
    """
    # Events are noted when they end, so those that were forgotten began before the end of the oldest one that is left.
    oldest_s = events[0].start_s + events[0].duration_s if events else float("inf")
    held = [moment for moment in moments if moment.at_s >= oldest_s]
    if len(held) < 2:
        raise ConfigError(
            "--scheduler-trace: a step has more events than the trace holds, so none can be recorded whole"
        )
    return held


def _use_times(steps: Sequence[Sequence[tuple[str, Phase, float]]], thread_s: float) -> dict[tuple[str, Phase], float]:
    """Seconds of one use of each unit, divided as they were measured; `thread_s` are those of all uses together."""
    totals: dict[tuple[str, Phase], float] = defaultdict(float)
    for step in steps:
        for name, phase, seconds in step:
            totals[name, phase] += seconds
    together_s = sum(totals.values())
    return {use: thread_s * seconds / together_s if together_s else 0.0 for use, seconds in totals.items()}


def _index_of(units: Sequence[Unit], name: str) -> int:
    return next(unit.index for unit in units if unit.name == name)


def _recorded_unit(unit: Unit, times: Mapping[tuple[str, Phase], float]) -> RecordedUnit:
    forward_s, backward_s = (times.get((unit.name, phase), 0.0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    return RecordedUnit(unit.name, [group.index for group in unit.groups], unit.resident, forward_s, backward_s)


def _recorded_group(group: FlatGroup) -> RecordedGroup:
    return RecordedGroup(
        key=group.key,
        shapes=[(slot.name, list(slot.shape)) for slot in group.layout.slots],
        trainable=group.trainable,
        shard_dtype=str(group.shard_dtype),
        compute_dtype=str(group.compute_dtype),
        units=sorted(group.units),
    )


def _group(index: int, recorded: RecordedGroup) -> FlatGroup:
    own = [
        Owned(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=recorded.trainable))
        for name, shape in recorded.shapes
    ]
    group = FlatGroup(
        index,
        recorded.key,
        own,
        shard_dtype=_dtype(recorded.shard_dtype),
        compute_dtype=_dtype(recorded.compute_dtype),
    )
    group.units = set(recorded.units)
    return group


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"the scheduler trace names {name!r}, which is no dtype of torch {torch.__version__}")
    return found


# Files --------------------------------------------------------------------------------------------------------------


def to_text(trace: SchedulerTrace) -> str:
    """The file. The same run gives the same text but for its times."""
    content = TypeAdapter(SchedulerTrace).dump_python(trace, mode="json")
    for name, value in content["placement"].items():
        if isinstance(getattr(trace.placement, name), frozenset):
            content["placement"][name] = sorted(value)
    return json.dumps({"format": FORMAT, "version": VERSION} | content, indent=1) + "\n"


def read_trace(path: StrPath) -> SchedulerTrace:
    """Read a file that `to_text` gave.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    content = read_json("--replay", Path(path))
    kind = (content.pop("format", None), content.pop("version", None)) if isinstance(content, dict) else ()
    if kind != (FORMAT, VERSION):
        raise ConfigError(
            f"--replay {path}: this is not what `infinity train --scheduler-trace` writes, or not of this version"
        )
    try:
        return TypeAdapter(SchedulerTrace).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"--replay {path}: {str(error).partition('For further')[0].strip()}") from error


def replay_json(trace: SchedulerTrace, step_s: float, moved: tuple[int, int], stalls_s: Mapping[str, float]) -> Any:
    """What a replay gave beside what the run was."""
    return {
        "machine": trace.machine,
        "measured_seconds": trace.measured_s,
        "replayed_seconds": step_s,
        "error": step_s / trace.measured_s - 1,
        "measured_bytes": list(trace.traffic),
        "replayed_bytes": list(moved),
        "stalls": dict(stalls_s),
        "calibration": asdict(trace.calibration),
    }
