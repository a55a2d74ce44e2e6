"""Everything one `infinity bench tier` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infinity.bench.fio import Comparison
from infinity.bench.statistics import Spread
from infinity.bench.sustained import Sustained
from infinity.bench.tier import Series


@dataclass(frozen=True, slots=True)
class Drive:
    """A directory that was measured.

    Attributes:
        device: what the system tells of the block device.
        direct_problem: why O_DIRECT does not work; None when it does.
    """

    directory: str
    file_system: str
    file_nbytes: int
    device: dict[str, Any]
    direct_problem: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryRate:
    """How fast something goes that is not a drive.

    Attributes:
        unit: "bytes/s" (bytes copied, each read once and written once) or "parameters/s".
        alone, beside_disk: medians and spreads; the latter None where no drive was measured.
        disk_bytes_per_s: what the drive did meanwhile, reads and writes together.
    """

    name: str
    threads: int
    unit: str
    alone: Spread
    beside_disk: Spread | None
    disk_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All rates, and what could not be measured."""

    rates: tuple[MemoryRate, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class BenchResult:
    """Filled while the measurements run.

    Attributes:
        comparisons: with fio, by directory.
        written_nbytes: what the whole run wrote to drives, also to prepare.
    """

    machine: dict[str, Any]
    drives: list[Drive] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)
    fio_version: str = ""
    memory: MemoryReport | None = None
    sustained: list[Sustained] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written_nbytes: int = 0
    elapsed_s: float = 0.0
