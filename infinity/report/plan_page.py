"""The pages of `infinity plan`: the timeline of a simulated step, and a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from infinity.plan.timeline import Span, lanes_of
from infinity.report.document import KEYS, Document, graph_objects
from infinity.report.palette import SERIES, colour_of

_ROW_PX, _REST_PX = 30, 110
# What palette.py calls the lanes of a simulation.
_CATEGORIES = {"compute": "forward", "engine": "gather", "nvme read": "read", "nvme write": "write"}


def plan_page(title: str, name: str, figure: Any) -> str:
    """One HTML page with a figure that needs no network.

    Args:
        title: of the page, what the figure is about.
        name: of the figure.

    Raises:
        ConfigError: plotly is not installed.
    """
    document = Document(title)
    document.add(f"<h1>{escape(title)}</h1><p>{KEYS}</p>")
    document.add_figure("figure", name, figure)
    return document.to_html()


def timeline_figure(spans: Sequence[Span]) -> Any:
    """A plotly figure, one row per lane.

    Raises:
        ConfigError: plotly is not installed.
    """
    origin_s = min((span.start_s for span in spans), default=0.0)
    lanes = lanes_of(spans)
    figure = graph_objects().Figure()
    for lane in reversed(lanes):
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
            opacity=0.8,  # transfers of a lane overlap
            marker={"color": colour_of(_CATEGORIES.get(lane, lane)), "line": {"width": 0}},
        )
    height_px = _REST_PX + _ROW_PX * len(lanes)
    figure.update_layout(barmode="overlay", xaxis_title="seconds", showlegend=False, height=height_px)
    figure.update_yaxes(automargin=True, fixedrange=True)
    return figure


def sweep_figure(along: str, values: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> Any:
    """A line for each kind of seconds over what is swept.

    Raises:
        ConfigError: plotly is not installed.
    """
    figure = graph_objects().Figure()
    for name, of_each in seconds.items():
        figure.add_scatter(name=name, x=list(values), y=list(of_each), mode="lines+markers")
    figure.update_xaxes(title=along, type="category")
    figure.update_yaxes(title="seconds", rangemode="tozero")
    figure.update_layout(colorway=list(SERIES))
    return figure
