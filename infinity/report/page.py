"""The page of a run: one HTML file that needs no network, in the reader's light or dark."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from infinity.plan.timeline import graph_objects
from infinity.report import charts
from infinity.report.assets import SCRIPT, STYLE
from infinity.report.record import RunRecord, RunState
from infinity.report.tables import overview, prediction, settings, stalls, wear

_CONFIG: dict[str, Any] = {"responsive": True, "displayModeBar": False, "scrollZoom": True}
_HEIGHT_PX = 320
_KEYS = (
    "Figures: drag to move, click and wheel to zoom, double-click for all of it; with the keyboard Tab to one, then "
    "← → + −, 0 for all of it, Esc to leave."
)


class _Section(NamedTuple):
    """A part of the page with a figure, and what it says where there is none."""

    name: str
    title: str
    make: Callable[[RunRecord], Any | None]
    caption: str
    without: str


_FIGURES = (
    _Section("losses", "Losses", charts.losses, "Each step's loss.", "The run ended before its first step."),
    _Section(
        "steps",
        "Step time",
        charts.step_times,
        "What the training thread waited for, and everything else.",
        "The run ended before its first step.",
    ),
    _Section(
        "timeline",
        "Timeline",
        charts.timeline,
        "The newest steps, a row per track, the last two in view; below, what device and host memory held meanwhile.",
        "No trace was recorded; run with --record.",
    ),
    _Section(
        "tiers",
        "Tiers",
        charts.tiers,
        "Memory held at the end of each step, the most so far, and the budget.",
        "No rows per step were recorded; run with --record.",
    ),
    _Section(
        "drives",
        "Drives",
        charts.drives,
        "Bytes per second over whole steps, and what the drive gave while it was busy.",
        "No rows per step were recorded, or nothing lay on drives.",
    ),
)
_TABLES: tuple[tuple[str, str, Callable[[RunRecord], str]], ...] = (
    ("prediction", "Predicted and measured", prediction),
    ("wear", "Wear", wear),
    ("settings", "Settings and environment", settings),
)


def page(record: RunRecord) -> str:
    """The whole page.

    Raises:
        ConfigError: plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    parts = [
        _heading(record),
        _notice(record),
        overview(record),
        _titled("stalls", "Where the time went", stalls(record)),
    ]
    for section in _FIGURES:
        figure = section.make(record)
        if figure is None:
            parts.append(_titled(section.name, section.title, f"<p>{section.without}</p>"))
            continue
        height_px = figure.layout.height or _HEIGHT_PX
        figures[f"figure-{section.name}"] = json.loads(figure.to_json()) | {"config": _CONFIG}
        drawn = (
            f'<figure id="figure-{section.name}" style="height:{height_px}px" tabindex="0" role="group" '
            f'aria-label="{section.title}"></figure>'
        )
        parts.append(_titled(section.name, section.title, f"<p>{section.caption}</p>{drawn}"))
    parts += [_titled(name, title, make(record)) for name, title, make in _TABLES]
    for made in figures.values():
        made["layout"].pop("template", None)
        made["layout"].pop("height", None)  # the element's
    data = json.dumps(figures).replace("</", "<\\/")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(record.name)} · Infinity</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        "<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="figures">{data}</script>\n<script>{get_plotlyjs()}</script>\n'
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _titled(name: str, title: str, body: str) -> str:
    return f'<h2 id="{name}">{title}</h2>{body}'


def _heading(record: RunRecord) -> str:
    names = [("stalls", "Time"), *((s.name, s.title) for s in _FIGURES), *((n, title) for n, title, _ in _TABLES)]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in names)
    return f'<h1>Run {escape(record.name)}</h1><nav aria-label="Sections">{links}</nav><p>{_KEYS}</p>'


def _notice(record: RunRecord) -> str:
    """How a run ended that did not come to its end."""
    steps = len(record.run["step_seconds"])
    if record.state is RunState.FINISHED:
        return ""
    if record.state is RunState.RUNNING:
        what = f"This run has not ended, or its process was killed: {steps} steps are recorded."
        return f'<div class="notice" role="status"><strong>Not finished.</strong> {what}</div>'
    error: dict[str, Any] = record.run.get("error") or {}
    told = f"<p>{escape(str(error.get('message', 'The reason is not recorded.')))}</p>"
    report = error.get("report")
    if report:
        told += (
            f"<details><summary>Where everything was</summary><pre tabindex='0'>{escape(str(report))}</pre></details>"
        )
    return f'<div class="notice" role="alert"><strong>Failed after {steps} steps.</strong>{told}</div>'
