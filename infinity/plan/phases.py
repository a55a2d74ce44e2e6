"""From what a run noted to how fast its parts are: its thread, its kernels, its hand-overs and its drives.

Every figure is the median over steps: a step that something else disturbed says nothing about the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from infinity.observe.trace import TraceEvent
from infinity.plan.drives import DriveModel
from storage.types import Op

INSTANT_BYTES_PER_S = 1e18
_LEAST_BUSY_S = 1e-4


@dataclass(frozen=True, slots=True)
class Moment:
    """Counters of a run at the end of a step. Times in seconds on `time.perf_counter`'s clock.

    Attributes:
        stalled_s: what the training thread has waited so far.
        drives: per drive and direction (read, then write): bytes moved, and time in which something was in flight.
        paused_s: what lay between steps on purpose so far.
    """

    at_s: float
    stalled_s: float
    drives: tuple[tuple[tuple[int, float], tuple[int, float]], ...]
    paused_s: float = 0.0


def step_s(first: Moment, last: Moment) -> float:
    """Seconds between two ends of steps, pauses left out."""
    return last.at_s - first.at_s - (last.paused_s - first.paused_s)


def median_step_s(moments: Sequence[Moment]) -> float:
    """Of the steps between the moments."""
    return median(step_s(*pair) for pair in pairwise(moments))


def fit_thread_s(
    moments: Sequence[Moment], kernels: Sequence[TraceEvent], stalls: Sequence[TraceEvent], loss: float
) -> float:
    """Seconds of a step in which the training thread worked, if no kernel had run beside it.

    Args:
        loss: seconds that it loses for each second of a kernel that runs beside it.
    """
    found = []
    for first, last in pairwise(moments):
        worked_s = step_s(first, last) - (last.stalled_s - first.stalled_s)
        beside_s = sum(_apart_s(kernel, stalls) for kernel in _between(kernels, first, last)) if loss else 0.0
        found.append(max(worked_s - loss * beside_s, 0.0))
    return median(found)


def fit_kernel_s(moments: Sequence[Moment], kernels: Sequence[TraceEvent], numels: Mapping[str, int]) -> float:
    """Seconds of the optimizer for one element, by the elements of each record; 0 where nothing was updated."""
    found = []
    for first, last in pairwise(moments):
        mine = [kernel for kernel in _between(kernels, first, last) if numels.get(kernel.name)]
        if mine:
            found.append(sum(kernel.duration_s for kernel in mine) / sum(numels[kernel.name] for kernel in mine))
    return median(found) if found else 0.0


def fit_hand_over_s(moments: Sequence[Moment], events: Sequence[TraceEvent]) -> float:
    """Mean seconds from one thread to another, in the median step; 0 where none can be seen.

    Seen is the way from the optimizer's worker to the loop: from the end of a kernel to the submission of its write.
    """
    found = []
    for first, last in pairwise(moments):
        waits = list(_waits_of_writes(list(_between(events, first, last))))
        if waits:
            found.append(fmean(waits))
    return median(found) if found else 0.0


def _waits_of_writes(events: Sequence[TraceEvent]) -> Iterator[float]:
    """From the end of the kernel of a record to the submission of its write."""
    ended: dict[str, float] = {}
    kernels = [(event.start_s + event.duration_s, event) for event in events if event.category == "optimizer"]
    writes = [(event.start_s, event) for event in events if event.category == Op.WRITE.value]
    for at_s, event in sorted(kernels + writes, key=lambda pair: pair[0]):
        if event.category != Op.WRITE.value:
            ended[event.name] = at_s
        elif (since_s := ended.pop(event.name, None)) is not None:
            yield at_s - since_s


def fit_drives(moments: Sequence[Moment]) -> tuple[DriveModel, ...]:
    """Every drive as it was while something was in flight; each direction has the rate that it had beside the other."""
    rates: dict[tuple[int, int], list[float]] = defaultdict(list)
    for first, last in pairwise(moments):
        for drive, (before, after) in enumerate(zip(first.drives, last.drives, strict=True)):
            for way, ((nbytes, busy_s), (more_nbytes, more_busy_s)) in enumerate(zip(before, after, strict=True)):
                if more_busy_s - busy_s > _LEAST_BUSY_S and more_nbytes > nbytes:
                    rates[drive, way].append((more_nbytes - nbytes) / (more_busy_s - busy_s))
    models = []
    for drive in range(len(moments[0].drives)):
        read, write = (median(rates[drive, way] or [INSTANT_BYTES_PER_S]) for way in range(2))
        models.append(DriveModel(read, write, latency_s=0.0, duplex=1.0))
    return tuple(models)


def _between(events: Sequence[TraceEvent], first: Moment, last: Moment) -> Iterator[TraceEvent]:
    return (event for event in events if first.at_s <= event.start_s < last.at_s)


def _apart_s(event: TraceEvent, others: Sequence[TraceEvent]) -> float:
    """Seconds of an event in which none of the others, which do not overlap, went on."""
    end_s = event.start_s + event.duration_s
    overlaps = (min(end_s, o.start_s + o.duration_s) - max(event.start_s, o.start_s) for o in others)
    return event.duration_s - sum(overlap for overlap in overlaps if overlap > 0)
