"""What the planner knows of a drive: its rates, alone and with something going the other way."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriveModel:
    """What a drive does, as the engine sees it. Rates in bytes/s.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: with nothing going the other way, for as long as a run lasts.
        latency_s: before the first byte of a transfer; latencies of queued transfers overlap.
        duplex: 1: each direction keeps its rate whatever the other does; 0: they share the time of the drive.
        read_share: the share of the time of both that reads get while both wait; writes get the rest.
        slc_nbytes, slc_write_bytes_per_s: a cache that takes writes faster until it is full; it drains at the
            sustained rate. 0: none.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 1e-4
    duplex: float = 0.5
    read_share: float = 0.5
    slc_nbytes: float = 0.0
    slc_write_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.read_bytes_per_s, self.write_bytes_per_s)
        if not all(0 < rate < math.inf for rate in rates) or not 0 <= self.latency_s < math.inf:
            raise ValueError(f"rates must be positive and the latency not negative, all of them finite: {self}")
        is_cache_faster = self.write_bytes_per_s <= self.slc_write_bytes_per_s < math.inf
        if self.slc_nbytes and not (0 < self.slc_nbytes < math.inf and is_cache_faster):
            raise ValueError(f"the cache must take writes at least as fast as the drive behind it: {self}")
        if not 0 <= self.duplex <= 1 or not 0 < self.read_share < 1:
            raise ValueError(f"duplex must be from 0 to 1, read_share between 0 and 1: {self}")

    def utilisation(self) -> tuple[float, float]:
        """What part of its own rate each direction (read, write) has while both are busy.

        The part of the time that both directions can use at once is `duplex`: with d = 1 both are 1, with d = 0 they
        add up to 1.
        """
        d, r = self.duplex, self.read_share
        scale = 1.0 / (max(r, 1 - r) + (1 - d) * min(r, 1 - r))
        return min(r * scale, 1.0), min((1 - r) * scale, 1.0)

    def beside(self) -> tuple[float, float]:
        """Bytes/s of each direction (read, write) while both are busy."""
        read_part, write_part = self.utilisation()
        return self.read_bytes_per_s * read_part, self.write_bytes_per_s * write_part

    def corners(self) -> list[tuple[float, float]]:
        """The most that it reads and writes in a second: of reads only, of both at once, and of writes only.

        Of a run without end, so its cache does not count: what goes into that in a step has to leave it in a step.
        """
        read, write = self.read_bytes_per_s, self.write_bytes_per_s
        both = 1.0 / (2.0 - self.duplex)
        return [(read, 0.0), (read * both, write * both), (0.0, write)]

    def seconds(self, read_nbytes: float, write_nbytes: float) -> float:
        """Least time in which the drive can move so much, in any order, again and again (see `corners`)."""
        read_s = read_nbytes / self.read_bytes_per_s
        write_s = write_nbytes / self.write_bytes_per_s
        return max(read_s, write_s) + (1 - self.duplex) * min(read_s, write_s)
