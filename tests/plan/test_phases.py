"""Figures fitted to what a run noted: of steps of middling length, so that disturbed ones say nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest

from infinity.observe.trace import TraceEvent
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drive_phases import fit_drives
from infinity.plan.phases import (
    Moment,
    fit_hand_over_s,
    fit_kernel_s,
    median_step_s,
    middle_steps,
)
from infinity.plan.thread_phases import fit_thread_s, fit_transfer_loss, kernel_loss


def moment(at_s: float, stalled_s: float = 0.0) -> Moment:
    return Moment(at_s, stalled_s)


def steps(*ends_s: float) -> list[tuple[Moment, Moment]]:
    return list(pairwise(map(moment, ends_s)))


def kernel(name: str, start_s: float, duration_s: float) -> TraceEvent:
    return TraceEvent(name, "optimizer", start_s, duration_s, "worker")


def stall(start_s: float, duration_s: float) -> TraceEvent:
    return TraceEvent("optimizer", "stall", start_s, duration_s, "thread")


def write(name: str, start_s: float) -> TraceEvent:
    return TraceEvent(name, "write", start_s, 0.5, "/drive")


def moved(op: str, start_s: float, end_s: float, nbytes: int, drive: str = "/drive") -> TraceEvent:
    return TraceEvent("a", op, start_s, end_s - start_s, drive, nbytes)


def test_a_disturbed_step_does_not_count() -> None:
    moments = [moment(0.0), moment(1.0, 0.25), moment(11.0, 5.0), moment(12.25, 5.5)]
    assert median_step_s(moments) == 1.25
    assert middle_steps(moments) == [(moments[2], moments[3])]
    assert fit_thread_s(middle_steps(moments), [], NO_CONTENTION) == 0.75


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ([5.0], [5.0]),
        ([5.0, 9.0], [5.0, 9.0]),
        ([5.0, 1.0, 9.0, 4.0], [5.0, 4.0]),
        ([5.0, 1.0, 9.0, 4.0, 6.0], [5.0, 4.0, 6.0]),
        ([5.0, 1.0, 9.0, 4.0, 6.0, 2.0, 8.0], [5.0, 4.0, 6.0]),
    ],
)
def test_the_middle_half_of_the_steps_counts(lengths: list[float], kept: list[float]) -> None:
    ends = [moment(sum(lengths[:number])) for number in range(len(lengths) + 1)]
    assert [last.at_s - first.at_s for first, last in middle_steps(ends)] == kept


def test_disturbances_of_different_parts_are_not_lost() -> None:
    """Each step loses a second, every time somewhere else; what is fitted adds up to the step all the same."""
    stalled_s = [0.0, 2.0, 3.0, 4.0, 6.0]  # two, one, one, two seconds of waiting
    moments = [moment(4.0 * number, stalled) for number, stalled in enumerate(stalled_s)]
    worked_s = fit_thread_s(middle_steps(moments), [], NO_CONTENTION)
    waited_s = sum(b.stalled_s - a.stalled_s for a, b in middle_steps(moments)) / 2
    assert worked_s + waited_s == pytest.approx(median_step_s(moments))


def test_what_kernels_took_from_the_thread_is_given_back() -> None:
    one = [(moment(0.0), moment(1.0, 0.2))]
    events = [kernel("a", 0.1, 0.3), kernel("b", 0.7, 0.2), stall(0.8, 0.2)]
    # The thread worked beside all of the first kernel and beside half of the second.
    assert fit_thread_s(one, events, Contention(kernel=0.5)) == pytest.approx(0.8 - 0.5 * (0.3 + 0.1))
    assert fit_thread_s(one, events, NO_CONTENTION) == pytest.approx(0.8)


def test_what_transfers_took_from_the_thread_is_given_back() -> None:
    one = [(moment(0.0), moment(1.0, 0.25))]
    beside = [moved("read", 0.1, 0.3, 1000), moved("write", 0.5, 0.74, 3000)]
    waited_for = [moved("read", 0.2, 0.75, 5000), moved("write", 0.6, 0.99, 7000)]
    contention = Contention(transfer_s=0.01, byte_s=1e-5)
    assert fit_thread_s(one, [*beside, *waited_for, stall(0.75, 0.25)], contention) == pytest.approx(
        0.75 - 2 * 0.01 - 4000 * 1e-5
    )
    assert fit_thread_s(one, [*beside * 1000, stall(0.75, 0.25)], contention) == 0.0


def test_a_transfer_takes_the_part_of_its_cpu_time_that_the_thread_was_seen_to_lose() -> None:
    # Of a second the thread waited for 0.4 and ran for 0.5; what else it worked it had lost: 0.1.
    first, last = Moment(0.0, 0.0), Moment(1.0, 0.4, thread_cpu_s=0.5, loop_cpu_s=0.2, io_cpu_s=0.4)
    beside = [moved("read", 0.1, 0.3, 3000)]
    events = [*beside, moved("write", 0.5, 0.7, 1000), stall(0.6, 0.4)]
    # Beside it went half of the loop's time and three quarters of the others': 0.4.
    part = 0.1 / (0.2 / 2 + 0.4 * 3 / 4)
    expected = (part * 0.2 / 2, part * 0.4 / 4000)
    assert fit_transfer_loss([(first, last)], events, kernel=0.0) == pytest.approx(expected)
    contention = Contention(0.0, *expected)
    assert fit_thread_s([(first, last)], events, contention) == pytest.approx(0.5)  # what it ran


def test_no_transfer_takes_more_than_its_cpu_time_nor_less_than_nothing() -> None:
    events = [moved("read", 0.1, 0.3, 1000)]
    slept = (Moment(0.0, 0.0), Moment(1.0, 0.0, thread_cpu_s=0.1, loop_cpu_s=0.02, io_cpu_s=0.01))
    assert fit_transfer_loss([slept], events, kernel=0.0) == pytest.approx((0.02, 1e-5))
    busy = (Moment(0.0, 0.0), Moment(1.0, 0.0, thread_cpu_s=1.1, loop_cpu_s=0.02, io_cpu_s=0.01))
    assert fit_transfer_loss([busy], events, kernel=0.0) == (0.0, 0.0)
    untold = (Moment(0.0, 0.0), Moment(1.0, 0.0, thread_cpu_s=0.1))
    assert fit_transfer_loss([untold], events, kernel=0.0) == (0.0, 0.0)
    assert fit_transfer_loss([slept], [], kernel=0.0) == (0.0, 0.0)


def test_a_step_with_a_pause_says_nothing_about_what_transfers_take() -> None:
    """The CPU time of the pause is in the thread's, and would hide what the thread lost."""
    first, last = Moment(0.0, 0.0), Moment(1.0, 0.0, thread_cpu_s=0.99, loop_cpu_s=0.02, io_cpu_s=0.01)
    paused = Moment(9.0, 0.0, 7.0, thread_cpu_s=8.9, loop_cpu_s=0.04, io_cpu_s=0.02)
    events = [moved("read", 0.1, 0.3, 1000), moved("read", 1.1, 1.3, 1000)]
    assert fit_transfer_loss([(first, last), (last, paused)], events, kernel=0.0) == pytest.approx((0.02 / 3, 1e-5 / 3))
    assert fit_transfer_loss([(last, paused)], events, kernel=0.0) == (0.0, 0.0)


@pytest.mark.parametrize(("computing", "updating", "cores", "loss"), [(1, 1, 2, 0.0), (2, 2, 2, 1.0), (1, 1, 16, 0.0)])
def test_kernels_take_from_computing_what_they_need_of_shared_cores(
    computing: int, updating: int, cores: int, loss: float
) -> None:
    assert kernel_loss(computing, updating, cores) == loss


def test_kernels_are_seconds_of_an_element() -> None:
    kernels = [kernel("a", 0.1, 0.2), kernel("b", 0.5, 0.1), kernel("a", 1.1, 9.0), kernel("b", 11.0, 0.1)]
    fitted = middle_steps([moment(0.0), moment(1.0), moment(10.5), moment(12.0)])
    assert fit_kernel_s(steps(0.0, 1.0), kernels, {"a": 20, "b": 10}) == pytest.approx(0.01)
    assert fit_kernel_s(fitted, kernels, {"a": 20, "b": 10}) == pytest.approx(0.01)  # without the disturbed one
    assert fit_kernel_s(fitted, [], {"a": 20}) == 0.0


def test_a_hand_over_is_seen_between_a_kernel_and_its_write() -> None:
    events = [kernel("a", 0.1, 0.2), write("a", 0.32), kernel("b", 0.4, 0.1), write("b", 0.54), write("c", 0.9)]
    events += [kernel("a", 1.1, 0.2), write("a", 1.36)]
    assert fit_hand_over_s(steps(0.0, 1.0), events) == pytest.approx(0.03)
    assert fit_hand_over_s(steps(0.0, 1.0, 2.0), events) == pytest.approx(0.04)
    assert fit_hand_over_s(steps(0.0, 1.0), [write("a", 0.5)]) == 0.0


# Drives -------------------------------------------------------------------------------------------------------------


def test_a_drive_has_a_rate_alone_and_one_beside_the_other_direction() -> None:
    # A second of reads alone (100 bytes), one of both (60 and 20), and one of writes alone (50).
    transfers = [moved("read", 0.0, 1.0, 100), moved("read", 1.0, 2.0, 60)]
    transfers += [moved("write", 1.0, 2.0, 20), moved("write", 2.0, 3.0, 50)]
    (drive,) = fit_drives(steps(0.0, 3.0), transfers, ["/drive"])
    assert (drive.read_bytes_per_s, drive.write_bytes_per_s) == (pytest.approx(100), pytest.approx(50))
    assert drive.beside() == (pytest.approx(60), pytest.approx(20))
    # It takes as long for all of it as it did.
    assert drive.seconds(160, 70) <= 3.0


def test_what_both_directions_keep_counts_where_they_hinder_each_other() -> None:
    transfers = [moved("read", 0.0, 1.0, 100), moved("read", 1.0, 2.0, 20)]
    transfers += [moved("write", 1.0, 2.0, 10), moved("write", 2.0, 3.0, 50)]
    (drive,) = fit_drives(steps(0.0, 3.0), transfers, ["/drive"])
    assert drive.duplex == 0.0
    assert drive.beside() == (pytest.approx(20), pytest.approx(10))


def test_a_direction_that_is_not_faster_alone_has_one_rate() -> None:
    transfers = [moved("read", 0.0, 1.0, 50), moved("read", 1.0, 2.0, 100), moved("write", 1.0, 2.0, 30)]
    (drive,) = fit_drives(steps(0.0, 2.0), transfers, ["/drive"])
    assert drive.beside() == (pytest.approx(75), pytest.approx(30))
    assert (drive.read_bytes_per_s, drive.write_bytes_per_s, drive.duplex) == (pytest.approx(75), pytest.approx(30), 1)


def test_transfers_count_while_they_are_in_flight_and_inside_the_steps() -> None:
    # Half of the first read lies before the step; two reads at a time share what the drive gives.
    transfers = [moved("read", -1.0, 1.0, 200), moved("read", 2.0, 3.0, 40), moved("read", 2.0, 3.0, 60)]
    first, second = fit_drives(steps(0.0, 4.0), [*transfers, moved("write", 0.0, 2.0, 10, "/b")], ["/drive", "/b"])
    assert first.read_bytes_per_s == pytest.approx(100)  # in two seconds of four
    assert second.write_bytes_per_s == pytest.approx(5)
    assert first.write_bytes_per_s >= 1e15  # nothing was written to it


def test_drives_that_did_nothing_have_no_rate_to_bind() -> None:
    (drive,) = fit_drives(steps(0.0, 1.0), [], ["/drive"])
    assert min(drive.read_bytes_per_s, drive.write_bytes_per_s) >= 1e15
