"""The timeline of a simulated step: as Chrome's trace, and as one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError

_LANES = ("compute", "stall", "engine", "h2d", "d2h", "all-gather", "reduce", "optimizer", "nvme read", "nvme write")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on one lane of the timeline. Seconds since the beginning of the run."""

    lane: str
    name: str
    start_s: float
    end_s: float


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes that occur, the training thread first."""
    there = dict.fromkeys(span.lane for span in spans)
    return [lane for lane in _LANES if lane in there] + [lane for lane in there if lane not in _LANES]


def chrome_trace(spans: Sequence[Span]) -> str:
    """Chrome's trace format (chrome://tracing, Perfetto)."""
    numbers = {lane: number for number, lane in enumerate(lanes_of(spans))}
    origin_s = min((span.start_s for span in spans), default=0.0)
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in numbers.items()
    ]
    rows += [
        {
            "name": span.name,
            "cat": span.lane,
            "ph": "X",
            "pid": 0,
            "tid": numbers[span.lane],
            "ts": (span.start_s - origin_s) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def timeline_figure(spans: Sequence[Span], title: str) -> Any:
    """A plotly figure, one row per lane.

    Raises:
        ConfigError: plotly is not installed.
    """
    go = graph_objects()
    origin_s = min((span.start_s for span in spans), default=0.0)
    figure = go.Figure()
    for lane in reversed(lanes_of(spans)):
        mine = [span for span in spans if span.lane == lane]
        figure.add_bar(
            name=lane,
            y=[lane] * len(mine),
            base=[span.start_s - origin_s for span in mine],
            x=[span.end_s - span.start_s for span in mine],
            text=[span.name for span in mine],
            hovertemplate="%{text}<br>from %{base:.4f} s, %{x:.4f} s<extra></extra>",
            textposition="none",
            orientation="h",
            opacity=0.6,
            marker_line_width=0.5,
        )
    figure.update_layout(title=title, barmode="overlay", xaxis_title="seconds", showlegend=False)
    return figure


def graph_objects() -> Any:
    """plotly's module of figures.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError("--html needs plotly: pip install 'infinity-offload[report]'") from error
    return go


def page(title: str, figures: Sequence[Any]) -> str:
    """One HTML page with all figures that needs no network."""
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"figure{number}")
        for number, figure in enumerate(figures)
    ]
    head = f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{title}</title></head><body>\n'
    return head + "\n".join(parts) + "\n</body></html>\n"
