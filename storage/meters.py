"""How fast each drive is: bytes that have moved, and the time in which something was in flight, by drive and direction.

The speed of a drive is measured while enough is in flight to keep it busy, in windows of a fraction of a second; the
newest window counts as much as all before it. A drive that stops answering completes nothing, so there is also a bound
that needs no completion: it cannot have moved more than it was given.

[Note: latency is no speed] A drive that gets one transfer at a time shows its speed and its latency together, and would
get less than its share for it, so that it never gets more than one at a time. Where transfers queue, latencies overlap:
from the end of one to the end of the next only the next has moved, if it was there already when the one before both
ended. Only such ends tell the speed. A drive without a queue beside one that has one is therefore taken for faster than
it looks, by a little more in every window, until it has enough to do and shows its speed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from storage.shares import Measured
from storage.types import Op

_LOADED_NBYTES = 1 << 20  # with less than that in flight, a drive shows its latency, not its speed
_WINDOW_S = 0.25
_WINDOW_NBYTES = 8 << 20  # a window is over when it is long enough and this much has moved,
_LONGEST_WINDOW_S = 1.0  # or after this time
_NEWEST = 0.5  # weight of the newest window
_QUEUED_SHARE = 0.5  # of a window; with less the drive is idle now and then
_GROWTH, _MOST_GROWTH = 1.0625, 2.0  # of what a drive shows that is idle now and then: in a window, and altogether
# When so much was moved since a drive's last window, it is measured again: it may have recovered, but a drive that is
# given nothing would never show it.
_STALE_NBYTES = 4 << 30


@dataclass(slots=True)
class _Window:
    """What has moved since the last measurement, and the time in which enough was in flight.

    Attributes:
        queued_nbytes, queued_s: of it, from end to end of transfers that had to wait for others.
    """

    nbytes: int = 0
    seconds: float = 0.0
    queued_nbytes: int = 0
    queued_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return (self.seconds >= _WINDOW_S and self.nbytes >= _WINDOW_NBYTES) or self.seconds >= _LONGEST_WINDOW_S

    @property
    def is_queued(self) -> bool:
        """Whether the drive had enough to do; see [Note: latency is no speed]."""
        return self.queued_s >= _QUEUED_SHARE * self.seconds

    @property
    def nbytes_per_s(self) -> float:
        return self.queued_nbytes / self.queued_s if self.is_queued else self.nbytes / self.seconds


@dataclass(slots=True)
class _Channel:
    """One direction of one drive.

    Attributes:
        is_queued: what the last window was; None before there was one.
        has_followers: whether two transfers were in flight after the last end, and after the one before.
    """

    nbytes: int = 0
    busy_s: float = 0.0
    in_flight: int = 0
    in_flight_nbytes: int = 0
    seen_s: float = 0.0
    ended_s: float = 0.0
    window: _Window = field(default_factory=_Window)
    nbytes_per_s: float | None = None
    is_queued: bool | None = None
    has_followers: tuple[bool, bool] = (False, False)
    measured_at_nbytes: int = 0  # what all drives had moved at the end of the last window

    @property
    def is_loaded(self) -> bool:
        return self.in_flight_nbytes >= _LOADED_NBYTES

    def advance(self, now_s: float) -> None:
        passed_s, self.seen_s = now_s - self.seen_s, now_s
        if self.in_flight:
            self.busy_s += passed_s
        if self.is_loaded:
            self.window.seconds += passed_s

    def begin(self, nbytes: int) -> None:
        self.in_flight += 1
        self.in_flight_nbytes += nbytes

    def end(self, now_s: float, nbytes: int, moved_nbytes: int) -> None:
        """A transfer has ended; `advance` has been called."""
        self.nbytes += moved_nbytes
        if self.is_loaded:
            self.window.nbytes += moved_nbytes
        last, before = self.has_followers
        if before:
            self.window.queued_nbytes += moved_nbytes
            self.window.queued_s += now_s - self.ended_s
        self.in_flight -= 1
        self.in_flight_nbytes -= nbytes
        self.has_followers, self.ended_s = (self.in_flight >= 2 and self.is_loaded, last), now_s

    def note_window(self, moved_nbytes: int, others: Iterable[_Channel]) -> None:
        """Take a new speed over when there is one; `others` are the drives, `moved_nbytes` what all have moved."""
        window = self.window
        if not window.is_over:
            return
        self.window, self.is_queued, self.measured_at_nbytes = _Window(), window.is_queued, moved_nbytes
        speed = window.nbytes_per_s
        before = speed if self.nbytes_per_s is None else self.nbytes_per_s
        self.nbytes_per_s = before + _NEWEST * (speed - before)
        if not self.is_queued and any(one.is_queued for one in others):
            more = min(_GROWTH * max(speed, before), _MOST_GROWTH * speed)
            self.nbytes_per_s = max(self.nbytes_per_s, more)

    def at_most_nbytes_per_s(self) -> float:
        if self.window.seconds < _WINDOW_S or not self.is_loaded:
            return math.inf
        return (self.window.nbytes + self.in_flight_nbytes) / self.window.seconds


@dataclass(frozen=True, slots=True)
class Reading:
    """What one direction of one drive has done.

    Attributes:
        nbytes: moved successfully, everything included.
        busy_s: time in which something was in flight.
        nbytes_per_s: measured speed; None before enough has moved.
    """

    nbytes: int
    busy_s: float
    nbytes_per_s: float | None


class DriveMeters:
    """Thread safe; the lock is held for a few additions.

    Args:
        drives: how many.
        now_s: the time, in seconds from any moment.
    """

    def __init__(self, drives: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._channels = {op: [_Channel() for _ in range(drives)] for op in Op}
        self._moved_nbytes = dict.fromkeys(Op, 0)
        self._now_s = now_s
        self._lock = threading.Lock()

    def began(self, drive: int, op: Op, nbytes: int) -> None:
        """A request was given to a drive."""
        channel = self._channels[op][drive]
        with self._lock:
            channel.advance(self._now_s())
            channel.begin(nbytes)

    def ended(self, drive: int, op: Op, nbytes: int, *, has_moved: bool) -> None:
        """A request has ended, successfully or not."""
        channel = self._channels[op][drive]
        with self._lock:
            now_s, moved_nbytes = self._now_s(), nbytes if has_moved else 0
            channel.advance(now_s)
            channel.end(now_s, nbytes, moved_nbytes)
            self._moved_nbytes[op] += moved_nbytes
            channel.note_window(sum(self._moved_nbytes.values()), self._channels[op])

    def reading(self, drive: int, op: Op) -> Reading:
        """What a drive has done so far."""
        channel = self._channels[op][drive]
        with self._lock:
            channel.advance(self._now_s())
            return Reading(channel.nbytes, channel.busy_s, channel.nbytes_per_s)

    def measured(self) -> dict[Op, Measured]:
        """Speeds by direction, as they are just now."""
        with self._lock:
            now_s, total = self._now_s(), sum(self._moved_nbytes.values())
            found = {}
            for op, channels in self._channels.items():
                for channel in channels:
                    channel.advance(now_s)
                speeds = [
                    one.nbytes_per_s if total - one.measured_at_nbytes < _STALE_NBYTES else None for one in channels
                ]
                bounds = [one.at_most_nbytes_per_s() for one in channels]
                found[op] = Measured(speeds, bounds, self._moved_nbytes[op])
            return found
