"""From what a run noted to what its training thread worked, and what it lost to the threads that work beside it.

[Note: one interpreter] On a machine without a GPU the training thread computes itself, and in between runs Python: for
every operation it takes the interpreter's lock, which I/O threads and the loop want for every transfer, and cores as
well where there are few. What it loses shows as time in which it neither waited for anything nor ran. How much of the
other threads' CPU time that is, is a property of machine and model, and fitted; how much CPU time a transfer takes is
measured. Where everything waits for everything, little goes on beside computing and little is lost; a schedule that
overlaps loses more, which no calibration would tell that saw only the sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch

from infinity.observe.trace import TraceEvent
from infinity.optim.kernel_threads import usable_cores
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.phases import Step, apart_s, between, step_s
from infinity.runtime import Runtime
from storage.types import Op

_TRANSFERS = frozenset(op.value for op in Op)


def fit_contention(runtime: Runtime, steps: Sequence[Step], events: Sequence[TraceEvent]) -> Contention:
    """Of a run, from what its threads noted during these steps."""
    if runtime.device.torch_device.type != "cpu":
        return NO_CONTENTION
    kernel = kernel_loss(torch.get_num_threads(), runtime.threads.count, usable_cores())
    transfer_s, byte_s = fit_transfer_loss(steps, events, kernel)
    return Contention(kernel, transfer_s, byte_s)


def kernel_loss(computing: int, updating: int, cores: int) -> float:
    """Seconds that computing loses for each second of a kernel beside it, by their threads on so many cores.

    With a and b threads on n cores each gets n / (a + b) of what it wants while both run, if that is less than all. A
    kernel of k seconds then takes k (a + b) / n, and computing loses what it did not get of these, k ((a + b) / n - 1).
    """
    return max((computing + updating) / cores - 1, 0.0)


def fit_transfer_loss(steps: Sequence[Step], events: Sequence[TraceEvent], kernel: float) -> tuple[float, float]:
    """Seconds that computing loses to a transfer that ends beside it, and to each of its bytes.

    The loop's CPU time goes by transfers, that of the I/O threads by bytes. The part of it that computing loses is what
    it lost in these steps, over what went on beside it. See [Note: one interpreter].

    Args:
        kernel: as `kernel_loss` gives it.
    """
    alone = Contention(kernel)
    steps = [(first, last) for first, last in steps if first.paused_s == last.paused_s]  # whose CPU time is all theirs
    transfers = [event for step in steps for event in between(events, *step) if event.category in _TRANSFERS]
    beside = list(_beside(steps, events))
    if not beside:
        return 0.0, 0.0
    lost_s = sum(max(_worked_s(s, events, alone) - (s[1].thread_cpu_s - s[0].thread_cpu_s), 0.0) for s in steps)
    loop_s = sum(last.loop_cpu_s - first.loop_cpu_s for first, last in steps) / len(transfers)
    io_s = sum(last.io_cpu_s - first.io_cpu_s for first, last in steps) / sum(event.nbytes for event in transfers)
    beside_s = loop_s * len(beside) + io_s * sum(event.nbytes for event in beside)
    part = min(lost_s / beside_s, 1.0) if beside_s > 0 else 0.0
    return part * loop_s, part * io_s


def fit_thread_s(steps: Sequence[Step], events: Sequence[TraceEvent], contention: Contention) -> float:
    """Mean seconds of a step in which the training thread worked, if nothing had gone on beside it."""
    return fmean(max(_worked_s(step, events, contention), 0.0) for step in steps)


def _worked_s(step: Step, events: Sequence[TraceEvent], contention: Contention) -> float:
    """Of one step, without what was lost to kernels and transfers; below 0 when that says more than there was."""
    first, last = step
    seconds = step_s(first, last) - (last.stalled_s - first.stalled_s)
    if contention.kernel:
        stalls = [event for event in events if event.category == "stall"]
        kernels = (event for event in between(events, first, last) if event.category == "optimizer")
        seconds -= contention.kernel * sum(apart_s(kernel, stalls) for kernel in kernels)
    if contention.transfer_s or contention.byte_s:
        beside = list(_beside([step], events))
        seconds -= contention.transfers_s(len(beside), sum(event.nbytes for event in beside))
    return seconds


def _beside(steps: Sequence[Step], events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Transfers of these steps that ended while the training thread waited for nothing."""
    stalls = sorted((event.start_s, event.start_s + event.duration_s) for event in events if event.category == "stall")
    starts = [start_s for start_s, _ in stalls]
    for step in steps:
        for event in between(events, *step):
            if event.category in _TRANSFERS:
                end_s = event.start_s + event.duration_s
                number = bisect_right(starts, end_s) - 1  # stalls of one thread do not overlap
                if number < 0 or stalls[number][1] < end_s:
                    yield event
