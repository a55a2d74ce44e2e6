"""A plan as one JSON object; the same plan gives the same text, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infinity.plan.advice import Change, Sweep
from infinity.plan.planner import StepPlan
from infinity.plan.stages import StageRow

_KINDS = ("param", "state", "grad")


def plan_json(plan: StepPlan) -> dict[str, Any]:
    """Everything a plan says. Bytes are of one rank unless the name says otherwise."""
    request, simulated, placement = plan.request, plan.simulated, plan.rank.placement
    resources = list(plan.bounds_s)
    return {
        "fits": True,
        "model": {
            "name": request.model.name,
            "parameters": request.model.parameters,
            "trainable_parameters": request.model.trainable_parameters,
            "units": len(plan.rank.units),
            "traced": request.model.is_traced,
            "flops_per_step": request.model.step_flops(recompute=request.workload.recompute)
            * request.workload.batch
            * request.workload.accumulate,
            "activation_bytes": request.activation_nbytes,
        },
        "hardware": asdict(request.hardware)
        | {
            "description": request.hardware.describe(),
            "device_memory_nbytes": request.hardware.device_memory_nbytes,
        },
        "workload": {
            "seq": request.model.seq,
            "batch": request.workload.batch,
            "accumulate": request.workload.accumulate,
            "micro_batches": request.workload.micro_batches,
            "precision": request.workload.precision.value,
            "state_format": request.workload.state_format.value,
            "recompute": request.workload.recompute,
            "ranks": request.hardware.ranks,
            "tokens_per_step": request.tokens_per_step,
        },
        "placement": {
            "schedule": placement.schedule.value,
            "schedule_reason": placement.schedule_reason,
            "budgets": {"device": placement.device_budget_nbytes, "host": placement.host_budget_nbytes},
            "minima": {"device": placement.device_minimum_nbytes, "host": placement.host_minimum_nbytes},
            "device": [asdict(term) for term in placement.device],
            "host": [asdict(term) for term in placement.host],
            "nvme_bytes": placement.nvme_nbytes,
            "nvme_bytes_per_node": placement.nvme_nbytes * request.hardware.gpus,
            "notes": list(placement.notes),
        },
        "traffic": _traffic_json(plan),
        "prediction": {
            "step_seconds": plan.step_s,
            "tokens_per_second": plan.tokens_per_s,
            "flops_utilisation": plan.flops_utilisation,
            "bound_seconds": plan.bound_s,
            "bounds": plan.bounds_s,
            "stalls": simulated.stalls_s,
            "busy": simulated.busy_s,
            "binding": resources[0],
            "next": resources[1] if len(resources) > 1 else None,
            "balanced_tokens_per_step": plan.balanced_tokens,
            "peaks": simulated.peaks,
        },
        "wear": [asdict(wear) for wear in plan.wear],
        "notes": list(plan.rank.notes),
    }


def _traffic_json(plan: StepPlan) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "nvme_read_bytes": plan.traffic.read_nbytes,
        "nvme_write_bytes": plan.traffic.write_nbytes,
    }
    for kind in _KINDS:
        part = getattr(plan.traffic, kind)
        counts[f"nvme_read_bytes/{kind}"] = part.read_nbytes
        counts[f"nvme_write_bytes/{kind}"] = part.write_nbytes
    by_drive = {
        "nvme_read_bytes_per_drive": [read for read, _ in plan.by_drive],
        "nvme_write_bytes_per_drive": [written for _, written in plan.by_drive],
    }
    return counts | by_drive


def change_json(change: Change, base: StepPlan | None = None) -> dict[str, Any]:
    """One changed plan, with its gain over `base`."""
    row: dict[str, Any] = {"what": change.what, "fits": change.plan is not None}
    if change.plan is None:
        return row | {"problem": change.problem}
    row |= {"step_seconds": change.plan.step_s, "tokens_per_second": change.plan.tokens_per_s}
    row |= {"binding": next(iter(change.plan.bounds_s))}
    if base is not None:
        row["gain"] = change.plan.tokens_per_s / base.tokens_per_s
    return row


def sweep_json(swept: Sweep) -> dict[str, Any]:
    """Every point of a sweep."""
    return {"name": swept.name, "points": [change_json(point) for point in swept.points]}


def stages_json(rows: Sequence[StageRow]) -> list[dict[str, Any]]:
    """The rows of the comparison; bytes of one rank, and numbers that it sends."""
    return [asdict(row) for row in rows]
