"""What the tests of the storage layer share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from storage.backends.base import Backend
from storage.backends.wrapper import BackendWrapper
from storage.errors import ClosedError
from storage.pool import HostPool, Lease
from storage.types import IoRequest, Op, Priority, Ticket, TrafficTag

PAGE = 4096
MIB = 1 << 20
TAG = TrafficTag("param", 1)
WAIT_S = 100.0


def finish(ticket: Ticket) -> None:
    """Wait for a ticket and raise what it carries."""
    assert ticket.wait(WAIT_S), f"{ticket} never ended"
    ticket.result()


def failure(ticket: Ticket) -> BaseException:
    """What a ticket fails with."""
    assert ticket.wait(WAIT_S), f"{ticket} never ended"
    assert ticket.exception is not None
    return ticket.exception


def assert_like(found: BaseException, error: BaseException) -> None:
    """The same error told again: what was kept of it holds no frames, so it is an object of its own."""
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))
    assert getattr(found, "errno", None) == getattr(error, "errno", None)


def filled(pool: HostPool, nbytes: int, seed: int) -> Lease:
    """Page-aligned memory with bytes that depend on `seed`."""
    lease = pool.lease(nbytes, f"seed {seed}")
    lease.array("u1")[:] = pattern(nbytes, seed)
    return lease


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def request(
    op: Op, memory: memoryview, *, fd: int = -1, offset: int = 0, priority: Priority | None = None
) -> IoRequest:
    if priority is None:
        priority = Priority.READ_AHEAD if op is Op.READ else Priority.WRITE
    return IoRequest(op=op, fd=fd, path="file", offset=offset, memory=memory, priority=priority, key="key")


class HeldBackend(BackendWrapper):
    """Keeps what is submitted until the test lets it go on to the wrapped backend."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.held: list[IoRequest] = []
        self.promoted: list[str] = []
        self._is_closed = False
        self._arrived = threading.Condition()

    name = "held"

    def promote(self, key: str) -> None:
        self.promoted.append(key)
        self._inner.promote(key)

    def submit(self, request: IoRequest) -> None:
        with self._arrived:
            if self._is_closed:
                raise ClosedError("closed")
            self.held.append(request)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.held) >= count, WAIT_S)

    def let_go(self, index: int = 0) -> None:
        self._inner.submit(self.held.pop(index))

    def in_flight(self) -> list[IoRequest]:
        return list(self.held) + self._inner.in_flight()

    def close(self) -> None:
        self._is_closed = True
        dropped, self.held = self.held, []
        for held in dropped:
            held.ticket.set_exception(ClosedError("closed"))
        self._inner.close()


class StepClock:
    """Time that passes when somebody sleeps, and counts how long they did."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._lock = threading.Lock()

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        with self._lock:
            self.time_s += duration_s


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` on several threads at once; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(number: int) -> None:
        try:
            barrier.wait(WAIT_S)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
