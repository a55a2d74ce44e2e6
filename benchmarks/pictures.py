"""The pictures of docs/how-it-works.md, made from the traces of real runs.

    python benchmarks/pictures.py [--folder docs/pictures] [--preset tiny] [--steps 30]

Trains the preset once with every schedule shown, records it as `infinity train --record` does, and draws the shortest
whole step of each, the one that other work on the machine disturbed least: `schedules.svg` (what runs when) and
`tiers.svg` (what the tiers hold meanwhile). It takes less than a minute and a few MiB; no network.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from infinity.bench.arguments import at_least
from infinity.report.palette import colour_of
from infinity.report.record import RunRecord
from infinity.sizes import format_nbytes

SCHEDULES = ("synchronous", "overlapped")
_ROWS = (
    ("compute", ("forward", "backward")),
    ("waiting", ("stall",)),
    ("update", ("optimizer",)),
    ("upload", ("h2d",)),
    ("download", ("d2h",)),
    ("read", ("read",)),
    ("write", ("write",)),
)
_LEGEND = ("forward", "backward", "stall", "optimizer", "h2d", "d2h", "read", "write")
_LEGEND_NAMES = {"stall": "waiting", "optimizer": "update", "h2d": "upload", "d2h": "download"}
_WIDTH, _LEFT, _RIGHT, _ROW, _HEAD = 960, 90, 24, 22, 58
_STYLE = """
svg { font: 13px system-ui, sans-serif } .paper { fill: #ffffff } .ink { fill: #1c2128 } .soft { fill: #57606a }
.line { stroke: #d0d7de } .title { font-weight: 600; font-size: 15px }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14181d } .ink { fill: #e6edf3 } .soft { fill: #9aa5b1 } .line { stroke: #30363d } }
"""


@dataclass(frozen=True, slots=True)
class Window:
    """One step of a run: spans and what tiers held, with times in ms since its beginning."""

    title: str
    long_ms: float
    spans: list[tuple[str, float, float]]  # category, start, duration
    held: dict[str, list[tuple[float, int]]]  # by tier
    budgets: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=at_least(2), default=30)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        windows = [shortest_step(record_run(Path(scratch), name, given), name) for name in SCHEDULES]
    (given.folder / "schedules.svg").write_text(draw_schedules(windows), encoding="utf-8")
    (given.folder / "tiers.svg").write_text(draw_tiers(windows[-1]), encoding="utf-8")
    print(f"wrote schedules.svg and tiers.svg to {given.folder}")


def record_run(scratch: Path, schedule: str, given: argparse.Namespace) -> RunRecord:
    """Train as a user does."""
    folder = scratch / schedule
    command = [sys.executable, "-m", "infinity", "train", "--preset", given.preset, "--steps", str(given.steps)]
    options = ["--schedule", schedule, "--device", "cpu", "--record", str(folder)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return RunRecord.load(folder)


def shortest_step(record: RunRecord, title: str) -> Window:
    """What happened between those two ends of `optimizer.step()` in a row that lie closest to each other."""
    ends = sorted(span["ts"] + span["dur"] for span in record.spans if span["cat"] == "step")
    if len(ends) < 2:
        raise SystemExit("the trace holds no whole step; train more of them")
    begin, end = min(itertools.pairwise(ends), key=lambda pair: pair[1] - pair[0])
    spans = []
    for span in record.spans:
        start, stop = max(span["ts"], begin), min(span["ts"] + span["dur"], end)
        if stop > start:
            spans.append((span["cat"], (start - begin) / 1e3, (stop - start) / 1e3))
    held: dict[str, list[tuple[float, int]]] = {}
    for each in sorted(record.held, key=lambda one: one["ts"]):
        points = held.setdefault(each["name"], [])
        if each["ts"] <= begin:
            points[:] = [(0.0, each["bytes"])]  # what it held when the step began
        elif each["ts"] <= end:
            points.append(((each["ts"] - begin) / 1e3, each["bytes"]))
    return Window(title, (end - begin) / 1e3, spans, held, record.run["budgets"])


def draw_schedules(windows: Sequence[Window]) -> str:
    """One panel per window, all with the same scale of time."""
    long_ms = max(window.long_ms for window in windows)
    panel = _HEAD + _ROW * len(_ROWS) + 18
    height = 44 + panel * len(windows) + 10
    parts = [_legend()]
    for number, window in enumerate(windows):
        parts.append(f'<g transform="translate(0 {40 + panel * number})">{_panel(window, long_ms)}</g>')
    return _svg(height, "What runs when in one training step, by schedule", parts)


def _panel(window: Window, long_ms: float) -> str:
    bottom = _HEAD + _ROW * len(_ROWS)
    parts = [_text(f"{window.title}: {window.long_ms:.1f} ms", 12, 26, "ink title"), _axis(long_ms, _HEAD - 8, bottom)]
    for number, (name, categories) in enumerate(_ROWS):
        y = _HEAD + _ROW * number
        parts.append(_text(name, _LEFT - 10, y + 15, "soft", anchor="end"))
        for category in categories:
            mine = [(start, dur) for cat, start, dur in window.spans if cat == category]
            shapes = "".join(_rect(start, dur, long_ms, y + 3, _ROW - 6) for start, dur in mine)
            parts.append(f'<g fill="{colour_of(category)}" fill-opacity="0.85">{shapes}</g>')
    return "".join(parts)


def draw_tiers(window: Window) -> str:
    """What device and host held in the course of a step, as shares of their budgets, over forward and backward."""
    top, tall = 92, 220
    bottom = top + tall
    parts = [_text(f"One step, {window.title}: memory held, in % of the budget", 12, 26, "ink title")]
    names = [(tier, f"{tier}, {format_nbytes(window.budgets[tier])}") for tier in ("device", "host")]
    parts.append(_keys([(colour_of(tier), name) for tier, name in names], 46))
    parts.append(_axis(window.long_ms, top, bottom))
    for category in ("forward", "backward"):
        mine = [(start, dur) for cat, start, dur in window.spans if cat == category]
        shapes = "".join(_rect(start, dur, window.long_ms, top, tall) for start, dur in mine)
        parts.append(f'<g fill="{colour_of(category)}" fill-opacity="0.14">{shapes}</g>')
        if mine:
            first, last = min(start for start, _ in mine), max(start + dur for start, dur in mine)
            parts.append(_text(category, _x((first + last) / 2, window.long_ms), top - 8, "soft", anchor="middle"))
    for percent in (0, 50, 100):
        y = bottom - tall * percent / 100
        parts.append(f'<path class="line" stroke-dasharray="3 4" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(f"{percent} %", _LEFT - 10, y + 4, "soft", anchor="end"))
    for tier, _ in names:
        parts.append(_steps(window, tier, bottom, tall))
    return _svg(bottom + 40, "What device and host memory hold in the course of one training step", parts)


def _steps(window: Window, tier: str, bottom: float, tall: float) -> str:
    """A line of steps through what a tier held."""
    points = window.held.get(tier, [])
    if not points:
        return ""
    path = ""
    for at, nbytes in points:
        y = bottom - tall * min(nbytes / window.budgets[tier], 1.0)
        path += f"{'H' if path else 'M'}{_x(at, window.long_ms):.1f}" + (f"V{y:.1f}" if path else f" {y:.1f}")
    path += f"H{_x(window.long_ms, window.long_ms):.1f}"
    return f'<path fill="none" stroke-width="2" stroke="{colour_of(tier)}" d="{path}"/>'


def _x(at_ms: float, long_ms: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at_ms / long_ms


def _rect(start_ms: float, dur_ms: float, long_ms: float, y: float, tall: float) -> str:
    left = _x(start_ms, long_ms)
    wide = max(_x(start_ms + dur_ms, long_ms) - left, 0.6)
    return f'<rect x="{left:.1f}" y="{y:g}" width="{wide:.1f}" height="{tall:g}"/>'


def _axis(long_ms: float, top: float, bottom: float) -> str:
    """Lines and figures at about eight round moments."""
    rough = long_ms / 8
    unit = next(scale for power in range(-3, 6) for step in (1, 2, 5) if (scale := step * 10.0**power) >= rough)
    parts, at = [], 0.0
    while at <= long_ms:
        x = _x(at, long_ms)
        parts.append(f'<path class="line" d="M{x:.1f} {top:g}V{bottom:g}"/>')
        parts.append(_text(f"{at:g} ms", x, bottom + 15, "soft", anchor="middle"))
        at = round(at + unit, 6)
    return "".join(parts)


def _legend() -> str:
    return _keys([(colour_of(each), _LEGEND_NAMES.get(each, each)) for each in _LEGEND], 22)


def _keys(entries: Sequence[tuple[str, str]], y: float) -> str:
    parts, x = [], 12.0
    for colour, name in entries:
        parts.append(f'<rect x="{x:g}" y="{y - 10:g}" width="11" height="11" rx="2" fill="{colour}"/>')
        parts.append(_text(name, x + 17, y, "ink"))
        x += 17 + 8 * len(name) + 18
    return "".join(parts)


def _text(text: str, x: float, y: float, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, title: str, parts: Sequence[Any]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{title}">'
        f'<title>{title}</title><style>{_STYLE}</style><rect class="paper" width="100%" height="100%" rx="8"/>'
        + "".join(parts)
        + "</svg>\n"
    )


if __name__ == "__main__":
    main()
