"""How fast each drive is: bytes that have moved, and the time in which something was in flight, by drive and direction.

The speed of a drive is measured while enough is in flight to keep it busy, in windows of a fraction of a second; the
newest window counts as much as all before it. A drive that stops answering completes nothing, so there is also a bound
that needs no completion: it cannot have moved more than it was given.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.shares import Measured
from storage.types import Op

_LOADED_NBYTES = 1 << 20  # with less than that in flight, a drive shows its latency, not its speed
_WINDOW_S = 0.25
_WINDOW_NBYTES = 8 << 20  # a window is over when it is long enough and this much has moved,
_LONGEST_WINDOW_S = 1.0  # or after this time
_NEWEST = 0.5  # weight of the newest window
# When so much was moved since a drive's last window, it is measured again: it may have recovered, but a drive that is
# given nothing would never show it.
_STALE_NBYTES = 4 << 30


@dataclass(slots=True)
class _Channel:
    """One direction of one drive."""

    nbytes: int = 0
    busy_s: float = 0.0
    in_flight: int = 0
    in_flight_nbytes: int = 0
    seen_s: float = 0.0
    window_nbytes: int = 0
    window_s: float = 0.0
    nbytes_per_s: float | None = None
    measured_at_nbytes: int = 0  # what all drives had moved at the end of the last window

    def advance(self, now_s: float) -> None:
        passed_s, self.seen_s = now_s - self.seen_s, now_s
        if self.in_flight:
            self.busy_s += passed_s
        if self.in_flight_nbytes >= _LOADED_NBYTES:
            self.window_s += passed_s

    def note_window(self, moved_nbytes: int) -> None:
        is_enough = self.window_s >= _WINDOW_S and self.window_nbytes >= _WINDOW_NBYTES
        if not is_enough and self.window_s < _LONGEST_WINDOW_S:
            return
        speed = self.window_nbytes / self.window_s
        before = self.nbytes_per_s
        self.nbytes_per_s = speed if before is None else before + _NEWEST * (speed - before)
        self.window_nbytes, self.window_s = 0, 0.0
        self.measured_at_nbytes = moved_nbytes

    def at_most_nbytes_per_s(self) -> float:
        if self.window_s < _WINDOW_S or self.in_flight_nbytes < _LOADED_NBYTES:
            return math.inf
        return (self.window_nbytes + self.in_flight_nbytes) / self.window_s


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
            channel.in_flight += 1
            channel.in_flight_nbytes += nbytes

    def ended(self, drive: int, op: Op, nbytes: int, *, has_moved: bool) -> None:
        """A request has ended, successfully or not."""
        channel = self._channels[op][drive]
        with self._lock:
            channel.advance(self._now_s())
            is_loaded = channel.in_flight_nbytes >= _LOADED_NBYTES
            channel.in_flight -= 1
            channel.in_flight_nbytes -= nbytes
            if has_moved:
                channel.nbytes += nbytes
                self._moved_nbytes[op] += nbytes
                channel.window_nbytes += nbytes if is_loaded else 0
            channel.note_window(sum(self._moved_nbytes.values()))

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
