"""Figures fitted to what a run noted: medians over steps, so that one disturbed step says nothing."""

from __future__ import annotations

import pytest

from infinity.observe.trace import TraceEvent
from infinity.plan.phases import Moment, fit_drives, fit_hand_over_s, fit_kernel_s, fit_thread_s, median_step_s

DRIVE = ((0, 0.0), (0, 0.0))


def moment(at_s: float, stalled_s: float = 0.0, *, read: int = 0, write: int = 0, busy_s: float = 0.0) -> Moment:
    return Moment(at_s, stalled_s, (((read, busy_s), (write, busy_s)),))


def kernel(name: str, start_s: float, duration_s: float) -> TraceEvent:
    return TraceEvent(name, "optimizer", start_s, duration_s, "worker")


def write(name: str, start_s: float) -> TraceEvent:
    return TraceEvent(name, "write", start_s, 0.5, "/drive")


def test_a_disturbed_step_does_not_count() -> None:
    moments = [moment(0.0), moment(1.0, 0.25), moment(11.0, 5.0), moment(12.0, 5.25)]
    assert median_step_s(moments) == 1.0
    assert fit_thread_s(moments, [], [], loss=0.0) == 0.75


def test_what_kernels_took_from_the_thread_is_given_back() -> None:
    moments = [moment(0.0), moment(1.0, 0.2)]
    kernels = [kernel("a", 0.1, 0.3), kernel("b", 0.7, 0.2)]
    stalls = [TraceEvent("optimizer", "stall", 0.8, 0.2, "thread")]
    # The thread worked beside all of the first kernel and beside half of the second.
    assert fit_thread_s(moments, kernels, stalls, loss=0.5) == pytest.approx(0.8 - 0.5 * (0.3 + 0.1))
    assert fit_thread_s(moments, kernels, stalls, loss=0.0) == pytest.approx(0.8)


def test_kernels_are_seconds_of_an_element() -> None:
    moments = [moment(0.0), moment(1.0), moment(2.0), moment(3.0)]
    kernels = [kernel("a", 0.1, 0.2), kernel("b", 0.5, 0.1), kernel("a", 1.1, 9.0), kernel("b", 2.1, 0.1)]
    assert fit_kernel_s(moments, kernels, {"a": 20, "b": 10}) == pytest.approx(0.01)
    assert fit_kernel_s(moments, [], {"a": 20}) == 0.0


def test_a_hand_over_is_seen_between_a_kernel_and_its_write() -> None:
    moments = [moment(0.0), moment(1.0), moment(2.0)]
    events = [kernel("a", 0.1, 0.2), write("a", 0.32), kernel("b", 0.4, 0.1), write("b", 0.54), write("c", 0.9)]
    events += [kernel("a", 1.1, 0.2), write("a", 1.33)]
    assert fit_hand_over_s(moments, events) == pytest.approx(0.03)
    assert fit_hand_over_s(moments, [write("a", 0.5)]) == 0.0


def test_drives_are_as_fast_as_in_the_median_step() -> None:
    moments = [
        moment(0.0),
        moment(1.0, read=100, write=50, busy_s=0.5),
        moment(2.0, read=110, write=55, busy_s=1.0),  # ten times slower
        moment(3.0, read=210, write=105, busy_s=1.5),
    ]
    (drive,) = fit_drives(moments)
    assert (drive.read_bytes_per_s, drive.write_bytes_per_s) == (200.0, 100.0)
