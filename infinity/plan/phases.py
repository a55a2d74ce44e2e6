"""From what a run noted to how fast its parts are: its kernels and its hand-overs. Its thread: `thread_phases`.

Every figure is a mean over the same steps, those of middling length: a step that something else disturbed says nothing
about the others. Medians of each figure by itself would not add up to a step: a disturbance meets the thread in one
step, the drive in the next, and hardly any step goes without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from infinity.observe.trace import TraceEvent
from storage.types import Op


@dataclass(frozen=True, slots=True)
class Moment:
    """Counters of a run at the end of a step. Times in seconds on `time.perf_counter`'s clock.

    Attributes:
        stalled_s: what the training thread has waited so far.
        paused_s: what lay between steps on purpose so far.
        thread_cpu_s, loop_cpu_s, io_cpu_s: CPU time so far of the training thread, of the loop and of the threads that
            move bytes.
    """

    at_s: float
    stalled_s: float
    paused_s: float = 0.0
    thread_cpu_s: float = 0.0
    loop_cpu_s: float = 0.0
    io_cpu_s: float = 0.0


Step = tuple[Moment, Moment]
"""From the end of the step before to its own."""


def step_s(first: Moment, last: Moment) -> float:
    """Seconds between two ends of steps, pauses left out."""
    return last.at_s - first.at_s - (last.paused_s - first.paused_s)


def median_step_s(moments: Sequence[Moment]) -> float:
    """Of the steps between the moments."""
    return median(step_s(*pair) for pair in pairwise(moments))


def middle_steps(moments: Sequence[Moment]) -> list[Step]:
    """The steps that are neither among the shortest nor among the longest, in their order; of three the middle one."""
    steps = list(pairwise(moments))
    by_length = sorted(steps, key=lambda pair: step_s(*pair))
    left_out = (len(steps) + 1) // 4
    kept = by_length[left_out : len(steps) - left_out]
    return [pair for pair in steps if pair in kept]


def fit_kernel_s(steps: Sequence[Step], kernels: Sequence[TraceEvent], numels: Mapping[str, int]) -> float:
    """Seconds of the optimizer for one element, by the elements of each record; 0 where nothing was updated."""
    mine = [kernel for step in steps for kernel in between(kernels, *step) if numels.get(kernel.name)]
    updated = sum(numels[kernel.name] for kernel in mine)
    return sum(kernel.duration_s for kernel in mine) / updated if updated else 0.0


def fit_hand_over_s(steps: Sequence[Step], events: Sequence[TraceEvent]) -> float:
    """Mean seconds from one thread to another; 0 where none can be seen.

    Seen is the way from the optimizer's worker to the loop: from the end of a kernel to the submission of its write.
    """
    waits = [wait for step in steps for wait in _waits_of_writes(list(between(events, *step)))]
    return fmean(waits) if waits else 0.0


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


def between(events: Sequence[TraceEvent], first: Moment, last: Moment) -> Iterator[TraceEvent]:
    """What began in a step."""
    return (event for event in events if first.at_s <= event.start_s < last.at_s)


def apart_s(event: TraceEvent, others: Sequence[TraceEvent]) -> float:
    """Seconds of an event in which none of the others, which do not overlap, went on."""
    end_s = event.start_s + event.duration_s
    overlaps = (min(end_s, o.start_s + o.duration_s) - max(event.start_s, o.start_s) for o in others)
    return event.duration_s - sum(overlap for overlap in overlaps if overlap > 0)
