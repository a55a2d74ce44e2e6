"""The timeline of a simulated step, and Chrome's trace of it; `infinity.report.plan_page` draws it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.observe.chrome import lanes_apart

_PROCESS = 1  # viewers take 0 for the idle process
_LANES = ("compute", "stall", "engine", "h2d", "d2h", "all-gather", "reduce", "optimizer", "nvme read", "nvme write")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on one lane of the timeline. Seconds since the beginning of the run."""

    lane: str
    name: str
    start_s: float
    end_s: float


def in_order(spans: Iterable[Span]) -> list[Span]:
    """By time; what begins at the same moment by lane and name."""
    return sorted(spans, key=lambda span: (span.start_s, span.lane, span.name))


def lanes_of(spans: Sequence[Span]) -> list[str]:
    """The lanes that occur, the training thread first."""
    there = dict.fromkeys(span.lane for span in spans)
    return [lane for lane in _LANES if lane in there] + [lane for lane in there if lane not in _LANES]


def chrome_trace(spans: Sequence[Span]) -> str:
    """Chrome's trace format (chrome://tracing, Perfetto). Where spans of a lane overlap, it has several tracks."""
    origin_s = min((span.start_s for span in spans), default=0.0)
    rows: list[dict[str, Any]] = [_name_row("process_name", 0, "simulated step")]
    first_track = 1
    for lane in lanes_of(spans):
        mine = [span for span in spans if span.lane == lane]
        lanes = lanes_apart([(span.start_s, span.end_s) for span in mine])
        for number in range(max(lanes)):
            rows.append(_name_row("thread_name", first_track + number, f"{lane} {number + 1}" if number else lane))
        for span, number in zip(mine, lanes, strict=True):
            row = {"name": span.name or lane, "cat": lane, "ph": "X", "pid": _PROCESS, "tid": first_track + number - 1}
            times = {"ts": (span.start_s - origin_s) * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
            rows.append(row | times)
        first_track += max(lanes)
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


def _name_row(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
