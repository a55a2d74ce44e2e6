"""A measured step beside its bound: what each resource needed by itself, how long it worked, and where the rest went.

[Note: the account of a step]
The training thread either works or waits, and every wait has a cause; a drive has something in flight or not; a kernel
of the optimizer runs or not. So where computing binds, a step is its bound, the work beyond it, and the waits. Where
another resource binds, it is the bound, what this resource took longer beside the others, and the time in which it was
idle, while the model computed or while the training thread waited for something.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinity.observe.trace import TraceEvent
from storage.types import Op

Span = tuple[float, float]
COMPUTE, NVME, OPTIMIZER, LINK = "compute", "nvme", "optimizer", "link"
_CATEGORIES = {NVME: (Op.READ.value, Op.WRITE.value), OPTIMIZER: ("optimizer",), LINK: ("h2d", "d2h")}


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same times in spans that are in order and apart."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length_s(spans: Iterable[Span]) -> float:
    """How long spans that are apart are together."""
    return sum(stop - start for start, stop in spans)


def common_s(first: Sequence[Span], second: Sequence[Span]) -> float:
    """How long both went on; the spans of each are in order and apart."""
    return length_s(first) + length_s(second) - length_s(joined([*first, *second]))


@dataclass(frozen=True, slots=True)
class Activity:
    """When a resource was at work, and when the training thread waited, in one stretch of time.

    Attributes:
        busy_s: of the resource.
        waiting_s: of the training thread, while the resource was idle.
    """

    busy_s: float
    waiting_s: float


def activities(events: Iterable[TraceEvent], start_s: float, stop_s: float) -> dict[str, Activity]:
    """By resource, what the trace of an engine tells about it between two times of `time.perf_counter`'s clock."""
    spans: dict[str, list[Span]] = {}
    for event in events:
        span = (max(event.start_s, start_s), min(event.start_s + event.duration_s, stop_s))
        if span[0] < span[1]:
            spans.setdefault(event.category, []).append(span)
    waits = joined(spans.get("stall", ()))
    found = {}
    for name, categories in _CATEGORIES.items():
        busy = joined(span for category in categories for span in spans.get(category, ()))
        found[name] = Activity(length_s(busy), length_s(waits) - common_s(busy, waits))
    return found


@dataclass(slots=True)
class StepResult:
    """Seconds, one value per round; what is 0 was not measured.

    Attributes:
        step_s: one step of the engine.
        stalls_s: of it, how long the training thread waited, by cause.
        alone_s: what each resource needed by itself.
        activities: of the resources in a step, one after another as `step_s`.
    """

    step_s: list[float] = field(default_factory=list)
    stalls_s: dict[str, list[float]] = field(default_factory=dict)
    alone_s: dict[str, list[float]] = field(default_factory=dict)
    activities: list[Mapping[str, Activity]] = field(default_factory=list)

    def bounds_s(self) -> dict[str, float]:
        """Medians by resource, largest first."""
        bounds = {name: statistics.median(values) for name, values in self.alone_s.items() if values}
        return dict(sorted(bounds.items(), key=lambda item: -item[1]))

    def in_step_s(self) -> dict[str, float]:
        """Mean seconds of a step in which each resource was at work; `compute` is all that the training thread did."""
        found = {COMPUTE: statistics.mean(self.step_s) - sum(self._stalls_s().values())}
        for name in _CATEGORIES:
            found[name] = statistics.mean(each[name].busy_s for each in self.activities)
        return found

    def to_json(self) -> dict[str, Any]:
        """Medians, ranges, and the account of the difference, which adds up to it."""
        bounds = self.bounds_s()
        bound_s, step_s = max(bounds.values()), statistics.median(self.step_s)
        binding = max(bounds, key=lambda name: bounds[name])
        return {
            "step_seconds": {"median": step_s, "min": min(self.step_s), "max": max(self.step_s), "all": self.step_s},
            "bounds_seconds": bounds,
            "in_step_seconds": self.in_step_s(),
            "stalls_seconds": self._stalls_s(),
            "binding": binding,
            "ratio": step_s / bound_s,
            "difference_seconds": {
                "total": statistics.mean(self.step_s) - bound_s,
                "by_cause": self._account(binding, bound_s),
            },
        }

    def _stalls_s(self) -> dict[str, float]:
        return {cause: statistics.mean(values) for cause, values in self.stalls_s.items()}

    def _account(self, binding: str, bound_s: float) -> dict[str, float]:
        """See [Note: the account of a step]."""
        step_s, in_step = statistics.mean(self.step_s), self.in_step_s()
        if binding not in _CATEGORIES:
            return {"working beyond the bound": in_step[COMPUTE] - bound_s} | self._stalls_s()
        waiting_s = statistics.mean(each[binding].waiting_s for each in self.activities)
        return {
            f"{binding} slower than by itself": in_step[binding] - bound_s,
            f"{binding} idle while computing": step_s - in_step[binding] - waiting_s,
            f"{binding} idle while waiting": waiting_s,
        }
