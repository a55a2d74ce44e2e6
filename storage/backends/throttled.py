"""A slower device: wraps any backend and lets it move no more bytes per second than a modelled drive would.

Reads and writes have a channel each, which serves one transfer after the other in order of priority. A transfer waits
its latency first; the latencies of queued transfers overlap, as on a drive with a deep queue. The bytes move while the
modelled drive is busy with them, so what the real one needs is not added to it. With a clock whose time is virtual, the
model costs no time at all.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass, replace
from typing import Protocol

from storage.backends.base import Backend
from storage.backends.wrapper import BackendWrapper
from storage.errors import ClosedError
from storage.types import IoRequest, Op, Priority, Ticket

_LONGEST_SLEEP_S = 0.05  # so that `close` does not wait for a long transfer
_JOIN_TIMEOUT_S = 30.0


class Clock(Protocol):
    """Where the model gets its time from."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def sleep(self, duration_s: float) -> None:
        """Return when `duration_s` has passed."""


class SystemClock:
    """The machine's time."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


@dataclass(frozen=True, slots=True)
class Throttle:
    """What a drive can do: bytes per second in each direction, and seconds before a transfer begins.

    Raises:
        ValueError: a rate is not positive, or the latency negative.
    """

    read_nbytes_per_s: float
    write_nbytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.read_nbytes_per_s <= 0 or self.write_nbytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"rates must be positive and the latency not negative: {self}")

    def nbytes_per_s(self, op: Op) -> float:
        return self.read_nbytes_per_s if op is Op.READ else self.write_nbytes_per_s


class ThrottledBackend(BackendWrapper):
    """Ends transfers when the modelled drive would have, or when `inner` has, if that is later.

    Thread safe; closes `inner`.
    """

    def __init__(self, inner: Backend, throttle: Throttle, clock: Clock | None = None) -> None:
        super().__init__(inner)
        clock = clock or SystemClock()
        self._channels = {op: _Channel(inner, throttle, op, clock) for op in Op}

    @property
    def name(self) -> str:
        return f"throttled {self._inner.name}"

    def promote(self, key: str) -> None:
        for channel in self._channels.values():
            channel.promote(key)
        self._inner.promote(key)

    def submit(self, request: IoRequest) -> None:
        self._channels[request.op].put(request)

    def in_flight(self) -> list[IoRequest]:
        waiting = [request for channel in self._channels.values() for request in channel.requests()]
        moving = [channel.moving() for channel in self._channels.values()]  # once, whoever has it
        return waiting + [request for request in self._inner.in_flight() if request.ticket not in moving]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._inner.close()


class _Channel:
    """One direction: a thread that takes transfers in order of priority and sleeps as long as they would take."""

    def __init__(self, inner: Backend, throttle: Throttle, op: Op, clock: Clock) -> None:
        self._inner = inner
        self._nbytes_per_s = throttle.nbytes_per_s(op)
        self._latency_s = throttle.latency_s
        self._clock = clock
        self._waiting: list[tuple[int, int, float, IoRequest]] = []  # heap by priority, then arrival
        self._numbers = itertools.count()
        self._served: tuple[IoRequest, Ticket] | None = None  # and when `inner` has moved it
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._serve, name=f"infinity-throttle-{op.value}", daemon=True)
        self._thread.start()

    def put(self, request: IoRequest) -> None:
        begins_s = self._clock.now_s() + self._latency_s
        with self._changed:
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            heapq.heappush(self._waiting, (int(request.priority), next(self._numbers), begins_s, request))
            self._changed.notify()

    def promote(self, key: str) -> None:
        with self._changed:
            demand = int(Priority.DEMAND)
            self._waiting = [(demand if entry[-1].key == key else entry[0], *entry[1:]) for entry in self._waiting]
            heapq.heapify(self._waiting)

    def requests(self) -> list[IoRequest]:
        with self._changed:
            served = [self._served[0]] if self._served is not None else []
            return served + [entry[-1] for entry in self._waiting]

    def moving(self) -> Ticket | None:
        """The ticket that `inner` has for the transfer that the modelled drive is busy with."""
        with self._changed:
            return self._served[1] if self._served is not None else None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            dropped, self._waiting = [entry[-1] for entry in self._waiting], []
            self._changed.notify()
        for request in dropped:
            request.ticket.set_exception(ClosedError("the I/O backend was closed before the transfer was served"))
        if self._thread is not threading.current_thread():  # a completion's callback may close
            self._thread.join(_JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        free_s = self._clock.now_s()
        while (entry := self._take()) is not None:
            begins_s, request, moved = entry
            try:
                self._inner.submit(replace(request, ticket=moved))
            except Exception as error:  # the ticket carries it
                moved.set_exception(error)
            free_s = max(free_s, begins_s) + len(request.memory) / self._nbytes_per_s
            self._sleep_until(free_s)
            with self._changed:
                self._served = None
            moved.add_done_callback(_Passed(request.ticket))
            del entry, request, moved

    def _take(self) -> tuple[float, IoRequest, Ticket] | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            _, _, begins_s, request = heapq.heappop(self._waiting)
            moved = Ticket(request.ticket.label)
            self._served = request, moved
            return begins_s, request, moved

    def _sleep_until(self, when_s: float) -> None:
        while (left_s := when_s - self._clock.now_s()) > 0 and not self._is_closed:
            self._clock.sleep(min(left_s, _LONGEST_SLEEP_S))


@dataclass(frozen=True, slots=True)
class _Passed:
    """Callback that completes another ticket in the same way."""

    ticket: Ticket

    def __call__(self, ended: Ticket) -> None:
        self.ticket.complete(ended.exception)
