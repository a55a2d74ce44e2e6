"""Plots as SVG text: bars with their spread, and lines over a linear axis. Colours follow the page's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#3b6fd4", "#d9822b", "#2f9e64", "#a648b8", "#c23b3b", "#5f6b7a", "#8a6d1f", "#1f8a8a")
_LABEL, _PLOT, _VALUE, _ROW = 250, 430, 150, 22
_WIDTH, _HEIGHT, _MARGIN = 830, 260, 60  # of a line plot


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its length, the range of its repeats, and what to write behind it."""

    label: str
    value: float
    lowest: float
    highest: float
    text: str
    group: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y), in order of x."""

    label: str
    points: tuple[tuple[float, float], ...]


def colour(number: int) -> str:
    """The colour of a group or line."""
    return _COLOURS[number % len(_COLOURS)]


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars over one axis from zero, with a whisker from the lowest to the highest."""
    most = max((row.highest for row in rows), default=0.0) or 1.0
    scale = _PLOT / most
    parts = []
    for number, row in enumerate(rows):
        y = number * _ROW + 4
        middle = y + _ROW / 2 - 2
        parts += [
            f'<text x="{_LABEL - 8}" y="{middle + 4:.0f}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect x="{_LABEL}" y="{y}" width="{row.value * scale:.1f}" height="{_ROW - 6}" '
            f'fill="{colour(row.group)}"><title>{escape(row.label)}: {escape(row.text)}</title></rect>',
            f'<path d="M{_LABEL + row.lowest * scale:.1f} {middle:.0f}H{_LABEL + row.highest * scale:.1f}" '
            'stroke="currentColor" stroke-width="1.5"/>',
            f'<text x="{_LABEL + row.highest * scale + 8:.1f}" y="{middle + 4:.0f}">{escape(row.text)}</text>',
        ]
    return _frame(title, _LABEL + _PLOT + _VALUE, len(rows) * _ROW + 8, parts)


def lines(rows: Sequence[Line], title: str, x_name: str, y_name: str) -> str:
    """Lines with axes from zero and a legend."""
    points = [point for row in rows for point in row.points]
    x_most, y_most = (_round_up(max((p[axis] for p in points), default=0.0)) for axis in (0, 1))
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN + 20

    def place(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x / x_most * width, 20 + height - y / y_most * height

    parts = []
    for step in range(5):
        x, y = place(x_most * step / 4, y_most * step / 4)
        parts += [
            f'<path d="M{_MARGIN} {y:.1f}H{_MARGIN + width}" stroke="currentColor" stroke-opacity="0.15"/>',
            f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{y_most * step / 4:,.4g}</text>',
            f'<text x="{x:.1f}" y="{height + 36}" text-anchor="middle">{x_most * step / 4:,.4g}</text>',
        ]
    parts.append(f'<text x="{_MARGIN + width}" y="{height + 52}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="4" y="12">{escape(y_name)}</text>')
    for number, row in enumerate(rows):
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in row.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour(number)}" stroke-width="2"/>')
        x = _MARGIN + 160 * number
        parts.append(f'<text x="{x}" y="{height + 70}" fill="{colour(number)}">{escape(row.label)}</text>')
    return _frame(title, _WIDTH, _HEIGHT, parts)


def _frame(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">\n{inside}\n</svg></figure>'
    )


def _round_up(value: float) -> float:
    """The next number that reads well on an axis."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if unit * step >= value * 0.999)
