from __future__ import annotations

import math

import pytest

from storage.meters import DriveMeters
from storage.types import Op
from tests.storage.helpers import MIB, PAGE, StepClock


class Drives:
    """Two drives whose time passes when told."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.meters = DriveMeters(2, self.clock.now_s)

    def move(self, drive: int, nbytes: int, seconds: float, op: Op = Op.WRITE) -> None:
        self.meters.began(drive, op, nbytes)
        self.clock.sleep(seconds)
        self.meters.ended(drive, op, nbytes, has_moved=True)

    def speed(self, drive: int, op: Op = Op.WRITE) -> float | None:
        return self.meters.measured()[op].nbytes_per_s[drive]

    def at_most(self, drive: int) -> float:
        return self.meters.measured()[Op.WRITE].at_most_nbytes_per_s[drive]


def test_only_time_with_something_in_flight_counts() -> None:
    drives = Drives()
    drives.clock.sleep(100)
    drives.move(0, 8 * MIB, 0.5)
    drives.clock.sleep(100)
    drives.move(0, 8 * MIB, 0.5)
    drives.clock.sleep(100)
    reading = drives.meters.reading(0, Op.WRITE)
    assert (reading.nbytes, reading.busy_s) == (16 * MIB, pytest.approx(1.0))
    assert reading.nbytes_per_s == pytest.approx(16 * MIB)
    assert drives.meters.reading(1, Op.WRITE).busy_s == drives.meters.reading(0, Op.READ).busy_s == 0
    assert drives.speed(1) is drives.speed(0, Op.READ) is None


def test_what_is_in_flight_at_the_same_time_takes_its_time_once() -> None:
    drives = Drives()
    for _ in range(4):
        drives.meters.began(0, Op.READ, 8 * MIB)
    for _ in range(4):
        drives.clock.sleep(0.25)
        drives.meters.ended(0, Op.READ, 8 * MIB, has_moved=True)
    assert drives.meters.reading(0, Op.READ).busy_s == pytest.approx(1.0)
    assert drives.speed(0, Op.READ) == pytest.approx(32 * MIB)


def test_small_transfers_one_by_one_show_no_speed() -> None:
    drives = Drives()
    for _ in range(1000):
        drives.move(0, PAGE, 0.01)
    assert drives.speed(0) is None
    assert drives.meters.reading(0, Op.WRITE).busy_s == pytest.approx(10)


def test_what_failed_has_taken_time_and_moved_nothing() -> None:
    drives = Drives()
    drives.meters.began(0, Op.WRITE, 8 * MIB)
    drives.clock.sleep(1.0)
    drives.meters.ended(0, Op.WRITE, 8 * MIB, has_moved=False)
    drives.move(0, 8 * MIB, 0.25)
    assert drives.meters.reading(0, Op.WRITE).nbytes == 8 * MIB
    assert drives.speed(0) == pytest.approx(16 * MIB)  # half of 0 and 32


def test_the_newest_window_counts_as_much_as_all_before() -> None:
    drives = Drives()
    for _ in range(8):
        drives.move(0, 50 * MIB, 1.0)
    drives.move(0, 10 * MIB, 1.0)
    assert drives.speed(0) == pytest.approx(30 * MIB)


def test_a_drive_that_stops_answering_is_seen_before_it_answers() -> None:
    drives = Drives()
    for _ in range(4):
        drives.move(0, 50 * MIB, 1.0)
    assert drives.at_most(0) == math.inf
    drives.meters.began(0, Op.WRITE, 2 * MIB)
    drives.clock.sleep(0.2)
    assert drives.at_most(0) == math.inf  # too early to tell
    drives.clock.sleep(1.8)
    assert drives.at_most(0) == pytest.approx(MIB)
    drives.meters.ended(0, Op.WRITE, 2 * MIB, has_moved=True)
    assert drives.at_most(0) == math.inf
    assert drives.speed(0) == pytest.approx(25.5 * MIB)


def test_a_drive_that_was_given_nothing_for_long_is_measured_again() -> None:
    drives = Drives()
    drives.move(1, 16 * MIB, 1.0)
    for _ in range(3):
        drives.move(0, 1 << 30, 1.0)
    assert drives.speed(1) == pytest.approx(16 * MIB)
    drives.move(0, 1 << 30, 1.0)
    drives.move(0, PAGE, 1.0)
    assert drives.speed(1) is None
    assert drives.meters.reading(1, Op.WRITE).nbytes_per_s == pytest.approx(16 * MIB)
    drives.move(1, 16 * MIB, 0.5)
    assert drives.speed(1) == pytest.approx(24 * MIB)


def _queue(drives: Drives, drive: int, transfers: int, seconds: float, latency_s: float = 0.0) -> None:
    """Transfers of 8 MiB, three in flight from the beginning on, each `seconds` after the other."""
    for _ in range(3):
        drives.meters.began(drive, Op.WRITE, 8 * MIB)
    drives.clock.sleep(latency_s)
    for number in range(transfers):
        drives.clock.sleep(seconds)
        drives.meters.ended(drive, Op.WRITE, 8 * MIB, has_moved=True)
        if number < transfers - 3:
            drives.meters.began(drive, Op.WRITE, 8 * MIB)


def test_latency_is_no_part_of_the_speed_of_transfers_that_wait() -> None:
    drives = Drives()
    _queue(drives, 0, 40, 0.1, latency_s=0.05)
    assert drives.speed(0) == pytest.approx(80 * MIB, rel=0.01)
    drives.move(1, 16 * MIB, 0.2 + 0.05)  # alone
    assert drives.speed(1) == pytest.approx(1.0625 * 64 * MIB)


def test_a_drive_without_a_queue_beside_one_that_has_one_counts_as_a_little_faster_each_time() -> None:
    drives = Drives()
    _queue(drives, 0, 10, 0.1)
    seen = []
    for _ in range(40):
        for _ in range(3):  # a window
            drives.move(1, 8 * MIB, 0.1)
        seen.append(drives.speed(1))
    shown = 80 * MIB
    assert seen[0] == pytest.approx(shown * 1.0625)
    assert seen[1] == pytest.approx(shown * 1.0625**2)
    assert seen[-1] == pytest.approx(shown * 2)  # and no more
    assert seen == sorted(seen)
    _queue(drives, 1, 40, 0.1)
    assert drives.speed(1) == pytest.approx(shown, rel=0.01)  # with a queue it shows what it can


def test_a_drive_without_a_queue_where_none_has_one_is_as_fast_as_it_looks() -> None:
    drives = Drives()
    for _ in range(40):
        drives.move(0, 8 * MIB, 0.1)
        drives.move(1, 8 * MIB, 0.2)
    assert (drives.speed(0), drives.speed(1)) == (pytest.approx(80 * MIB), pytest.approx(40 * MIB))
