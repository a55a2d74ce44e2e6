"""Faults on purpose: wraps any backend and makes chosen transfers go wrong. A public tool for tests.

faults = []                                     # the wrapped backends, one per drive
def wrap(backend):
    faults.append(FaultyBackend(backend))
    return faults[-1]

store = ShardStore.open([folder], capacity, wrap_backend=wrap)
faults[0].inject(Fault.NO_SPACE, op=Op.WRITE, times=1)
faults[0].inject(Fault.SLOW, when=lambda request: len(request.memory) > 1 << 20, skip=3, delay_s=0.2)
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from storage.align import PAGE_NBYTES, align_down
from storage.backends.base import Backend
from storage.backends.system import io_error, short_error
from storage.backends.throttled import Clock, SystemClock
from storage.backends.wrapper import BackendWrapper
from storage.errors import ClosedError
from storage.types import IoRequest, Op, Ticket

_LONGEST_SLEEP_S = 0.05  # so that `close` does not wait for a late transfer
_JOIN_TIMEOUT_S = 30.0


class Fault(Enum):
    """What goes wrong with a transfer."""

    IO_ERROR = "EIO: the first half of the bytes has moved"
    NO_SPACE = "ENOSPC (for reads EIO): the first half of the bytes has moved"
    SHORT = "the transfer ends after its first half and cannot be resumed"
    STUCK = "the device does not answer until `release_stuck`, or until the backend is closed"
    SLOW = "a latency spike: the transfer starts `delay_s` late, and others overtake it"
    TORN = "only the first half of the bytes moves, and nobody says so"
    BIT_FLIP = "one bit of the data is wrong, and nobody says so"


@dataclass(slots=True, eq=False)
class Injection:
    """A fault that waits for its transfers.

    Attributes:
        op, key, when: which transfers have to match all three; None for any.
        skip: how many of them pass before.
        times: how many it hits; None for all.
        delay_s: how late a SLOW one starts.
        hits: how many it has hit.
    """

    fault: Fault
    op: Op | None = None
    key: str | None = None
    skip: int = 0
    times: int | None = 1
    when: Callable[[IoRequest], bool] | None = None
    delay_s: float = 0.1
    hits: int = 0

    def matches(self, request: IoRequest) -> bool:
        """Whether it hits this transfer; counts those it lets pass. Guarded by its backend's lock."""
        is_meant = (self.op is None or self.op is request.op) and (self.key is None or self.key == request.key)
        is_meant = is_meant and (self.when is None or self.when(request))
        if not is_meant or (self.times is not None and self.hits >= self.times):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class FaultyBackend(BackendWrapper):
    """Passes transfers on to `inner`, except those a fault was injected for. Thread safe; closes `inner`.

    Args:
        inner: does the transfers.
        clock: what late transfers wait with.
    """

    def __init__(self, inner: Backend, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._clock = clock or SystemClock()
        self._injections: list[Injection] = []
        self._stuck: list[IoRequest] = []
        self._late: list[IoRequest] = []
        self._late_threads: list[threading.Thread] = []
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"faulty {self._inner.name}"

    def inject(
        self,
        fault: Fault,
        *,
        op: Op | None = None,
        key: str | None = None,
        when: Callable[[IoRequest], bool] | None = None,
        skip: int = 0,
        times: int | None = 1,
        delay_s: float = 0.1,
    ) -> Injection:
        """Let transfers to come go wrong; the answer counts them. Of several injections the first that matches hits.

        `when` is called under this backend's lock: it must be quick, and must not use the backend.

        Raises:
            ValueError: `delay_s` is negative.
        """
        if delay_s < 0:
            raise ValueError(f"delay_s is {delay_s}; it must not be negative")
        injection = Injection(fault, op, key, skip, times, when, delay_s)
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Nothing goes wrong any more; what is stuck stays stuck."""
        with self._lock:
            self._injections.clear()

    def stuck(self) -> list[IoRequest]:
        """The transfers that the device does not answer for."""
        with self._lock:
            return list(self._stuck)

    def release_stuck(self) -> None:
        """The device answers again: what was stuck is served."""
        with self._lock:
            released, self._stuck = self._stuck, []
        for request in released:
            self._pass_on(request)

    def submit(self, request: IoRequest) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            injection = next((one for one in self._injections if one.matches(request)), None)
            fault = injection.fault if injection is not None else None
            if fault is Fault.STUCK:
                self._stuck.append(request)
            elif injection is not None and fault is Fault.SLOW:
                self._start_late(request, injection.delay_s)
        match fault:
            case None:
                self._inner.submit(request)
            case Fault.BIT_FLIP:
                self._submit_flipped(request)
            case Fault.IO_ERROR | Fault.NO_SPACE | Fault.SHORT | Fault.TORN:
                self._submit_half(request, fault)

    def in_flight(self) -> list[IoRequest]:
        with self._lock:
            waiting = [*self._stuck, *self._late]
        return waiting + self._inner.in_flight()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            stuck, self._stuck = self._stuck, []
            late, self._late = self._late, []
            threads, self._late_threads = self._late_threads, []
        for request in [*stuck, *late]:
            request.ticket.set_exception(ClosedError("the I/O backend was closed while the device was stuck"))
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)
        self._inner.close()

    def _pass_on(self, request: IoRequest) -> None:
        """Submit where nobody is left to be told of an error but the ticket."""
        try:
            self._inner.submit(request)
        except Exception as error:
            request.ticket.set_exception(error)

    def _start_late(self, request: IoRequest, delay_s: float) -> None:
        due_s = self._clock.now_s() + delay_s
        thread = threading.Thread(
            target=self._serve_late, args=(request, due_s), name="infinity-faulty-late", daemon=True
        )
        self._late.append(request)
        self._late_threads = [*filter(threading.Thread.is_alive, self._late_threads), thread]
        thread.start()

    def _serve_late(self, request: IoRequest, due_s: float) -> None:
        while (left_s := due_s - self._clock.now_s()) > 0 and not self._is_closed:
            self._clock.sleep(min(left_s, _LONGEST_SLEEP_S))
        with self._lock:
            if self._is_closed:
                return
            self._late.remove(request)
        self._pass_on(request)

    def _submit_half(self, request: IoRequest, fault: Fault) -> None:
        half = align_down(len(request.memory) // 2, PAGE_NBYTES)

        def end(ticket: Ticket) -> None:
            error = ticket.exception or (_checked(request) if fault is Fault.TORN else _error(request, half, fault))
            request.ticket.complete(error)

        if not half:
            end(Ticket.completed())
            return
        part = replace(request, memory=request.memory[:half], ticket=Ticket(request.ticket.label), check=None)
        part.ticket.add_done_callback(end)
        self._inner.submit(part)

    def _submit_flipped(self, request: IoRequest) -> None:
        memory = request.memory
        if request.op is Op.WRITE:
            # The caller's memory stays as it is: only what reaches the disk is wrong.
            memory = memoryview(mmap.mmap(-1, len(request.memory)))
            memory[:] = request.memory
            _flip(memory)
        # What is checked is what the caller has in its memory: before the flip of a write, after the flip of a read.
        check = request.check if request.op is Op.WRITE else None
        part = replace(request, memory=memory, ticket=Ticket(request.ticket.label), check=check)

        def end(ticket: Ticket) -> None:
            error = ticket.exception
            if error is None and request.op is Op.READ:
                _flip(request.memory)
                error = _checked(request)
            request.ticket.complete(error)

        part.ticket.add_done_callback(end)
        self._inner.submit(part)


def _checked(request: IoRequest) -> Exception | None:
    try:
        if request.check is not None:
            request.check(0, len(request.memory))
    except Exception as error:  # the ticket carries it
        return error
    return None


def _flip(memory: memoryview) -> None:
    memory[len(memory) // 2] ^= 1


def _error(request: IoRequest, start: int, fault: Fault) -> Exception:
    stop = len(request.memory)
    if fault is Fault.SHORT:
        return short_error(request, start, stop)
    is_full = fault is Fault.NO_SPACE and request.op is Op.WRITE
    return io_error(request, start, stop, OSError(errno.ENOSPC if is_full else errno.EIO, ""))
