"""Figures of a run's page: each takes a record and gives a plotly figure, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infinity.observe.names import by_prefix
from infinity.report.document import graph_objects
from infinity.report.palette import SERIES, colour_of, colour_of_cause, name_of
from infinity.report.record import RunRecord

_MIB = 1 << 20
_MOST_SPANS = 6000  # more make the page slow to zoom; the newest steps are shown
_PLACE_CHARACTERS = 16
_ROW_PX, _HELD_PX, _REST_PX = 26, 150, 150
_NOT_SHOWN = ("use forward", "use backward")  # moments, not spans
# Top to bottom: what computes, what it waits for, then along the way of the bytes.
_TRACK_ORDER = ("training thread: units", "training thread", "optimizer", "link")


def losses(record: RunRecord) -> Any | None:
    """Loss by step, and plain PyTorch's where there was a baseline."""
    values = record.run["losses"]
    if not values:
        return None
    figure = _figure("loss", "step")
    figure.update_yaxes(rangemode="normal")
    figure.add_scatter(x=_steps(record), y=values, name="loss", mode=_mode(values))
    baseline = record.run.get("baseline") or {}
    if plain := baseline.get("losses"):
        figure.add_scatter(x=_steps(record), y=plain, name="plain PyTorch", line_dash="dot")
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
        rest = [max(left - value, 0.0) for left, value in zip(rest, values, strict=True)]
        name, line = f"waiting: {cause.replace('_', ' ')}", {"width": 0.5, "color": colour_of_cause(cause)}
        figure.add_scatter(x=_steps(record), y=values, name=name, stackgroup="step", line=line)
    name, line = "everything else" if stalls else "step", {"width": 0.5, "color": SERIES[0]}
    figure.add_scatter(x=_steps(record), y=rest, name=name, stackgroup="step", line=line)
    if (predicted := (record.run.get("prediction") or {}).get("step_seconds")) is not None:
        figure.add_hline(y=predicted, line_dash="dash", annotation_text="predicted")
    return figure


def stalls_by_step(record: RunRecord) -> dict[str, list[float]]:
    """Seconds of each step by cause, from its rows; causes that never occurred are left out."""
    found = {}
    for cause in by_prefix(record.steps[0]["counters"] if record.steps else {}, "stall/", "_s"):
        values = _growth(record, f"stall/{cause}_s")
        if cause != "total" and len(values) == len(record.run["step_seconds"]) and any(values):
            found[cause] = values
    return found


def tiers(record: RunRecord) -> Any | None:
    """What device and host memory held at the end of each step, beside their budgets."""
    if not record.steps:
        return None
    figure = _figure("MiB", "step")
    for tier in (tier for tier in ("device", "host") if tier in record.run["budgets"]):
        held = [row["counters"].get(f"{tier}/held_bytes", 0) / _MIB for row in record.steps]
        peak = [row["counters"].get(f"{tier}/peak_bytes", 0) / _MIB for row in record.steps]
        colour = colour_of(tier)
        figure.add_scatter(x=_steps(record), y=held, name=f"{tier} held", mode=_mode(held), line_color=colour)
        if any(peak):
            line = {"color": colour, "width": 1, "dash": "dot"}
            figure.add_scatter(x=_steps(record), y=peak, name=f"{tier} at most so far", mode="lines", line=line)
        figure.add_hline(y=record.run["budgets"][tier] / _MIB, line_dash="dash", annotation_text=f"{tier} budget")
    return figure


def drives(record: RunRecord) -> Any | None:
    """Bytes per second of each drive by step, and the speed that was measured while it was busy."""
    if not record.steps:
        return None
    figure = _figure("MB/s", "step")
    for number, drive in enumerate(_drives(record)):
        for way in ("read", "write"):
            moved = _growth(record, f"nvme/drive{number}/{way}_bytes")
            rates = [n / row["step_seconds"] / 1e6 for n, row in zip(moved, record.steps, strict=True)]
            if any(rates):
                figure.add_scatter(x=_steps(record), y=rates, name=f"{drive['directory']} {way}", mode=_mode(rates))
            if drive.get(f"{way}_bytes_per_s"):
                ceiling = drive[f"{way}_bytes_per_s"] / 1e6
                figure.add_hline(y=ceiling, line_dash="dot", annotation_text=f"{drive['directory']} can {way}")
    return figure if figure.data else None


def _drives(record: RunRecord) -> list[dict[str, Any]]:
    """The drives with their measured speeds; those of a run that is not finished are known by their counters alone."""
    if "drives" in record.run:
        return list(record.run["drives"])
    counters = record.steps[-1]["counters"]
    found: list[dict[str, Any]] = []
    while f"nvme/drive{(number := len(found))}/read_bytes" in counters:
        speeds = {key: counters.get(f"nvme/drive{number}/{key}") for key in ("read_bytes_per_s", "write_bytes_per_s")}
        found.append({"directory": f"drive {number}"} | speeds)
    return found


def timeline(record: RunRecord) -> Any | None:
    """The newest spans of the trace, a row per track, and what the tiers held meanwhile; zoom to look closer."""
    newest = sorted((s for s in record.spans if s["cat"] not in _NOT_SHOWN), key=lambda span: span["ts"])[-_MOST_SPANS:]
    if not newest:
        return None
    figure = graph_objects().Figure()
    origin = newest[0]["ts"]
    tracks = sorted({span["track"] for span in newest}, key=_track_place)
    for category in _outermost_first(newest):
        mine = [span for span in newest if span["cat"] == category]
        figure.add_bar(
            name=name_of(category),
            y=[span["track"] for span in mine],
            base=[round((span["ts"] - origin) / 1e6, 6) for span in mine],
            x=[round(span["dur"] / 1e6, 6) for span in mine],
            text=[_label(span) for span in mine],
            hovertemplate="%{text}<br>from %{base:.4f} s, %{x:.4f} s<extra></extra>",
            textposition="none",
            orientation="h",
            width=0.8,
            marker={"color": colour_of(category), "line": {"width": 0}},
        )
    height_px = _REST_PX + _ROW_PX * len(tracks)
    held = [each for each in record.held if each["ts"] >= origin]
    if held:
        _add_held(figure, record, held, origin)
        share = _HELD_PX / (height_px + _HELD_PX)
        figure.update_layout(
            yaxis={"domain": [share + 0.06, 1.0]},
            yaxis2={"domain": [0.0, share - 0.02], "anchor": "x", "title": {"text": "% of budget"}, "range": [0, 105]},
            xaxis={"anchor": "y2"},
        )
        height_px += _HELD_PX
    figure.update_layout(barmode="overlay", xaxis_title="seconds", showlegend=True, height=height_px)
    if (view := _last_steps(newest)) is not None:
        figure.update_layout(xaxis={"range": [(at_us - origin) / 1e6 for at_us in view]})
    figure.update_layout(
        yaxis={
            "automargin": True,
            "categoryorder": "array",
            "categoryarray": list(reversed(tracks)),
            "tickvals": tracks,
            "ticktext": [_short(track) for track in tracks],
            "fixedrange": True,
        }
    )
    return figure


def _outermost_first(spans: Sequence[dict[str, Any]]) -> list[str]:
    """Categories, those with the longest spans first: what is drawn later lies on top, and inner spans have to."""
    longest: dict[str, float] = {}
    for span in spans:
        longest[span["cat"]] = max(longest.get(span["cat"], 0.0), span["dur"])
    return sorted(longest, key=lambda category: -longest[category])


def _last_steps(spans: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Where the last two steps begin and end, in µs; None where there are no more."""
    ends = sorted(span["ts"] + span["dur"] for span in spans if span["cat"] == "step")
    return (ends[-3], ends[-1]) if len(ends) >= 3 else None


def _short(track: str) -> str:
    """A track's name that fits beside the figure: of a drive's folder the end."""
    place, _, kind = track.rpartition(": ")
    return f"{place if len(place) <= _PLACE_CHARACTERS else f'…{place[1 - _PLACE_CHARACTERS :]}'}: {kind}"


def _add_held(figure: Any, record: RunRecord, held: Sequence[dict[str, Any]], origin_us: float) -> None:
    """Lines of what device and host held, as shares of their budgets."""
    for tier in ("device", "host"):
        mine = [each for each in held if each["name"] == tier]
        budget = record.run["budgets"].get(tier)
        if mine and budget:
            figure.add_scatter(
                x=[round((each["ts"] - origin_us) / 1e6, 6) for each in mine],
                y=[round(100 * each["bytes"] / budget, 2) for each in mine],
                name=f"{tier} held",
                mode="lines",
                line={"shape": "hv", "width": 1.5, "color": colour_of(tier)},
                hovertemplate=f"{tier}: %{{y:.1f}} % of its budget at %{{x:.4f}} s<extra></extra>",
                yaxis="y2",
            )


def _track_place(track: str) -> tuple[int, str]:
    """Where a track stands: known ones in their order, drives by name below."""
    place = next((n for n, start in enumerate(_TRACK_ORDER) if track.startswith(start)), len(_TRACK_ORDER))
    return place, track


def _label(span: dict[str, Any]) -> str:
    waited_for = span.get("args", {}).get("waited for")
    return f"{name_of(span['cat'])} {span['name']}" + (f": {waited_for}" if waited_for else "")


def _figure(value: str, along: str) -> Any:
    figure = graph_objects().Figure()
    figure.update_layout(yaxis_title=value, xaxis_title=along, yaxis_rangemode="tozero", showlegend=True)
    figure.update_layout(colorway=list(SERIES))
    return figure


def _steps(record: RunRecord) -> list[int]:
    first = record.run.get("first_step", 0)
    return list(range(first, first + len(record.run["step_seconds"])))


def _mode(values: Sequence[float]) -> str:
    """A line through a single point would be invisible."""
    return "lines+markers" if len(values) < 50 else "lines"


def _growth(record: RunRecord, key: str) -> list[float]:
    """How much a counter grew in each step; what initialisation moved before the first step is not part of it."""
    totals = [float(row["counters"].get(key, 0.0)) for row in record.steps]
    before = [float(record.run.get("counters_at_start", {}).get(key, 0.0)), *totals]
    return [max(now - then, 0.0) for then, now in zip(before, totals, strict=False)]
