from __future__ import annotations

import threading

import pytest

from storage.backends.cost import IoCost
from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.throttled import SystemClock, Throttle, ThrottledBackend
from storage.errors import ClosedError, ReadError
from storage.types import IoRequest, Op, Priority
from tests.storage.helpers import PAGE, WAIT_S, HeldBackend, StepClock, failure, finish, request

_MEMORY = memoryview(bytearray(PAGE))


class InstantBackend:
    """Completes at once; notes when, and can hold the first transfer back until told."""

    name = "instant"
    opens_direct = False
    progress = 0
    cost = IoCost()

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.served: list[tuple[IoRequest, float]] = []

    def submit(self, request: IoRequest) -> None:
        self.served.append((request, self.clock.now_s()))
        request.ticket.set_done()

    def promote(self, key: str) -> None:
        """Everything goes at once."""

    def in_flight(self) -> list[IoRequest]:
        return []

    def close(self) -> None:
        self.served = list(self.served)


def note_ends(requests: list[IoRequest], clock: StepClock) -> list[float]:
    """When requests end, filled as they do."""
    ends: list[float] = []
    for one in requests:
        one.ticket.add_done_callback(lambda _: ends.append(clock.now_s()))
    return ends


class BlockedClock(StepClock):
    """Sleeps only begin when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_sleep = threading.Event()

    def sleep(self, duration_s: float) -> None:
        assert self.may_sleep.wait(WAIT_S)
        super().sleep(duration_s)


def test_bytes_take_their_time_and_latencies_overlap() -> None:
    clock = BlockedClock()
    inner = InstantBackend(clock)
    backend = ThrottledBackend(inner, Throttle(PAGE, 2 * PAGE, latency_s=0.5), clock)
    reads = [request(Op.READ, _MEMORY) for _ in range(3)]
    ends = note_ends(reads, clock)
    for read in reads:
        backend.submit(read)
    assert len(backend.in_flight()) == 3
    clock.may_sleep.set()
    for read in reads:
        finish(read.ticket)
    assert ends == pytest.approx([1.5, 2.5, 3.5])
    backend.close()


def test_directions_have_rates_of_their_own() -> None:
    clock = StepClock()
    inner = InstantBackend(clock)
    backend = ThrottledBackend(inner, Throttle(PAGE, 2 * PAGE), clock)
    write = request(Op.WRITE, _MEMORY)
    backend.submit(write)
    finish(write.ticket)
    assert clock.now_s() == pytest.approx(0.5)
    read = request(Op.READ, _MEMORY)
    backend.submit(read)
    finish(read.ticket)
    assert clock.now_s() == pytest.approx(1.5)
    backend.close()


def test_what_somebody_waits_for_goes_first() -> None:
    clock = BlockedClock()
    inner = InstantBackend(clock)
    backend = ThrottledBackend(inner, Throttle(PAGE, PAGE), clock)
    first = request(Op.READ, _MEMORY, priority=Priority.DEMAND)
    ahead = request(Op.READ, _MEMORY, offset=PAGE, priority=Priority.READ_AHEAD)
    demand = request(Op.READ, _MEMORY, offset=2 * PAGE, priority=Priority.DEMAND)
    for read in (first, ahead, demand):
        backend.submit(read)
    clock.may_sleep.set()
    for read in (first, ahead, demand):
        finish(read.ticket)
    offsets = [one.offset for one, _ in inner.served]
    assert offsets.index(demand.offset) < offsets.index(ahead.offset)
    backend.close()


def test_closing_does_not_wait_for_a_slow_transfer() -> None:
    clock = SystemClock()
    backend = ThrottledBackend(InstantBackend(StepClock()), Throttle(1e-3, 1e-3), clock)
    reads = [request(Op.READ, _MEMORY) for _ in range(3)]
    for read in reads:
        backend.submit(read)
    backend.close()
    assert isinstance(failure(reads[-1].ticket), ClosedError)
    assert all(read.ticket.done for read in reads)
    with pytest.raises(ClosedError):
        backend.submit(reads[0])


@pytest.mark.parametrize("rates", [(0, 1, 0), (1, -1, 0), (1, 1, -1)])
def test_impossible_drives_are_refused(rates: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Throttle(*rates)


def test_a_real_drive_that_is_slower_than_the_modelled_one_ends_a_transfer() -> None:
    clock = StepClock()
    inner = HeldBackend(InstantBackend(clock))
    backend = ThrottledBackend(inner, Throttle(PAGE, PAGE), clock)
    reads = [request(Op.READ, _MEMORY, offset=number * PAGE) for number in range(2)]
    for read in reads:
        backend.submit(read)
    inner.wait_for(2)  # the model goes on; both are with the real drive, which has not moved them
    assert not any(read.ticket.done for read in reads)
    assert sorted(one.offset for one in backend.in_flight()) == [0, PAGE]
    inner.let_go(1)
    finish(reads[1].ticket)
    assert not reads[0].ticket.done
    backend.close()
    assert isinstance(failure(reads[0].ticket), ClosedError)


def test_errors_of_the_real_drive_pass_through() -> None:
    clock = StepClock()
    faulty = FaultyBackend(InstantBackend(clock))
    faulty.inject(Fault.IO_ERROR)
    backend = ThrottledBackend(faulty, Throttle(PAGE, PAGE), clock)
    read = request(Op.READ, _MEMORY)
    backend.submit(read)
    assert isinstance(failure(read.ticket), ReadError)
    assert backend.in_flight() == []
    backend.close()
