"""The faulty backend as a tool: rules by predicate and count, late transfers, and no ticket lost by the tool itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from storage.backends.cost import IoCost
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import ClosedError, ReadError
from storage.pool import HostPool
from storage.types import IoRequest, Op, Priority, Ticket

_NBYTES = 8192
_WAIT_S = 100.0


class InstantBackend:
    """Completes everything at once, or refuses it."""

    name = "instant"
    opens_direct = False
    progress = 0
    cost = IoCost()

    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.served: list[IoRequest] = []

    def submit(self, request: IoRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.served.append(request)
        request.ticket.set_done()

    def promote(self, key: str) -> None:
        """Everything goes at once."""

    def in_flight(self) -> list[IoRequest]:
        return []

    def close(self) -> None:
        self.refusal = ClosedError("closed")


class HeldClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._changed = threading.Condition()

    def now_s(self) -> float:
        with self._changed:
            return self._now_s

    def sleep(self, duration_s: float) -> None:
        with self._changed:
            end_s = self._now_s + duration_s
            self._changed.wait_for(lambda: self._now_s >= end_s, _WAIT_S)

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()


@pytest.fixture
def memory() -> Iterator[memoryview]:
    pool = HostPool(_NBYTES)
    with pool.lease(_NBYTES, "test") as lease:
        yield lease.memory
    pool.close()


def _read(memory: memoryview, key: str = "a", offset: int = 0) -> IoRequest:
    return IoRequest(
        op=Op.READ, fd=-1, path="file", offset=offset, memory=memory, priority=Priority.DEMAND, key=key, ticket=Ticket()
    )


def test_rule_chooses_by_predicate_skip_and_count(memory: memoryview) -> None:
    faulty = FaultyBackend(InstantBackend())
    injection = faulty.inject(Fault.IO_ERROR, when=lambda request: request.offset >= 8192, skip=1, times=2)
    requests = [_read(memory, offset=offset) for offset in (0, 8192, 16384, 0, 24576, 32768)]
    for request in requests:
        faulty.submit(request)
    failed = [request.offset for request in requests if request.ticket.exception is not None]
    assert failed == [16384, 24576]
    assert injection.hits == 2
    assert isinstance(requests[2].ticket.exception, ReadError)
    faulty.close()


def test_predicate_adds_to_operation_and_key(memory: memoryview) -> None:
    faulty = FaultyBackend(InstantBackend())
    faulty.inject(Fault.IO_ERROR, key="b", when=lambda request: request.offset == 0, times=None)
    for key, offset, fails in [("a", 0, False), ("b", 8192, False), ("b", 0, True)]:
        request = _read(memory, key, offset)
        faulty.submit(request)
        assert (request.ticket.exception is not None) == fails
    faulty.close()


def test_releasing_into_a_backend_that_refuses_loses_no_ticket(memory: memoryview) -> None:
    inner = InstantBackend()
    faulty = FaultyBackend(inner)
    faulty.inject(Fault.STUCK, times=None)
    requests = [_read(memory) for _ in range(3)]
    for request in requests:
        faulty.submit(request)
    inner.refusal = ClosedError("the device is gone")
    faulty.release_stuck()
    assert [request.ticket.exception for request in requests] == [inner.refusal] * 3
    faulty.close()


def test_late_transfer_is_served_after_its_delay(memory: memoryview) -> None:
    clock, inner = HeldClock(), InstantBackend()
    faulty = FaultyBackend(inner, clock=clock)
    faulty.inject(Fault.SLOW, delay_s=0.5)
    late, prompt = _read(memory), _read(memory)
    faulty.submit(late)
    faulty.submit(prompt)
    assert inner.served == [prompt]  # others overtake it
    assert faulty.in_flight() == [late]
    while not late.ticket.done:
        clock.advance(0.05)
    assert clock.now_s() >= 0.5
    assert late.ticket.exception is None
    assert inner.served == [prompt, late]
    faulty.close()


def test_closing_does_not_wait_for_a_late_transfer(memory: memoryview) -> None:
    faulty = FaultyBackend(InstantBackend())
    faulty.inject(Fault.SLOW, delay_s=3600.0)
    late = _read(memory)
    faulty.submit(late)
    faulty.close()
    assert isinstance(late.ticket.exception, ClosedError)
    assert faulty.in_flight() == []


def test_completion_of_a_late_transfer_may_close(memory: memoryview) -> None:
    faulty = FaultyBackend(InstantBackend())
    faulty.inject(Fault.SLOW, delay_s=0.0)
    late, closed = _read(memory), threading.Event()

    def close(_: Ticket) -> None:
        faulty.close()
        closed.set()

    late.ticket.add_done_callback(close)
    faulty.submit(late)
    assert closed.wait(_WAIT_S)
    assert late.ticket.exception is None


def test_negative_delay_is_refused() -> None:
    faulty = FaultyBackend(InstantBackend())
    with pytest.raises(ValueError, match="delay_s is -1"):
        faulty.inject(Fault.SLOW, delay_s=-1)
    faulty.close()
