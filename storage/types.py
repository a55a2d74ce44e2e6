"""The contract of the storage layer in one place: extents, requests, priorities, tickets."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

_log = logging.getLogger(__name__)


class Priority(IntEnum):
    """What goes first; lower overtakes higher."""

    DEMAND = 0  # somebody waits for it now
    READ_AHEAD = 1
    WRITE = 2

    __hash__ = int.__hash__  # as a key of dicts, several times per transfer: that of enums is a function in Python


class Op(StrEnum):
    """Direction of a transfer."""

    READ = "read"
    WRITE = "write"

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Extent:
    """A span of one drive's swap file, in bytes."""

    drive: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte of the file behind its last one."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class TrafficTag:
    """Who asked for a transfer: shard kind ("param", "grad", "state", …) and step (-1 is initialisation)."""

    kind: str
    step: int


class Ticket:
    """Something in flight. Completed exactly once, by any thread; carries its exception.

    A ready ticket costs a flag check. It can be waited for by a thread (`wait`), awaited on any asyncio loop, or
    watched with a callback.
    """

    __slots__ = ("_callbacks", "_event", "_lock", "done", "exception", "label")

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.done = False
        self.exception: BaseException | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []
        self._event: threading.Event | None = None
        self._lock = threading.Lock()

    def set_done(self) -> None:
        """Complete successfully. Only the first completion counts."""
        self.complete(None)

    def set_exception(self, exception: BaseException) -> None:
        """Complete with an exception. Only the first completion counts."""
        self.complete(exception)

    def complete(self, exception: BaseException | None) -> None:
        """Complete in either way: successfully when there is no exception. Only the first completion counts."""
        with self._lock:
            if self.done:
                return
            self.exception = exception
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
            event = self._event
        if event is not None:
            event.set()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Ticket], None]) -> None:
        # The completing thread serves everybody: a broken callback must not end it, nor keep the next from its turn.
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of %s failed", self.label or "a ticket")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until done or until the time is over; whether it is done. Does not raise the exception."""
        if self.done:
            return True
        with self._lock:
            if self.done:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout_s)

    def result(self) -> None:
        """Raise the exception, if any.

        Raises:
            RuntimeError: the ticket is not done.
        """
        if not self.done:
            raise RuntimeError(f"{self.label or 'the ticket'} is not done yet")
        if self.exception is not None:
            raise self.exception

    def add_done_callback(self, function: Callable[[Ticket], None]) -> None:
        """Call `function(ticket)` in the completing thread, or at once when done."""
        with self._lock:
            if not self.done:
                self._callbacks.append(function)
                return
        function(self)

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self.add_done_callback(lambda _: _wake(loop, future))
            yield from future.__await__()
        self.result()

    @staticmethod
    def completed(label: str = "") -> Ticket:
        """A ticket that is done."""
        ticket = Ticket(label)
        ticket.set_done()
        return ticket

    @staticmethod
    def all_of(tickets: Iterable[Ticket], label: str = "") -> Ticket:
        """A ticket that is done when all are; it carries the first exception, in order of completion."""
        pending = list(tickets)
        joined = Ticket(label)
        if not pending:
            joined.set_done()
            return joined
        join = _Join(joined, len(pending))
        for ticket in pending:
            ticket.add_done_callback(join)
        return joined

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self.exception is not None else "done"
        return f"{type(self).__name__}({self.label!r}, {state})"


class _Join:
    """Counts completions of several tickets."""

    def __init__(self, joined: Ticket, count: int) -> None:
        self._joined = joined
        self._count = count
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, ticket: Ticket) -> None:
        with self._lock:
            self._count -= 1
            self._error = self._error or ticket.exception
            is_last = self._count == 0
        if is_last:
            self._joined.complete(self._error)


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        # The loop was closed while the transfer was in flight: nobody awaits the future any more.
        return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(slots=True, eq=False)
class IoRequest:
    """One contiguous transfer between memory and a file. The backend completes `ticket`.

    `memory` (bytes) is page aligned and its length, like `offset`, a multiple of 4 KiB. The backend's threads call
    `check(start, stop)` when bytes `start` to `stop` of the memory have moved; what it raises fails the transfer.
    """

    op: Op
    fd: int
    path: str
    offset: int
    memory: memoryview
    priority: Priority
    key: str
    ticket: Ticket = field(default_factory=Ticket)
    check: Callable[[int, int], None] | None = None
