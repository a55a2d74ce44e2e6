"""Figures of a run's page: each takes a record and gives a plotly figure, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity.plan.timeline import graph_objects
from infinity.report.record import RunRecord

_MIB = 1 << 20
_MOST_SPANS = 6000  # more make the page slow to zoom; the newest steps are shown
_STALL_PREFIX, _STALL_SUFFIX = "stall/", "_s"


def losses(record: RunRecord) -> Any | None:
    """Loss by step, and plain PyTorch's where there was a baseline."""
    values = record.run["losses"]
    if not values:
        return None
    figure = _figure("loss", "step")
    figure.add_scatter(x=_steps(record), y=values, name="loss", mode=_mode(values))
    baseline = record.run.get("baseline")
    if baseline:
        figure.add_scatter(x=_steps(record), y=baseline["losses"], name="plain PyTorch", line_dash="dot")
    return figure


def step_times(record: RunRecord) -> Any | None:
    """Seconds of a step: what the training thread waited for by cause, and the rest."""
    seconds = record.run["step_seconds"]
    if not seconds:
        return None
    figure = _figure("seconds", "step")
    stalls = stalls_by_step(record)
    rest = list(seconds)
    for cause, values in stalls.items():
        rest = [left - value for left, value in zip(rest, values, strict=True)]
        figure.add_scatter(x=_steps(record), y=values, name=f"waiting: {cause}", stackgroup="step", line_width=0.5)
    name = "everything else" if stalls else "step"
    figure.add_scatter(x=_steps(record), y=rest, name=name, stackgroup="step", line_width=0.5)
    if (predicted := record.run.get("prediction", {}).get("step_seconds")) is not None:
        figure.add_hline(y=predicted, line_dash="dash", annotation_text="predicted")
    return figure


def stalls_by_step(record: RunRecord) -> dict[str, list[float]]:
    """Seconds of each step by cause, from its rows; causes that never occurred are left out."""
    causes = [
        key
        for key in (record.steps[0]["counters"] if record.steps else {})
        if key.startswith(_STALL_PREFIX) and key.endswith(_STALL_SUFFIX) and key != "stall/total_s"
    ]
    found = {}
    for key in causes:
        values = _growth(record.steps, key)
        if len(values) == len(record.run["step_seconds"]) and any(values):
            found[key.removeprefix(_STALL_PREFIX).removesuffix(_STALL_SUFFIX)] = values
    return found


def tiers(record: RunRecord) -> Any | None:
    """What device and host memory held at the end of each step, beside their budgets."""
    if not record.steps:
        return None
    figure = _figure("MiB", "step")
    for tier in ("device", "host"):
        held = [row["counters"].get(f"{tier}/held_bytes", 0) / _MIB for row in record.steps]
        figure.add_scatter(x=_steps(record), y=held, name=f"{tier} held", mode=_mode(held))
        figure.add_hline(y=record.run["budgets"][tier] / _MIB, line_dash="dot", annotation_text=f"{tier} budget")
    return figure


def drives(record: RunRecord) -> Any | None:
    """Bytes per second of each drive by step, and the speed that was measured while it was busy."""
    if not record.steps:
        return None
    figure = _figure("MB/s", "step")
    for number, drive in enumerate(record.run.get("drives", [])):
        for way in ("read", "write"):
            moved = _growth(record.steps, f"nvme/drive{number}/{way}_bytes")
            rates = [n / row["step_seconds"] / 1e6 for n, row in zip(moved, record.steps, strict=True)]
            if any(rates):
                figure.add_scatter(x=_steps(record), y=rates, name=f"{drive['directory']} {way}", mode=_mode(rates))
            if drive.get(f"{way}_bytes_per_s"):
                ceiling = drive[f"{way}_bytes_per_s"] / 1e6
                figure.add_hline(y=ceiling, line_dash="dot", annotation_text=f"{drive['directory']} can {way}")
    return figure if figure.data else None


def timeline(record: RunRecord) -> Any | None:
    """The newest spans of the trace, a row per track; zoom with the mouse, the wheel or the arrow keys."""
    if not record.spans:
        return None
    go = graph_objects()
    newest = sorted(record.spans, key=lambda span: span["ts"])[-_MOST_SPANS:]
    origin = newest[0]["ts"]
    figure = go.Figure()
    for track in sorted({span["track"] for span in newest}, reverse=True):
        mine = [span for span in newest if span["track"] == track]
        figure.add_bar(
            name=track,
            y=[track] * len(mine),
            base=[(span["ts"] - origin) / 1e6 for span in mine],
            x=[span["dur"] / 1e6 for span in mine],
            text=[f"{span['cat']} {span['name']}" for span in mine],
            hovertemplate="%{text}<br>from %{base:.4f} s, %{x:.4f} s<extra></extra>",
            textposition="none",
            orientation="h",
            marker_line_width=0.5,
        )
    figure.update_layout(barmode="overlay", xaxis_title="seconds", showlegend=False, height=80 + 26 * len(figure.data))
    figure.update_yaxes(automargin=True)
    return figure


def _figure(value: str, along: str) -> Any:
    figure = graph_objects().Figure()
    figure.update_layout(yaxis_title=value, xaxis_title=along, yaxis_rangemode="tozero", showlegend=True)
    return figure


def _steps(record: RunRecord) -> list[int]:
    first = record.run.get("first_step", 0)
    return list(range(first, first + len(record.run["step_seconds"])))


def _mode(values: Sequence[float]) -> str:
    """A line through a single point would be invisible."""
    return "lines+markers" if len(values) < 50 else "lines"


def _growth(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """How much a counter grew in each step; the first step counts from where the run began."""
    totals = [float(row["counters"].get(key, 0.0)) for row in rows]
    if not totals:
        return []
    began = totals[0] if key.startswith("nvme/") else 0.0  # initialisation has written before the first step
    return [max(after - before, 0.0) for before, after in zip([began, *totals], totals, strict=False)]
