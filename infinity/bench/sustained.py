"""Sustained writing: how a drive goes on when its fast cache is full.

Many drives take writes into a fast part of their flash first, and are several times slower once that is full. One
training step can fill it. The only way to see it is to write that much, which also wears the drive: so this runs when
asked for, and says before how many bytes it will write.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from infinity.bench.engines import BenchEngine
from infinity.bench.profiles import Workload
from infinity.bench.target import Target, check_directory, margin_nbytes, open_target
from infinity.bench.tier import ready
from infinity.errors import ConfigError
from infinity.sizes import MIB, format_nbytes
from storage.errors import IoTimeoutError
from storage.types import Op

_WRITE = Workload("sustained", 0, 8 * MIB, 4 * MIB, depth=8, transfers=4)
_STALL_S = 120.0
_CLIFF = 0.7  # slower than this share of the beginning, until the end
_SMOOTHED = 5


@dataclass(frozen=True, slots=True)
class Point:
    """What had been written at a time, and how fast it went since the point before."""

    at_s: float
    written_nbytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cliff:
    """Where writing became slower for good."""

    at_s: float
    written_nbytes: int
    before_bytes_per_s: float
    after_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Sustained:
    """A sustained write on one drive."""

    directory: str
    written_nbytes: int
    file_nbytes: int
    elapsed_s: float
    points: tuple[Point, ...]
    cliff: Cliff | None

    @property
    def bytes_per_s(self) -> float:
        return self.written_nbytes / self.elapsed_s


def plan_nbytes(directory: Path, total_nbytes: int) -> int:
    """Size of the file for writing `total_nbytes`: as much, or what there is room for, which is then written again.

    Raises:
        ConfigError: not a directory, hardly any room, or too few bytes to learn something from.
    """
    check_directory(directory)
    least_nbytes = 2 * _WRITE.transfers * _WRITE.transfer_nbytes
    if total_nbytes < least_nbytes:
        raise ConfigError(
            f"--sustained: {format_nbytes(total_nbytes)} is too little; at least {least_nbytes >> 20} MiB"
        )
    room_nbytes = shutil.disk_usage(directory).free - margin_nbytes(directory)
    return max(min(total_nbytes, room_nbytes // 2), least_nbytes)


def write_sustained(
    directory: Path, total_nbytes: int, *, interval_s: float = 0.5, watch: Callable[[Point], None]
) -> Sustained:
    """Write `total_nbytes` in order, and look every `interval_s` how far it is.

    Args:
        watch: called with every point, for a display.

    Raises:
        ConfigError: too little room.
        StorageError: a write failed.
    """
    with open_target(directory, plan_nbytes(directory, total_nbytes)) as target:
        points = _write(target, total_nbytes, interval_s, watch)
        file_nbytes = target.nbytes
    last = points[-1]
    return Sustained(str(directory), last.written_nbytes, file_nbytes, last.at_s, tuple(points), find_cliff(points))


def _write(target: Target, total_nbytes: int, interval_s: float, watch: Callable[[Point], None]) -> list[Point]:
    engine = BenchEngine.DIRECT if target.direct_problem is None else BenchEngine.BUFFERED
    transfers = -(-total_nbytes // _WRITE.transfer_nbytes)
    points: list[Point] = []
    with ready(_WRITE, engine, [target]) as runner:
        (load,) = runner.loads(seconds=float("inf"), most_transfers=transfers)
        started_s = moved_s = time.perf_counter()
        load.start()
        try:
            at_s, written_nbytes, is_over = 0.0, 0, False
            while not is_over:
                is_over = load.ended.wait(interval_s)
                before_s, before_nbytes = at_s, written_nbytes
                written_nbytes = load.moved_nbytes(Op.WRITE)
                at_s = max((load.ended_s if is_over else time.perf_counter()) - started_s, before_s + 1e-9)
                if written_nbytes > before_nbytes:
                    moved_s = time.perf_counter()
                elif time.perf_counter() - moved_s > _STALL_S:
                    raise IoTimeoutError(f"{target.directory}: nothing was written for {_STALL_S:.0f} s")
                points.append(Point(at_s, written_nbytes, (written_nbytes - before_nbytes) / (at_s - before_s)))
                watch(points[-1])
        finally:
            load.stop()
            runner.wait([load], seconds=0.0)
    return points


def find_cliff(points: Sequence[Point]) -> Cliff | None:
    """Where the rate falls below 70 % of the beginning and never recovers; None when it does not."""
    rates = [point.bytes_per_s for point in points]
    smooth = [median(rates[max(0, i - _SMOOTHED // 2) : i + _SMOOTHED // 2 + 1]) for i in range(len(rates))]
    head = max(3, len(smooth) // 10)
    if len(smooth) < 2 * head:
        return None
    before = median(smooth[:head])
    start = len(smooth)
    while start > 0 and smooth[start - 1] < _CLIFF * before:
        start -= 1
    if len(smooth) - start < head:
        return None
    return Cliff(points[start].at_s, points[start].written_nbytes, before, median(smooth[start:]))
