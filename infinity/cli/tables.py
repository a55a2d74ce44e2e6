"""Tables before and after a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from infinity.cli.records import seconds_of_a_step
from infinity.plan.summary import Plan
from infinity.plan.traffic import KindTraffic, StepTraffic
from infinity.rank_budgets import told_smallest
from infinity.sizes import format_nbytes

_KINDS = ("param", "state", "grad")


def preflight(plan: Plan, *, accumulate: int, io_engine: str, notes: tuple[str, ...], is_resumed: bool) -> Group:
    """What lies on which tier and why, and what a step moves."""
    title = Text(
        f"{plan.parameters:,} parameters in {plan.units} units, {format_nbytes(plan.state_bytes)} of state "
        f"({plan.state_bytes / _budgets_nbytes(plan):.1f} times the device and host budgets together)"
    )
    lines = [Text(note) for note in (*notes, f"swap files: {io_engine}", *plan.placement.notes)]
    return Group(title, _tiers(plan), _step_traffic(plan, accumulate, is_resumed), *lines)


def _budgets_nbytes(plan: Plan) -> int:
    """Of all ranks that the state is shared out among."""
    return plan.shards * (plan.placement.device_budget_nbytes + plan.placement.host_budget_nbytes)


def _of_one(plan: Plan) -> str:
    return ", of one rank" if plan.placement.local_size > 1 or plan.shards > 1 else ""


def _tiers(plan: Plan) -> Table:
    title = f"Where everything lies{_of_one(plan)}"
    table = Table("tier", "what", title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why")
    placement = plan.placement
    budgets = {
        "device": (placement.device_budget_nbytes, placement.device_minimum_nbytes),
        "host": (placement.host_budget_nbytes, placement.host_minimum_nbytes),
    }
    rows = plan.table()
    for tier in dict.fromkeys(row.tier for row in rows):
        if tier in budgets:
            budget, least = budgets[tier]
            why = told_smallest(least, placement.local_size, is_shared=tier == "host")
            table.add_row(tier, "budget", format_nbytes(budget), why, style="bold")
        for row in rows:
            if row.tier == tier:
                table.add_row(tier, row.what, format_nbytes(row.nbytes), row.why)
    return table


def _step_traffic(plan: Plan, accumulate: int, is_resumed: bool) -> Table:
    """A row for each kind of shard, so that no figure is cut where the terminal is narrow."""
    title = f"NVMe bytes per step, as computed{_of_one(plan)}"
    table = Table("shards", title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    steps = {"first": 1 if is_resumed else 0, "later": 1}
    for name in steps:
        for way in ("read", "written"):
            table.add_column(f"{name} {way}", justify="right")
    traffics = [plan.expected_traffic(step, accumulate) for step in steps.values()]
    for kind in _KINDS:
        table.add_row(kind, *_cells([getattr(traffic, kind) for traffic in traffics]))
    table.add_row("all", *_cells(traffics), style="bold")
    return table


def _cells(moved: Sequence[StepTraffic | KindTraffic]) -> list[str]:
    return [format_nbytes(nbytes) for one in moved for nbytes in (one.read_nbytes, one.write_nbytes)]


def summary(report: dict[str, Any]) -> RenderableType:
    """The finished run, from its JSON report."""
    table = Table(title="Summary", title_justify="left", box=box.SIMPLE, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value")
    for name, value in _summary_rows(report):
        table.add_row(name, Text(value))
    if report.get("baseline") is None:
        return table
    return Group(table, _side_by_side(report))


def _summary_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    losses, memory = report["losses"], report["memory"]
    step_s = seconds_of_a_step(report["step_seconds"])
    rows = [
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"),
        ("speed", f"{step_s:.3f} s per step, {report['tokens_per_second']:,.0f} tokens/s"),
        ("peak memory", f"{format_nbytes(memory['peak_rss_bytes'])} of at most {format_nbytes(memory['bound_bytes'])}"),
    ]
    terms = ("interpreter", "activation", "device_budget", "host_budget")
    rows.append(("", ", ".join(f"{t.replace('_', ' ')} {format_nbytes(memory[f'{t}_bytes'])}" for t in terms)))
    for tier in ("device", "host", "nvme"):
        peak, budget = report["peaks"][tier], report["budgets"][tier]
        rows.append((f"{tier} peak", f"{format_nbytes(peak)} of {format_nbytes(budget)}"))
    if report["prediction"]["step_seconds"] is not None:
        rows.append(("prediction", _prediction(report["prediction"])))
    rows += _traffic_rows(report)
    rows += [("wear", wear["text"]) for wear in report["wear"]]
    rows.append(("stalls", _stalls(report)))
    ahead = report["readahead"]["ahead_share_after_first_step"]
    if ahead is not None:
        rows.append(("read ahead", f"{ahead:.1%} of reads complete or in flight when needed, after the first step"))
    rows.append(("swap files", report["io_engine"]))
    return rows


def _stalls(report: dict[str, Any]) -> str:
    stalls = report["stalls"]
    share = stalls["total"] / max(sum(report["step_seconds"]), 1e-9)
    causes = [f"{cause} {seconds:.2f} s" for cause, seconds in stalls.items() if cause != "total" and seconds >= 0.005]
    return f"{stalls['total']:.2f} s ({share:.0%} of the time)" + (": " + ", ".join(causes) if causes else "")


def _prediction(prediction: dict[str, Any]) -> str:
    steps = prediction["calibration"]["steps"]
    fitted = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"{prediction['step_seconds']:.3f} s per step predicted by the simulated scheduler from {fitted}, "
        f"{prediction['measured_seconds']:.3f} s measured afterwards ({prediction['error']:+.1%})"
    )


def _traffic_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    traffic, expected = report["traffic"], report["expected_traffic"]
    counted = traffic["per_step"][-1]
    names = ("nvme_read_bytes", "nvme_write_bytes")
    same = all(c[n] == e[n] for c, e in zip(traffic["per_step"], expected, strict=True) for n in names)
    read, written = (format_nbytes(counted[name]) for name in names)
    verdict = "exactly as computed, in every step" if same else "NOT as computed; see expected_traffic in --json"
    total = traffic["total"]
    return [
        ("nvme per step", f"{read} read, {written} written: {verdict}"),
        (
            "nvme in total",
            f"{format_nbytes(total['nvme_read_bytes'])} read, {format_nbytes(total['nvme_write_bytes'])} written "
            f"({format_nbytes(traffic['initialisation']['nvme_write_bytes'])} of it initial values)",
        ),
    ]


def _side_by_side(report: dict[str, Any]) -> Group:
    plain = report["baseline"]
    table = Table("", title="Beside plain PyTorch", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("infinity", justify="right")
    table.add_column("plain PyTorch", justify="right")
    table.add_row("first loss", f"{report['losses'][0]:.6f}", f"{plain['losses'][0]:.6f}")
    table.add_row("last loss", f"{report['losses'][-1]:.6f}", f"{plain['losses'][-1]:.6f}")
    ours_s, theirs_s = seconds_of_a_step(report["step_seconds"]), seconds_of_a_step(plain["step_seconds"])
    table.add_row("seconds per step", f"{ours_s:.3f}", f"{theirs_s:.3f}")
    table.add_row(
        "peak memory", format_nbytes(report["memory"]["peak_rss_bytes"]), format_nbytes(plain["peak_rss_bytes"])
    )
    equal = {True: "equal", False: "DIFFERENT", None: "not compared"}
    losses = {True: "bitwise equal", False: "different", None: "not compared"}
    lines = [
        f"losses: {losses[plain['losses_equal']]}",
        f"final parameters: {equal[plain['parameters_equal']]} ({plain['parameters_reason']})",
    ]
    return Group(table, *map(Text, lines))
