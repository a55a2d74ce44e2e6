"""How close keys on drives of different speed come to what the drives have together, on simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from storage.meters import DriveMeters
from storage.shares import better_split, speeds_of, split
from storage.types import Op
from tests.storage.helpers import MIB

_KEYS, _KEY_NBYTES, _IN_FLIGHT = 12, 16 * MIB, 6
Rates = Callable[[float], Sequence[float]]


class Training:
    """Writes all keys over and over, a few at a time, as a store would place them.

    Args:
        rates: bytes per second of the drives at a time; each serves one transfer after the other.
        latency_s: from the end of a transfer at the drive until that is noticed.
    """

    def __init__(self, rates: Rates, latency_s: float) -> None:
        self._rates = rates
        self._latency_s = latency_s
        self._now_s = 0.0
        self._given = [1.0 for _ in rates(0.0)]
        self._meters = DriveMeters(len(self._given), lambda: self._now_s)
        self._free_s = [0.0 for _ in self._given]
        self._places = [dict(split(_KEY_NBYTES, self._given, [0, 0])) for _ in range(_KEYS)]
        self._ends: list[tuple[float, int, int, int, int]] = []  # heap: when, order, write, drive, bytes
        self._order = itertools.count()
        self._waits: dict[int, int] = {}  # by write: parts in flight
        self.moved = 0

    @property
    def held_nbytes(self) -> list[int]:
        return [sum(place.get(drive, 0) for place in self._places) for drive in range(len(self._given))]

    def run(self, passes: int) -> float:
        """Bytes per second of so many passes over the keys, as a share of what the drives had at their end."""
        began_s, in_flight = self._now_s, deque[int]()
        for number in range(passes * _KEYS):
            if len(in_flight) == _IN_FLIGHT:
                self._wait_for(in_flight.popleft())
            self._write(number)
            in_flight.append(number)
        while in_flight:
            self._wait_for(in_flight.popleft())
        return passes * _KEYS * _KEY_NBYTES / (self._now_s - began_s) / sum(self._rates(self._now_s))

    def _write(self, number: int) -> None:
        key = number % _KEYS
        speeds = speeds_of(self._meters.measured(), self._given)
        better = better_split(self._places[key], speeds, self.held_nbytes) if speeds is not None else None
        if better is not None:
            self._places[key] = dict(better)
            self.moved += 1
        self._waits[number] = len(self._places[key])
        for drive, nbytes in self._places[key].items():
            self._meters.began(drive, Op.WRITE, nbytes)
            self._free_s[drive] = max(self._free_s[drive], self._now_s) + nbytes / self._rates(self._now_s)[drive]
            heapq.heappush(
                self._ends, (self._free_s[drive] + self._latency_s, next(self._order), number, drive, nbytes)
            )

    def _wait_for(self, number: int) -> None:
        while self._waits[number]:
            self._now_s, _, ended, drive, nbytes = heapq.heappop(self._ends)
            self._meters.ended(drive, Op.WRITE, nbytes, has_moved=True)
            self._waits[ended] -= 1


@pytest.mark.parametrize("latency_s", [0.0, 0.01, 0.02, 0.04])
@pytest.mark.parametrize("rates", [(200e6, 50e6), (50e6, 200e6), (400e6, 200e6, 50e6)])
def test_drives_give_what_they_have_however_late_their_answers_are(rates: tuple[float, ...], latency_s: float) -> None:
    training = Training(lambda _: rates, latency_s)
    training.run(10)
    assert training.run(10) > 0.93
    assert training.run(10) > 0.95


def test_fast_drives_with_a_short_latency() -> None:
    training = Training(lambda _: (3e9, 1e9), 0.002)
    training.run(100)
    assert training.run(50) > 0.95


def test_a_drive_that_slows_down_and_recovers() -> None:
    training = Training(lambda now_s: (20e6 if 10 < now_s < 30 else 200e6, 100e6), 0.01)
    training.run(10)
    assert training.run(4) > 0.95
    while training.held_nbytes[0] > 0.3 * sum(training.held_nbytes):
        training.run(1)  # until it has left the drive that became slow
    training.run(40)
    assert training.run(10) > 0.95
    assert training.held_nbytes[0] > 0.6 * sum(training.held_nbytes)


@pytest.mark.parametrize("latency_s", [0.0, 0.04])
def test_drives_that_are_equal_keep_their_keys(latency_s: float) -> None:
    training = Training(lambda _: (100e6, 100e6), latency_s)
    assert training.run(20) > 0.95
    assert training.moved == 0
