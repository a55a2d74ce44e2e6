"""Which drive holds how much of every key, by the store's own arithmetic (`storage.shares`).

A key that is cut is moved by all drives at once, one that is too small for that by the one that holds it. So the time
of a step depends on where its keys lie, and the simulator has to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.plan.drives import DriveModel
from storage.shares import Measured, rotated, speeds_of, split
from storage.types import Op


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of a key lie on one drive."""

    start: int
    stop: int
    drive: int


def steady_speeds(drives: Sequence[DriveModel], read_nbytes: int, write_nbytes: int) -> list[float]:
    """Speed of each drive over both directions, in bytes/s, as a store knows it once it has measured its drives.

    Args:
        read_nbytes, write_nbytes: what a step moves, by which the directions are weighed.
    """
    given = [2 / (1 / drive.read_bytes_per_s + 1 / drive.write_bytes_per_s) for drive in drives]
    unknown = [math.inf] * len(drives)
    measured = {
        Op.READ: Measured([drive.read_bytes_per_s for drive in drives], unknown, read_nbytes),
        Op.WRITE: Measured([drive.write_bytes_per_s for drive in drives], unknown, write_nbytes),
    }
    return speeds_of(measured, given) or given


def drive_shares(drives: Sequence[DriveModel], read_nbytes: int, write_nbytes: int) -> list[float]:
    """The part of all bytes that each drive holds; they add up to 1."""
    speeds = steady_speeds(drives, read_nbytes, write_nbytes)
    return [speed / sum(speeds) for speed in speeds]


class Spread:
    """Where keys lie: filled in the order in which a store is asked for them.

    Args:
        speeds: of the drives, in any unit.
        keys: with their bytes.

    Attributes:
        held_nbytes: of all keys, by drive.
    """

    def __init__(self, speeds: Sequence[float], keys: Iterable[tuple[str, int]]) -> None:
        self._parts: dict[str, list[Part]] = {}
        held, first = [0] * len(speeds), 0
        for key, nbytes in keys:
            parts, at = [], 0
            for drive, part_nbytes in split(nbytes, speeds, held, rotated(len(speeds), first)):
                parts.append(Part(at, at + part_nbytes, drive))
                held[drive] += part_nbytes
                at += part_nbytes
            self._parts[key] = parts
            first = (first + len(parts)) % len(speeds)
        self.held_nbytes = held

    def nbytes_of(self, key: str) -> int:
        """Bytes of a key; 0 when it is not there."""
        parts = self._parts.get(key)
        return parts[-1].stop if parts else 0

    def shares(self, key: str, start: int, stop: int) -> dict[int, int]:
        """Bytes of a span by drive; drives that hold nothing of it are left out."""
        shares: dict[int, int] = {}
        for part in self._parts[key]:
            nbytes = min(stop, part.stop) - max(start, part.start)
            if nbytes > 0:
                shares[part.drive] = shares.get(part.drive, 0) + nbytes
        return shares
