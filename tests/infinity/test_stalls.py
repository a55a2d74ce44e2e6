"""Waits of the training thread: they end for want of progress, never for taking long, and every second has a cause."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from infinity.errors import PlacementError
from infinity.observe.shortages import report_of
from infinity.observe.stalls import Stall, StallCause, StallClock
from storage.errors import CapacityError, IoTimeoutError, ReadError, SwapFullError
from storage.types import Ticket

TIMEOUT_S = 0.05


def constant() -> int:
    return 7


def clock(progress: Callable[[], int] = constant, on_stall: Callable[[Stall], None] | None = None) -> StallClock:
    return StallClock(TIMEOUT_S, progress, lambda: "where everything is", on_stall)


def progress_then(finish: Callable[[], None], looks: int) -> Callable[[], int]:
    """A counter that has moved at every look; at the last one `finish` is called."""
    numbers: Iterator[int] = itertools.count()

    def progress() -> int:
        number = next(numbers)
        if number == looks:
            finish()
        return number

    return progress


def test_a_ready_ticket_costs_nothing() -> None:
    stalls = clock(progress=lambda: pytest.fail("nobody has to look"))
    stalls.wait(Ticket.completed("ready"), StallCause.NVME_READ)
    assert stalls.counts[StallCause.NVME_READ] == 0
    assert stalls.total_s == 0.0


def test_slow_is_not_stuck() -> None:
    ticket = Ticket("slow read")
    stalls = clock(progress_then(ticket.set_done, looks=6))
    stalls.wait(ticket, StallCause.NVME_READ)
    assert stalls.total_s >= 5 * TIMEOUT_S  # five looks, one timeout apart: far longer than it may stand still
    assert stalls.counts[StallCause.NVME_READ] == 1


def test_any_change_is_progress() -> None:
    ticket = Ticket("read of another store")
    values = iter([3, 2, 1, 0])

    def progress() -> int:
        value = next(values)
        if value == 0:
            ticket.set_done()
        return value

    clock(progress).wait(ticket, StallCause.NVME_READ)
    assert ticket.done


def test_standing_still_is_a_timeout_with_a_report() -> None:
    with pytest.raises(IoTimeoutError) as caught:
        clock().wait(Ticket("shard blocks.3"), StallCause.GRADIENT_READ)
    text = str(caught.value)
    assert "no transfer made progress for 0.05 s while waiting for shard blocks.3 (gradient_read)" in text
    assert "raise nvme.io_timeout_s" in text
    report = report_of(caught.value)
    assert report is not None
    assert report.endswith("\nwhere everything is")


def test_standing_still_after_progress_is_a_timeout() -> None:
    numbers = itertools.chain(range(4), itertools.repeat(4))
    stalls = clock(lambda: next(numbers))
    with pytest.raises(IoTimeoutError):
        stalls.wait(Ticket("stuck"), StallCause.NVME_WRITE)
    assert stalls.seconds[StallCause.NVME_WRITE] >= 4 * TIMEOUT_S


def test_the_report_is_made_only_for_a_timeout() -> None:
    reports: list[int] = []
    ticket = Ticket("read")
    stalls = StallClock(
        TIMEOUT_S,
        progress_then(ticket.set_done, looks=2),
        lambda: reports.append(1) or "report",  # type: ignore[func-returns-value]
    )
    stalls.wait(ticket, StallCause.NVME_READ)
    assert reports == []
    with pytest.raises(IoTimeoutError):
        StallClock(TIMEOUT_S, constant, lambda: reports.append(1) or "report").wait(  # type: ignore[func-returns-value]
            Ticket("stuck"), StallCause.NVME_READ
        )
    assert reports == [1]


def test_seconds_add_up_by_cause() -> None:
    seen: list[Stall] = []
    causes = [StallCause.NVME_READ, StallCause.OPTIMIZER, StallCause.NVME_READ]
    stalls = StallClock(TIMEOUT_S, constant, str, seen.append)
    for number, cause in enumerate(causes):
        with pytest.raises(IoTimeoutError):
            stalls.wait(Ticket(f"stuck {number}"), cause)
    assert [(stall.cause.value, stall.waited_for) for stall in seen] == [
        ("nvme_read", "stuck 0"),
        ("optimizer", "stuck 1"),
        ("nvme_read", "stuck 2"),
    ]
    assert stalls.recent == seen
    for cause in StallCause:
        of_cause = [stall.duration_s for stall in seen if stall.cause is cause]
        assert stalls.counts[cause] == len(of_cause)
        assert stalls.seconds[cause] == sum(of_cause)
        assert all(duration_s >= TIMEOUT_S for duration_s in of_cause)
    assert stalls.total_s == pytest.approx(sum(stall.duration_s for stall in seen))
    starts = [stall.start_s for stall in seen]
    assert starts == sorted(starts)


def test_only_the_last_waits_are_kept() -> None:
    stalls = clock()
    for _ in range(100):
        with stalls.charged(StallCause.RANKS):
            pass
    assert stalls.counts[StallCause.RANKS] == 100
    assert len(stalls.recent) == 10


@pytest.mark.parametrize("error", [CapacityError("full"), SwapFullError("full"), PlacementError("no room")])
def test_errors_of_capacity_carry_the_report_once(error: Exception) -> None:
    failed = Ticket("demand of blocks.3")
    failed.set_exception(error)
    stalls = clock()
    for _ in range(2):
        with pytest.raises(type(error)):
            stalls.wait(failed, StallCause.NVME_READ)
    with pytest.raises(type(error)), stalls.reporting():
        raise error
    assert error.__notes__ == ["Where everything was (engine.report()):\nwhere everything is"]


def test_other_errors_carry_no_report() -> None:
    failed = Ticket("read")
    failed.set_exception(ReadError("cannot read blocks.3"))
    with pytest.raises(ReadError) as caught:
        clock().wait(failed, StallCause.NVME_READ)
    assert report_of(caught.value) is None


def test_what_went_wrong_with_the_ticket_is_raised() -> None:
    error = ReadError("cannot read blocks.3")
    failed = Ticket("read")
    failed.set_exception(error)
    stalls = clock()
    with pytest.raises(ReadError) as caught:
        stalls.wait(failed, StallCause.NVME_READ)
    assert caught.value is error
    assert stalls.counts[StallCause.NVME_READ] == 0


def test_a_ticket_that_fails_during_the_wait_is_raised_and_counted() -> None:
    error = ReadError("cannot read blocks.3")
    ticket = Ticket("read")
    stalls = clock(progress_then(lambda: ticket.set_exception(error), looks=1))
    with pytest.raises(ReadError) as caught:
        stalls.wait(ticket, StallCause.LINK)
    assert caught.value is error
    assert stalls.counts[StallCause.LINK] == 1


def test_a_failed_ticket_is_settled() -> None:
    ticket = Ticket("write")
    stalls = clock(progress_then(lambda: ticket.set_exception(ReadError("lost")), looks=1))
    stalls.settle(ticket, StallCause.NVME_WRITE)
    stalls.settle(ticket, StallCause.NVME_WRITE)
    assert stalls.counts[StallCause.NVME_WRITE] == 1


def test_a_check_ends_a_wait_that_has_become_hopeless() -> None:
    stalls = clock(progress_then(lambda: None, looks=0))

    def check() -> None:
        raise InterruptedError("the update failed")

    with pytest.raises(InterruptedError, match="the update failed"):
        stalls.wait(Ticket("update"), StallCause.OPTIMIZER, check)
    assert stalls.counts[StallCause.OPTIMIZER] == 1
    assert stalls.seconds[StallCause.OPTIMIZER] > 0


def test_a_failing_progress_counter_does_not_lose_the_stall() -> None:
    def progress() -> int:
        raise KeyboardInterrupt

    stalls = clock(progress)
    with pytest.raises(KeyboardInterrupt):
        stalls.wait(Ticket("read"), StallCause.NVME_READ)
    assert stalls.counts[StallCause.NVME_READ] == 1


def test_a_wait_within_a_charged_block_counts_once() -> None:
    stalls, started_s = clock(), time.perf_counter()
    with stalls.charged(StallCause.RANKS), pytest.raises(IoTimeoutError):
        stalls.wait(Ticket("write of blocks.3"), StallCause.NVME_WRITE)
    elapsed_s = time.perf_counter() - started_s
    assert stalls.seconds[StallCause.NVME_WRITE] >= TIMEOUT_S
    assert stalls.total_s <= elapsed_s
    assert sum(stall.duration_s for stall in stalls.recent) <= elapsed_s
