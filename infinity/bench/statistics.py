"""Figures of repeated measurements: medians, spreads, percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

PERCENTILES = (1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value, in the unit of the values."""
        return float(median(self.values))

    @property
    def lowest(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def highest(self) -> float:
        """The largest value."""
        return max(self.values)

    @property
    def relative(self) -> float:
        """Distance of the highest and the lowest, as a share of the median."""
        return (self.highest - self.lowest) / self.median if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    """At least one value."""
    return Spread(tuple(values))


_STEPS = (0, 2, 4, 10, 20, 50, 100, 250, 500, 750, 1000)
_UNITS_NS = {"ns": 1, "us": 1000, "ms": 1_000_000}


def shares(values_ns: npt.NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Percent of the latencies up to each step of fio's scale, for nanoseconds, microseconds and milliseconds."""
    ordered = np.sort(values_ns)
    percent = 100.0 / max(len(ordered), 1)
    found: dict[str, dict[str, float]] = {}
    for unit, factor in _UNITS_NS.items():
        steps = _STEPS if unit != "ms" else (*_STEPS, 2000)
        first = 0 if unit == "ns" else 1  # what is less than one of a unit is counted in the unit before
        below = np.searchsorted(ordered, [max(step, first) * factor for step in steps])
        found[unit] = {str(step): percent * int(n) for step, n in zip(steps[1:], np.diff(below), strict=True)}
    found["ms"][">=2000"] = percent * int((ordered >= 2000 * _UNITS_NS["ms"]).sum())
    return found


@dataclass(frozen=True, slots=True)
class Latencies:
    """How long transfers took, in nanoseconds."""

    count: int
    least_ns: int
    most_ns: int
    mean_ns: float
    deviation_ns: float
    percentiles_ns: dict[float, int]

    @classmethod
    def of(cls, values_ns: npt.NDArray[np.int64]) -> Latencies:
        if not len(values_ns):
            return cls(0, 0, 0, 0.0, 0.0, {})
        # "higher" gives a latency that really happened, as in fio.
        at = np.percentile(values_ns, PERCENTILES, method="higher")
        return cls(
            count=len(values_ns),
            least_ns=int(values_ns.min()),
            most_ns=int(values_ns.max()),
            mean_ns=float(values_ns.mean()),
            deviation_ns=float(values_ns.std()),
            percentiles_ns={p: int(value) for p, value in zip(PERCENTILES, at, strict=True)},
        )
