"""The JSON object of `infinity train --json`: everything a run measured, beside what was computed before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinity.bench.machine import describe_machine
from infinity.cli.baseline import Comparison
from infinity.cli.memory import activation_nbytes, peak_rss_bytes
from infinity.cli.records import Counters, StepRecord, seconds_of_a_step
from infinity.cli.settings import RunSettings
from infinity.engine import Engine
from infinity.observe.counters import drive_facts
from infinity.observe.metrics import Traffic
from infinity.observe.names import by_prefix, stalls_between
from infinity.plan.observed import Prediction
from infinity.plan.summary import Plan
from infinity.plan.traffic import StepTraffic
from infinity.plan.wear_guard import WearReport
from infinity.report.record import RunState
from storage.space import DriveReport

_KINDS = ("param", "state", "grad")
_GATHERS = ("ready", "in_flight", "demand")


@dataclass(frozen=True, slots=True)
class Measured:
    """What is read from an engine before it is closed."""

    plan: Plan
    counters: Counters
    traffic: Traffic
    io_engine: str
    drives: list[DriveReport]
    trace_nbytes: int

    @classmethod
    def of(cls, engine: Engine) -> Measured:
        """Waits until everything under way has landed."""
        return cls(engine.plan, engine.metrics(), engine.traffic, engine.io_engine, engine.drives, engine.trace.nbytes)


def open_report(settings: RunSettings) -> dict[str, Any]:
    """What is known of a run before its model is offloaded; the other keys of `begin_report` are empty."""
    return {
        "state": RunState.RUNNING.value,
        "error": None,
        "config": {
            "preset": settings.options.preset,
            "training": asdict(settings.training),
            "engine": settings.config.model_dump(mode="json"),
            "notes": list(settings.notes),
        },
        "environment": describe_machine(),
        "model": None,
        "first_step": 0,
        "budgets": {},
        "counters_at_start": {},
    }


def begin_report(
    settings: RunSettings, plan: Plan, counters: Counters, *, first_step: int, source: str
) -> dict[str, Any]:
    """What is known of a run before its first step: the same keys with the same values as in the whole report."""
    opened = open_report(settings)
    return {
        **opened,
        "config": opened["config"] | {"text": source},
        "model": {
            "parameters": plan.parameters,
            "state_bytes": plan.state_bytes,
            "units": plan.units,
        },
        "first_step": first_step,
        "budgets": {
            "device": plan.placement.device_budget_nbytes,
            "host": plan.placement.host_budget_nbytes,
            "nvme": settings.config.nvme.budget or plan.placement.nvme_nbytes,
        },
        "plan": [asdict(row) for row in plan.table()],
        "counters_at_start": counters,
    }


def make_report(
    settings: RunSettings,
    begun: Mapping[str, Any],
    records: Sequence[StepRecord],
    measured: Measured,
    *,
    interpreter_nbytes: int,
    prediction: Prediction | None,
    wear: Sequence[WearReport],
) -> dict[str, Any]:
    """The report of an offloaded run, without a baseline (`baseline` is null).

    Args:
        begun: what `begin_report` gave.
    """
    training, plan, counters = settings.training, measured.plan, measured.counters
    step_seconds = [record.seconds for record in records]
    budgets, first_step = begun["budgets"], begun["first_step"]
    peaks = {tier: int(counters[f"{tier}/peak_bytes"]) for tier in ("device", "host")}
    memory = _memory(settings, budgets, interpreter_nbytes, measured.trace_nbytes)
    return {
        **begun,
        "state": RunState.FINISHED.value,
        "losses": [record.loss for record in records],
        "grad_norms": [record.grad_norm for record in records],
        "step_seconds": step_seconds,
        "tokens_per_second": training.tokens_per_step / seconds_of_a_step(step_seconds),
        "peak_rss_bytes": memory["peak_rss_bytes"],
        "memory": memory,
        "peaks": peaks | {"nvme": plan.placement.nvme_nbytes},
        "traffic": asdict(measured.traffic),
        "expected_traffic": _expected(settings, plan, len(records), is_resumed=first_step > 0),
        "stalls": stalls_between(begun["counters_at_start"], counters),
        "readahead": _readahead(records, counters),
        "io_engine": measured.io_engine,
        "drives": [drive_facts(drive) for drive in measured.drives],
        "prediction": {"step_seconds": None} if prediction is None else prediction.to_json(),
        "wear": [one.to_json() for one in wear],
        "baseline": None,
    }


def add_baseline(report: dict[str, Any], comparison: Comparison, first_step: int) -> None:
    """Put the comparison with plain PyTorch into a report; its lists cover the same steps as the report's."""
    plain = comparison.plain
    report["baseline"] = {
        "losses": plain.losses[first_step:],
        "grad_norms": plain.grad_norms[first_step:],
        "step_seconds": plain.step_seconds[first_step:],
        "peak_rss_bytes": plain.peak_rss_bytes,
        "losses_equal": comparison.losses_equal,
        "parameters_equal": comparison.parameters_equal,
        "parameters_reason": comparison.reason,
        "different_parameters": list(comparison.different),
    }


def _memory(
    settings: RunSettings, budgets: dict[str, int], interpreter_nbytes: int, trace_nbytes: int
) -> dict[str, int]:
    on_gpu = settings.training.uses_cuda
    terms = {
        "interpreter_bytes": interpreter_nbytes,
        "activation_bytes": 0 if on_gpu else activation_nbytes(settings.training),
        "device_budget_bytes": 0 if on_gpu else budgets["device"],
        "host_budget_bytes": budgets["host"],
        "trace_bytes": trace_nbytes,
    }
    return terms | {"bound_bytes": sum(terms.values()), "peak_rss_bytes": peak_rss_bytes()}


def _expected(settings: RunSettings, plan: Plan, steps: int, *, is_resumed: bool) -> list[dict[str, int]]:
    shift = 1 if is_resumed else 0
    accumulate = settings.training.accumulate
    return [_traffic_json(plan.expected_traffic(step + shift, accumulate)) for step in range(steps)]


def _traffic_json(traffic: StepTraffic) -> dict[str, int]:
    counts = {"nvme_read_bytes": traffic.read_nbytes, "nvme_write_bytes": traffic.write_nbytes}
    kinds = {kind: getattr(traffic, kind) for kind in _KINDS}
    counts["nvme_read_padding_bytes"] = sum(part.read_padding_nbytes for part in kinds.values())
    counts["nvme_write_padding_bytes"] = sum(part.write_padding_nbytes for part in kinds.values())
    for kind, part in kinds.items():
        counts[f"nvme_read_bytes/{kind}"] = part.read_nbytes
        counts[f"nvme_write_bytes/{kind}"] = part.write_nbytes
    return counts


def _readahead(records: Sequence[StepRecord], counters: Counters) -> dict[str, float | int | None]:
    """Reads ahead and on demand, and how gathers found their bytes; the share counts from the second step on."""
    counts: dict[str, float | int | None] = {
        name: int(value) for name, value in by_prefix(counters, "readahead/", "").items()
    }
    later = {name: int(sum(r.moved(f"readahead/gathers_{name}") for r in records[1:])) for name in _GATHERS}
    total = sum(later.values())
    counts["ahead_share_after_first_step"] = (total - later["demand"]) / total if total else None
    return counts
