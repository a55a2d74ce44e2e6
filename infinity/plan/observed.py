"""What the first steps of a run tell about the machine, and what the simulator makes of the rest.

A calibration is fitted to measured phases: seconds in which the training thread worked, seconds of the optimizer's
kernels and of hand-overs between threads, bytes of every drive and the time in which it moved them. Nothing is assumed
about the hardware. What the model of the run still gets wrong on the steps it was fitted to is kept as a residual and
shown, not hidden in a factor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from infinity.groups import FlatGroup, Unit
from infinity.optim.hyper import StateField
from infinity.placement import Placement
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drive_phases import INSTANT_BYTES_PER_S, fit_drives
from infinity.plan.drives import DriveModel
from infinity.plan.phases import Moment, fit_hand_over_s, fit_kernel_s, median_step_s, middle_steps
from infinity.plan.scenario import Scenario, Speeds, UnitTime
from infinity.plan.simulate import simulate_long
from infinity.plan.thread_phases import fit_contention, fit_thread_s
from infinity.runtime import Runtime
from storage.backends.cost import IoCost

_MOST_CALIBRATION_STEPS = 5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted.

    Attributes:
        thread_s: seconds of a step in which the training thread worked: computing, copying, overhead. Without what it
            lost to kernels and transfers beside it.
        kernel_s: seconds of the optimizer for one element, chunk overheads included.
        drives: as they were while something was in flight.
        steps: how many steps it was fitted to; the shortest and longest of them were left out.
        measured_s: median seconds of those.
        hand_over_s: seconds from one thread to another.
        contention: what the training thread loses to what goes on beside it.
    """

    thread_s: float
    kernel_s: float
    drives: tuple[DriveModel, ...]
    steps: int
    measured_s: float
    hand_over_s: float = 0.0
    contention: Contention = NO_CONTENTION

    def to_json(self) -> dict[str, Any]:
        """What `infinity train --json` says of it; seconds and bytes/s."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted beside measured, in seconds of a step.

    Attributes:
        measured_s: median of the steps after those the calibration was fitted to; of these when there are no others.
        residual: relative error on the steps that it was fitted to.
        error: relative error against `measured_s`.
    """

    step_s: float
    measured_s: float
    residual: float
    error: float
    calibration: Calibration

    def to_json(self) -> dict[str, Any]:
        """What `infinity train --json` says of it; seconds and bytes."""
        return {
            "step_seconds": self.step_s,
            "measured_seconds": self.measured_s,
            "error": self.error,
            "residual": self.residual,
            "calibration": self.calibration.to_json(),
        }


class RunObserver:
    """Notes a `Moment` after every step. Used by the training thread; costs microseconds, once a run milliseconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._paused_s = 0.0
        self._early: Calibration | None = None
        self.moments = [self._look()]

    def step_ended(self) -> None:
        """Call it at the end of every step."""
        self.moments.append(self._look())
        if len(self.moments) == _MOST_CALIBRATION_STEPS + 2:  # a long run's trace forgets its first steps
            started_s = time.perf_counter()
            self._early = self.calibrate(self.moments[1:])
            self.paused(time.perf_counter() - started_s)

    def paused(self, seconds: float) -> None:
        """So long nothing was trained on purpose; no step is charged for it."""
        self._paused_s += seconds

    def _look(self) -> Moment:
        runtime = self._runtime
        cost = runtime.store.cost if runtime.store is not None else IoCost()
        return Moment(
            time.perf_counter(),
            runtime.stalls.total_s,
            self._paused_s,
            thread_cpu_s=time.thread_time(),
            loop_cpu_s=runtime.io.cpu_s,
            io_cpu_s=cost.python_s + cost.check_s + cost.system_s,
        )

    def predict(self, *, micro_batches: int, recompute: bool) -> Prediction | None:
        """Calibrate on the first steps and predict the others; None when not even two steps have run.

        The first step of an engine is never used: it reads no state and fills caches.
        """
        moments = self.moments[1:]
        if len(moments) < 2:
            return None
        n_fitted = max(min(_MOST_CALIBRATION_STEPS, (len(moments) - 1) // 2), 1)
        calibration = self._early if n_fitted == _MOST_CALIBRATION_STEPS else None
        calibration = calibration or self.calibrate(moments[: n_fitted + 1])
        rest = moments[n_fitted:] if len(moments) > n_fitted + 1 else moments
        measured_s = median_step_s(rest)
        scenario = scenario_of_run(self._runtime, calibration, micro_batches=micro_batches, recompute=recompute)
        step_s = simulate_long(scenario).step_s
        fitted_s = calibration.measured_s
        return Prediction(step_s, measured_s, step_s / fitted_s - 1, step_s / measured_s - 1, calibration)

    def calibrate(self, moments: Sequence[Moment], contention: Contention | None = None) -> Calibration:
        """Fit to the steps between the first and the last of these moments.

        Args:
            contention: where it was seen better, in a run in which more went on beside computing.
        """
        runtime = self._runtime
        events, steps = runtime.trace.events(), middle_steps(moments)
        directories = [report.directory for report in runtime.store.drive_report()] if runtime.store is not None else []
        kernels = [event for event in events if event.category == "optimizer"]
        numels = {record.key: record.chunk.payload_numel for s in runtime.states.values() for record in s.records}
        contention = fit_contention(runtime, steps, events) if contention is None else contention
        return Calibration(
            thread_s=fit_thread_s(steps, events, contention),
            kernel_s=fit_kernel_s(steps, kernels, numels),
            drives=fit_drives(steps, events, directories),
            steps=len(moments) - 1,
            measured_s=median_step_s(moments),
            hand_over_s=fit_hand_over_s(steps, events),
            contention=contention,
        )


def scenario_of_run(runtime: Runtime, calibration: Calibration, *, micro_batches: int, recompute: bool) -> Scenario:
    """The scenario of a running engine on the machine that the calibration saw."""
    return scenario_of(
        units=runtime.units,
        groups=runtime.groups,
        fields=runtime.kernel.fields,
        placement=runtime.placement,
        times=unit_times(runtime.units, calibration.thread_s / micro_batches, recompute=recompute),
        calibration=calibration,
        micro_batches=micro_batches,
    )


def scenario_of(
    *,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    fields: tuple[StateField, ...],
    placement: Placement,
    times: Mapping[int, UnitTime],
    calibration: Calibration,
    micro_batches: int,
    order: Sequence[int] = (),
) -> Scenario:
    """A scenario whose times have everything in them that the training thread did: copies take no time of their own."""
    return Scenario(
        units=units,
        groups=groups,
        fields=fields,
        placement=placement,
        times=times,
        speeds=Speeds(
            h2d_bytes_per_s=INSTANT_BYTES_PER_S,
            d2h_bytes_per_s=INSTANT_BYTES_PER_S,
            kernel_s=calibration.kernel_s,
            is_async=False,
            hand_over_s=calibration.hand_over_s,
            contention=calibration.contention,
        ),
        drives=calibration.drives,
        micro_batches=micro_batches,
        order=order,
    )


def unit_times(units: Sequence[Unit], seconds: float, *, recompute: bool) -> dict[int, UnitTime]:
    """One micro-batch's time divided between the units by their parameters, and between forward and backward.

    An embedding looks up and multiplies nothing. A backward is two forwards, and one more with recomputation.
    """
    weights = {unit.index: _weight(unit) for unit in units}
    total = sum(weights.values()) or 1.0
    backward = 2 + recompute
    return {
        index: UnitTime(seconds * weight / total / (1 + backward), seconds * weight / total * backward / (1 + backward))
        for index, weight in weights.items()
    }


def _weight(unit: Unit) -> float:
    if isinstance(unit.module, nn.Embedding):
        return 0.0
    return float(sum(group.layout.payload_numel for group in unit.groups))


def with_drives(calibration: Calibration, drives: Sequence[DriveModel]) -> Calibration:
    """The same machine with other drives."""
    return replace(calibration, drives=tuple(drives))
