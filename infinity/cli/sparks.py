"""Bars and sparklines of characters, also for terminals that only know ASCII."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters to draw with.

    Attributes:
        full, empty: of a bar.
        levels: of a sparkline, lowest first.
    """

    full: str
    empty: str
    levels: str


BLOCKS = Glyphs("━", "─", "▁▂▃▄▅▆▇█")
PLAIN = Glyphs("#", ".", "_.-=+*#")


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    """`width` characters, `share` of them full. More than all is all; anything above nothing shows."""
    share = min(max(share, 0.0), 1.0)
    full = min(math.ceil(share * width) if share * width < 1 else round(share * width), width)
    return glyphs.full * full + glyphs.empty * (width - full)


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """At most `width` characters, each the mean of as many values; the lowest and the highest mean span the levels.

    Values that are no numbers (a loss of NaN) leave a blank.
    """
    if width < 1 or not values:
        return ""
    means = [_mean(values[start:stop]) for start, stop in _parts(len(values), min(width, len(values)))]
    there = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(there), max(there)) if there else (0.0, 0.0)
    step = (high - low) / (len(glyphs.levels) - 1)
    return "".join(
        " " if not math.isfinite(mean) else glyphs.levels[round((mean - low) / step) if step > 0 else 0]
        for mean in means
    )


def _parts(count: int, n_parts: int) -> list[tuple[int, int]]:
    """Cut 0..count into parts that differ by one at most."""
    bounds = [count * number // n_parts for number in range(n_parts + 1)]
    return list(itertools.pairwise(bounds))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
