"""Plots of what `step_time.py` measured, as one page; also from a result that was kept.

    python benchmarks/step_plots.py RESULT.json PAGE.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from infinity.bench.arguments import result_file
from infinity.bench.svg import Bar, Line, bars, lines

Figures = Mapping[str, Mapping[str, Any]]  # of one case: by name, median, min and max over the rounds

_BARS = {
    "plain": {"step_s": "offloaded", "plain_step_s": "plain PyTorch in memory"},
    "drives": {"step_s": "step", "bound_s": "bound of the drives"},
}
_MB, _MILLION = 1e6, 1e6


def page(report: Mapping[str, Any]) -> str:
    """A page of the report that `step_time.py` writes.

    Raises:
        ValueError: it is of something else.
    """
    what, machine = report["settings"]["what"], report["machine"]
    if what == "growth":
        figures = _growth(report["found"])
    elif what in _BARS:
        figures = [_seconds(report["found"], _BARS[what])]
    else:
        raise ValueError(f"nothing is known of {what!r}; allowed: growth, {', '.join(_BARS)}")
    told = ", ".join(f"{name} {value}" for name, value in {**machine, "torch": report["torch"]}.items())
    style = "body{font:14px sans-serif;max-width:60em;margin:2em auto}svg{width:100%}text{font-size:12px}"
    body = "\n".join((*figures, f"<p>{escape(told)}</p>"))
    return f"<!doctype html><meta charset='utf-8'><title>step time</title><style>{style}</style>\n{body}\n"


def _seconds(found: Mapping[str, Figures], names: Mapping[str, str]) -> str:
    """The medians side by side, with the range of the rounds."""
    rows = []
    for case, figures in found.items():
        for group, (name, label) in enumerate(names.items()):
            one = figures[name]
            text = f"{one['median']:.3f} s"
            rows.append(Bar(f"{case}: {label}", one["median"], one["min"], one["max"], text, group))
    return bars(rows, "Seconds of a step: medians, with the range of the rounds")


def _growth(found: Mapping[str, Any]) -> list[str]:
    """Seconds and host memory against the size of the model."""
    sizes: list[Figures] = list(found["sizes"].values())

    def of(name: str, unit: float, shown: str = "median") -> tuple[tuple[float, float], ...]:
        return tuple((size["parameters"]["median"] / _MILLION, size[name][shown] / unit) for size in sizes)

    straight = f"R² = {found['line']['r_squared']:.4f}"
    seconds = [Line(shown, of("step_s", 1.0, shown)) for shown in ("median", "min", "max")]
    memory = [Line("peak of the process", of("peak_rss_bytes", _MB)), Line("engine", of("host_peak_bytes", _MB))]
    return [
        lines(seconds, f"Seconds of a step at fixed budgets ({straight})", "million parameters", "s"),
        lines(memory, "Host memory at fixed budgets", "million parameters", "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("page", type=result_file)
    given = parser.parse_args()
    given.page.write_text(page(json.loads(given.result.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
