"""The documentation's pictures: there, small, well-formed, and drawn from what a trace holds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import infinity
from benchmarks.pictures import draw_schedules, draw_tiers, shortest_step
from infinity.report.palette import colour_of
from infinity.report.record import RunRecord

DOCS = Path(infinity.__file__).parent.parent / "docs"
_SVG = "{http://www.w3.org/2000/svg}"
_LARGEST_NBYTES = 150_000


def _span(category: str, start: float, duration: float) -> dict[str, Any]:
    return {"name": "blocks.0", "cat": category, "ts": start, "dur": duration, "track": category}


def _record() -> RunRecord:
    """Steps of 100 and 150 µs after the first; only the shorter one is to be seen."""
    spans = [_span("forward", 10, 20), _span("step", 90, 10), _span("read", 95, 15), _span("step", 340, 10)]
    spans += [_span("forward", 110, 20), _span("backward", 140, 30), _span("write", 195, 50), _span("step", 190, 10)]
    held = [{"ts": at, "name": "host", "bytes": nbytes} for at, nbytes in ((5, 100), (60, 300), (150, 500))]
    run = {"budgets": {"host": 1000, "device": 1000}, "losses": [], "step_seconds": []}
    return RunRecord("run", run, [], spans, held)


def test_a_picture_shows_the_shortest_whole_step() -> None:
    window = shortest_step(_record(), "overlapped")
    assert window.long_ms == pytest.approx(0.1)
    assert [category for category, _, _ in window.spans] == ["read", "forward", "backward", "write", "step"]
    assert window.spans[0][1:] == pytest.approx((0.0, 0.01))  # what began before is cut
    assert window.held["host"] == [(0.0, 300), (pytest.approx(0.05), 500)]


def test_pictures_are_drawn_of_these_spans() -> None:
    window = shortest_step(_record(), "overlapped")
    schedules = ET.fromstring(draw_schedules([window, window]))
    groups = [group for group in schedules.iter(f"{_SVG}g") if group.get("fill") == colour_of("backward")]
    assert [len(list(group)) for group in groups] == [1, 1]
    tiers = ET.fromstring(draw_tiers(window))
    lines = [path for path in tiers.iter(f"{_SVG}path") if path.get("stroke") == colour_of("host")]
    assert len(lines) == 1
    assert len(re.findall(r"V", str(lines[0].get("d")))) == 1  # one change in the step


@pytest.mark.parametrize("name", ["schedules.svg", "tiers.svg"])
def test_the_stored_pictures_are_small_readable_in_the_dark_and_used(name: str) -> None:
    text = (DOCS / "pictures" / name).read_text()
    assert len(text.encode()) < _LARGEST_NBYTES
    assert "prefers-color-scheme: dark" in text
    assert ET.fromstring(text).find(f"{_SVG}title") is not None
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert f"(pictures/{name})" in (DOCS / "how-it-works.md").read_text()
