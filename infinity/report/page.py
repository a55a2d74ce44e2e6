"""The page of a run: one HTML file that needs no network, in the reader's light or dark."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from infinity.report import charts
from infinity.report.document import KEYS, Document
from infinity.report.record import RunRecord, RunState
from infinity.report.tables import WHEN_IT_ENDS, count_steps, overview, prediction, settings, stalls, wear


class _Section(NamedTuple):
    """A part of the page with a figure, and what it says where there is none."""

    name: str
    title: str
    make: Callable[[RunRecord], Any | None]
    caption: str
    without: str


_NO_STEP = "The run ended before its first step."
_FIGURES = (
    _Section("losses", "Losses", charts.losses, "Each step's loss.", _NO_STEP),
    _Section(
        "steps",
        "Step time",
        charts.step_times,
        "What the training thread waited for, and everything else.",
        _NO_STEP,
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
    document = Document(record.name)
    document.add(_heading(record) + _notice(record) + overview(record))
    document.add_section("stalls", "Where the time went", stalls(record))
    for section in _FIGURES:
        figure = section.make(record)
        if figure is None:
            document.add_section(section.name, section.title, f"<p>{_why_none(record, section)}</p>")
        else:
            document.add_figure(section.name, section.title, figure, f"<p>{section.caption}</p>")
    for name, title, make in _TABLES:
        document.add_section(name, title, make(record))
    return document.to_html()


def _why_none(record: RunRecord, section: _Section) -> str:
    """Why there is no figure."""
    if record.state is RunState.RUNNING and section.make is charts.timeline:
        return WHEN_IT_ENDS
    if not record.run["step_seconds"] and section.make is not charts.timeline:
        return _NO_STEP
    return section.without


def _heading(record: RunRecord) -> str:
    names = [("stalls", "Time"), *((s.name, s.title) for s in _FIGURES), *((n, title) for n, title, _ in _TABLES)]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in names)
    return f'<h1>Run {escape(record.name)}</h1><nav aria-label="Sections">{links}</nav><p>{KEYS}</p>'


def _notice(record: RunRecord) -> str:
    """How a run ended that did not come to its end."""
    steps = count_steps(record)
    if record.state is RunState.FINISHED:
        return ""
    if record.state is RunState.RUNNING:
        what = f"This run has not ended, or its process was killed: {steps} recorded."
        return f'<div class="notice" role="status"><strong>Not finished.</strong> {what}</div>'
    ended = "Interrupted" if record.state is RunState.INTERRUPTED else "Failed"
    when = f"after {steps}" if record.run["step_seconds"] else "before its first step"
    error: dict[str, Any] = record.run.get("error") or {}
    told = f"<p>{escape(str(error.get('message', 'The reason is not recorded.')))}</p>"
    report = error.get("report")
    if report:
        told += (
            f"<details><summary>Where everything was</summary><pre tabindex='0'>{escape(str(report))}</pre></details>"
        )
    return f'<div class="notice" role="alert"><strong>{ended} {when}.</strong>{told}</div>'
