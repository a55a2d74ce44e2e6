"""The page of `benchmarks/step_time.py`: from results as it writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import benchmarks.step_plots
from benchmarks.step_plots import page


def figure(median: float) -> dict[str, Any]:
    return {"median": median, "min": median * 0.9, "max": median * 1.1, "all": [median]}


def report(what: str, found: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "one <quick> CPU", "cores": 2}
    return {"machine": machine, "torch": "2.6", "settings": {"what": what}, "found": found}


def texts(shown: str) -> list[str]:
    """What is written in the plots; fails where they are no XML."""
    start, stop = shown.index("<figure>"), shown.rindex("</figure>") + len("</figure>")
    return [part.text or "" for part in ElementTree.fromstring(f"<page>{shown[start:stop]}</page>").iter()]


@pytest.mark.parametrize(
    ("what", "names"), [("plain", ("step_s", "plain_step_s")), ("drives", ("step_s", "bound_s"))]
)
def test_seconds_side_by_side(what: str, names: tuple[str, str]) -> None:
    cases = {case: {name: figure(seconds) for name in names} for case, seconds in (("first", 2.0), ("second", 3.5))}
    shown = page(report(what, cases))
    assert "one &lt;quick&gt; CPU" in shown
    assert texts(shown).count("2.000 s") == texts(shown).count("3.500 s") == 2


def test_growth_has_its_line_and_its_memory() -> None:
    sizes = {
        f"{millions} M": {
            "parameters": figure(millions * 1e6),
            "step_s": figure(millions / 100),
            "peak_rss_bytes": figure(9e8),
            "host_peak_bytes": figure(2e8),
        }
        for millions in (50, 1000)
    }
    shown = page(report("growth", {"sizes": sizes, "line": {"r_squared": 0.9876}}))
    assert shown.count("<figure>") == 2
    assert any("R² = 0.9876" in text for text in texts(shown))
    assert "1,200" in texts(shown) or "1,000" in texts(shown)


def test_other_results_are_refused_and_the_script_writes_the_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is known of 'kernels'"):
        page(report("kernels", {}))
    result, target = tmp_path / "result.json", tmp_path / "page.html"
    result.write_text(json.dumps(report("drives", {"1 drives": {"step_s": figure(1.0), "bound_s": figure(0.9)}})))
    subprocess.run([sys.executable, benchmarks.step_plots.__file__, result, target], check=True, timeout=200)
    assert "1 drives: bound of the drives" in target.read_text(encoding="utf-8")
