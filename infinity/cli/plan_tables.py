"""Tables of `infinity plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from infinity.plan.advice import Change, Sweep
from infinity.plan.planner import PlanRequest, StepPlan
from infinity.plan.stages import StageRow
from infinity.rank_budgets import told_smallest
from infinity.sizes import format_nbytes

if TYPE_CHECKING:
    from infinity.plan.scheduler_trace import SchedulerTrace  # loads the engine

_FEW_S = 0.0005


def plan_tables(plan: StepPlan) -> Group:
    """The whole plan."""
    request = plan.request
    head = Text(
        f"{request.model.name}: {request.model.parameters:,} parameters in {len(plan.rank.units)} units\n"
        f"{request.hardware.describe()}; {request.workload.batch} x {request.workload.accumulate} x "
        f"{request.model.seq} tokens on each of {request.hardware.ranks} ranks"
    )
    parts: list[RenderableType] = [head, _tiers(plan), _traffic(plan), _prediction(plan), _resources(plan)]
    if plan.wear:
        parts.append(_wear(plan))
    parts += [Text(note, style="dim") for note in (*plan.rank.placement.notes, *plan.rank.notes)]
    return Group(*parts)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _tiers(plan: StepPlan) -> Table:
    table = Table("tier", "what", title="Where everything lies, on one rank", title_justify="left", box=box.SIMPLE)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why")
    placement, request = plan.rank.placement, plan.request
    for tier, terms, budget, least in (
        ("device", placement.device, placement.device_budget_nbytes, placement.device_minimum_nbytes),
        ("host", placement.host, placement.host_budget_nbytes, placement.host_minimum_nbytes),
    ):
        why = told_smallest(least, placement.local_size, is_shared=tier == "host")
        table.add_row(tier, "budget", format_nbytes(budget), why, style="bold")
        for term in terms:
            if term.nbytes:
                table.add_row(tier, term.name, format_nbytes(term.nbytes), term.why)
        if tier == "device":
            activations = format_nbytes(request.activation_nbytes)
            table.add_row(tier, "activations", activations, "beside the budget, at the turn from forward to backward")
    why = "swap files: parameters, optimizer state, gradients that do not fit in host memory"
    table.add_row("nvme", "swap", format_nbytes(placement.nvme_nbytes), why)
    return table


def _traffic(plan: StepPlan) -> Table:
    table = _table("NVMe bytes of a step, on one rank", "", "param", "state", "grad", "all")
    traffic = plan.traffic
    kinds = (traffic.param, traffic.state, traffic.grad)
    for name, parts, total in (
        ("read", [kind.read_nbytes for kind in kinds], traffic.read_nbytes),
        ("written", [kind.write_nbytes for kind in kinds], traffic.write_nbytes),
    ):
        table.add_row(name, *(format_nbytes(nbytes) for nbytes in (*parts, total)))
    return table


def _prediction(plan: StepPlan) -> Table:
    table = Table(title="Prediction", title_justify="left", box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    bound = plan.bound_s
    table.add_row("step", f"{seconds(plan.step_s)}; the lower bound is {seconds(bound)} ({bound / plan.step_s:.0%})")
    table.add_row("speed", f"{plan.tokens_per_s:,.0f} tokens/s, {plan.flops_utilisation:.1%} of the peak")
    stalls = {cause: s for cause, s in plan.simulated.stalls_s.items() if s >= _FEW_S}
    text = ", ".join(f"{cause} {seconds(s)}" for cause, s in sorted(stalls.items(), key=lambda item: -item[1]))
    table.add_row("stalls", text or "none")
    table.add_row("schedule", f"{plan.rank.placement.schedule.value} ({plan.rank.placement.schedule_reason})")
    if plan.balanced_tokens is not None:
        now = plan.request.tokens_per_step
        balanced = f"{plan.balanced_tokens:,.0f}"
        table.add_row("balance", f"computing is the slowest from {balanced} tokens a step on; now {now:,}")
    return table


def _resources(plan: StepPlan) -> Table:
    table = _table("What each resource needs by itself", "", "seconds", "of the step")
    for number, (name, needed) in enumerate(plan.bounds_s.items()):
        mark = (" (binds)", " (next)")[number] if number < 2 else ""
        table.add_row(name + mark, seconds(needed), f"{needed / plan.step_s:.0%}")
    return table


def _wear(plan: StepPlan) -> Table:
    columns = ("read a step", "written a step", "of the rating in 1,000 steps", "steps to rating", "days to rating")
    table = _table("Wear of the drives of a node", "drive", *columns)
    table.add_column("")
    for row, (read_nbytes, _) in zip(plan.wear, plan.by_drive, strict=True):
        is_worn = row.written_per_step_nbytes > 0
        table.add_row(
            row.name,
            format_nbytes(read_nbytes),
            format_nbytes(row.written_per_step_nbytes),
            _known(row.share_per_1000_steps, ".2%") if is_worn else "0%",
            _known(row.steps_to_rating, ",.0f") if is_worn else "never",
            _known(row.days_to_rating, ",.0f") if is_worn else "never",
            row.warning,
        )
    return table


def _known(value: float | None, form: str) -> str:
    """A figure; "?" where the endurance of the drive is not known."""
    return "?" if value is None else format(value, form)


def changes_table(gains: Sequence[tuple[Change, float | None]]) -> Table:
    """What to change, with the predicted gain."""
    table = _table("What to change", "change", "step", "tokens/s", "gain", "then binds")
    for change, gain in gains:
        if change.plan is None or gain is None:
            table.add_row(change.what, "does not fit", "", "", "")
        else:
            plan = change.plan
            binds = next(iter(plan.bounds_s))
            table.add_row(change.what, seconds(plan.step_s), f"{plan.tokens_per_s:,.0f}", f"{gain:.2f}x", binds)
    return table


def search_table(found: Sequence[Change]) -> Table:
    """Plans for the same tokens per step, fastest first."""
    table = _table("Plans, fastest first", "options", "step", "bound", "tokens/s", "binds")
    for change in found:
        _point(table, change.what, change)
    return table


def sweep_table(swept: Sweep) -> Table:
    """The plan at every value of a knob."""
    table = _table(f"Sweep of {swept.name}", swept.name, "step", "bound", "tokens/s", "binds")
    for value, point in zip(swept.values, swept.points, strict=True):
        _point(table, value, point)
    return table


def _point(table: Table, name: str, change: Change) -> None:
    if change.plan is None:
        table.add_row(name, "does not fit", "", "", "")
        return
    plan = change.plan
    binds = next(iter(plan.bounds_s))
    table.add_row(name, seconds(plan.step_s), seconds(plan.bound_s), f"{plan.tokens_per_s:,.0f}", binds)


def stages_table(rows: Sequence[StageRow], request: PlanRequest) -> Group:
    """Data parallelism, stages and offloading beside each other."""
    parameters, ranks = request.model.parameters, request.hardware.ranks
    title = f"{parameters:,} parameters on {ranks} ranks: bytes of one rank, model state only"
    table = _table(title, "", "GPU", "host", "drive", "sent a step", "over the link", "drive reads", "drive writes")
    for row in rows:
        sent = f"{row.sent_numel / parameters:.0f} Φ" if row.sent_numel else "0"
        sizes = (row.device_nbytes, row.host_nbytes, row.drive_nbytes)
        moved = (row.link_nbytes, row.nvme_read_nbytes, row.nvme_write_nbytes)
        table.add_row(row.name, *map(gigabytes, sizes), sent, *map(gigabytes, moved))
    note = "Φ: parameters. 16 bytes each: 2 parameter, 2 gradient, 12 state; 12 on NVMe, where gradients pass through"
    return Group(table, Text(note, style="dim"))


def replay_table(
    trace: SchedulerTrace,
    step_s: float,
    moved: tuple[int, int],
    stalls_s: Mapping[str, float],
    *,
    has_other_drives: bool,
) -> Group:
    """A recorded run beside its replay."""
    where = "replayed on other drives" if has_other_drives else "replayed"
    title = f"{len(trace.units)} units, schedule {trace.placement.schedule.value}, {trace.calibration.steps} steps"
    table = _table(title, "of a step", "measured", where)
    table.add_row("seconds", seconds(trace.measured_s), f"{seconds(step_s)} ({step_s / trace.measured_s - 1:+.1%})")
    for name, measured, replayed in zip(("read", "written"), trace.traffic, moved, strict=True):
        table.add_row(name, format_nbytes(measured), format_nbytes(replayed))
    for cause, waited_s in sorted(stalls_s.items(), key=lambda item: -item[1]):
        if waited_s >= _FEW_S:
            table.add_row(f"waited for {cause}", "", seconds(waited_s))
    same = "the same bytes" if moved == trace.traffic else "NOT the same bytes: the run was not in its steady state"
    return Group(table, Text(same, style="dim"))


def nearest_text(nearest: Change | None) -> str:
    """The least change that works, in words."""
    if nearest is None or nearest.plan is None:
        return "no smaller batch, no more drives and no larger memory makes it work"
    plan = nearest.plan
    speed = f"{seconds(plan.step_s)} a step, {plan.tokens_per_s:,.0f} tokens/s"
    return f"the nearest plan that works: {nearest.what} ({speed})"


def seconds(value: float) -> str:
    """With milliseconds where they count."""
    return f"{value:,.1f} s" if value >= 10 else f"{value:.3f} s"


def gigabytes(nbytes: float) -> str:
    """Decimal, as the literature has it."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes else "0"
