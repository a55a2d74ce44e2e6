"""The hardware of a plan: what is known of common GPUs and drives, and how options name them.

Every figure of the tables has its source beside it. What a real machine gives is better: `infinity bench tier` measures
drives, links and the optimizer, and `from_bench` takes its file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drives import DriveModel
from infinity.plan.reading import look_up, read_json
from infinity.sizes import GIB, format_nbytes, parse_nbytes

GB = 1e9
TB = 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        memory_nbytes: its own; 0: none, it computes in a share of the host memory (`Hardware.device_memory_nbytes`).
        flops_per_s: peak of dense 16-bit products with fp32 accumulation.
        link_bytes_per_s: raw rate of the host link, one direction.
        peer_bytes_per_s: rate between GPUs of a node for one GPU, one direction; None: over the host link.
    """

    name: str
    memory_nbytes: int
    flops_per_s: float
    link_bytes_per_s: float
    peer_bytes_per_s: float | None
    source: str


LINKS: dict[str, float] = {
    "pcie3-x16": 15.75 * GB,
    "pcie4-x8": 15.75 * GB,
    "pcie4-x16": 31.5 * GB,
    "pcie5-x8": 31.5 * GB,
    "pcie5-x16": 63.0 * GB,
}
"""Raw rates in one direction. Source: PCI-SIG, 8, 16 and 32 GT/s a lane with 128 of 130 bits for data."""

_PCIE4, _PCIE5 = LINKS["pcie4-x16"], LINKS["pcie5-x16"]
_CPU_DEVICE_SHARE = 0.25  # of the host memory, where a CPU is given no memory of its own
_LINK_EFFICIENCY = 0.8  # of the raw rate: packet headers and flow control, as large pinned copies reach it

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx3090", 24 * GIB, 71e12, _PCIE4, None, "NVIDIA Ampere GA102 whitepaper, appendix A"),
        Gpu("rtx4090", 24 * GIB, 165.2e12, _PCIE4, None, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
        Gpu("rtx5090", 32 * GIB, 209.5e12, _PCIE5, None, "NVIDIA: 838 with sparsity and fp16 accumulation, a quarter"),
        Gpu("a6000", 48 * GIB, 154.8e12, _PCIE4, None, "10752 cores at 1.8 GHz; the A40's datasheet: 149.7 at 1.74"),
        Gpu("l40s", 48 * GIB, 362.05e12, _PCIE4, None, "NVIDIA L40S datasheet, without sparsity"),
        Gpu("a100-40g", 40 * GIB, 312e12, _PCIE4, 300 * GB, "NVIDIA A100 datasheet"),
        Gpu("a100-80g", 80 * GIB, 312e12, _PCIE4, 300 * GB, "NVIDIA A100 datasheet"),
        Gpu("h100", 80 * GIB, 989.4e12, _PCIE5, 450 * GB, "NVIDIA H100 SXM datasheet, without sparsity"),
        Gpu("h200", 141 * 10**9, 989.4e12, _PCIE5, 450 * GB, "NVIDIA H200 SXM datasheet, without sparsity"),
        Gpu("b200", 180 * 10**9, 2250e12, _PCIE5, 900 * GB, "NVIDIA HGX B200 at 1000 W, without sparsity"),
    )
}

CPU = Gpu("cpu", 0, 200e9, 20 * GB, None, "a few cores in fp32; --efficiency and --bench say better")
"""Computing where the shards are: copies are made by the training thread itself."""


@dataclass(frozen=True, slots=True)
class Drive:
    """One drive of a plan. `endurance_nbytes` is what its maker rates it for (TBW); 0: not known."""

    name: str
    model: DriveModel
    capacity_nbytes: int = 0
    endurance_nbytes: int = 0
    source: str = ""


DRIVES: dict[str, Drive] = {
    drive.name: drive
    for drive in (
        Drive(
            "990pro-4tb",
            DriveModel(7.45 * GB, 6.9 * GB),
            int(4 * TB),
            int(2400 * TB),
            "Samsung 990 PRO 4 TB datasheet: sequential rates (write: into its cache), 2400 TBW",
        ),
        Drive(
            "mp600elite-2tb",
            DriveModel(7.0 * GB, 1.5 * GB, slc_nbytes=48 * GB, slc_write_bytes_per_s=4.7 * GB),
            int(2 * TB),
            source="Corsair MP600 ELITE: sequential reads of its series; TechPowerUp's review of 2 TB: 4.7 GB/s for "
            "48 GB, then 1.5; its endurance is not in the table",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node, and how many there are. Rates in bytes/s.

    Attributes:
        gpu: what computes; `flops_per_s` times `efficiency` is what large products reach.
        link_bytes_per_s: what a pinned copy reaches, one direction.
        network_bytes_per_s: between nodes, for one node, one direction.
        optimizer_s: seconds the optimizer of one rank needs for one parameter, host memory aside.
        has_gpu: whether copies run beside the computation, from memory of its own; else a device is a part of the host.
        unit_s: overhead of each pass through a unit.
        hand_over_s, contention: see `infinity.plan.scenario.Speeds`.
        notes: how its figures came about, in words.
    """

    gpu: Gpu
    drives: tuple[Drive, ...]
    host_memory_nbytes: int
    gpus: int = 1
    nodes: int = 1
    efficiency: float = 0.5
    link_bytes_per_s: float = _PCIE4 * _LINK_EFFICIENCY
    dram_bytes_per_s: float = 40 * GB
    network_bytes_per_s: float = 25 * GB
    optimizer_s: float = 1 / 2e9
    has_gpu: bool = True
    unit_s: float = 0.0
    hand_over_s: float = 0.0
    contention: Contention = NO_CONTENTION
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """GPUs of all nodes, one rank each."""
        return self.gpus * self.nodes

    @property
    def device_memory_nbytes(self) -> int:
        """Memory of one device. A CPU that is given none has its part of a quarter of the host memory."""
        if self.has_gpu or self.gpu.memory_nbytes:
            return self.gpu.memory_nbytes
        return int(self.host_memory_nbytes * self.host_share_of_devices) // self.gpus

    @property
    def host_share_of_devices(self) -> float:
        """The part of the host memory that grows with it and belongs to the devices of a node."""
        return 0.0 if self.has_gpu or self.gpu.memory_nbytes else _CPU_DEVICE_SHARE

    @property
    def devices_in_host_nbytes(self) -> int:
        """Host memory of a node in which its devices compute; with GPUs none."""
        return 0 if self.has_gpu else self.device_memory_nbytes * self.gpus

    @property
    def flops_per_s(self) -> float:
        """What one rank computes."""
        return self.gpu.flops_per_s * self.efficiency

    def describe(self) -> str:
        """One line."""
        counts: dict[str, int] = {}
        for drive in self.drives:
            counts[drive.name] = counts.get(drive.name, 0) + 1
        drives = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no drive"
        nodes = f"{self.nodes} nodes, each " if self.nodes > 1 else ""
        memory = format_nbytes(self.host_memory_nbytes)
        return f"{nodes}{self.gpus} x {self.gpu.name}, {memory} of host memory, {drives}"


def gpu_named(name: str) -> Gpu:
    """A GPU of the table.

    Raises:
        ConfigError: it has none of that name.
    """
    return look_up("--gpu", name, GPUS)


def effective_link(gpu: Gpu) -> float:
    """Bytes/s of a large pinned copy between host and this GPU."""
    return gpu.link_bytes_per_s * _LINK_EFFICIENCY


def parse_link(text: str) -> float:
    """Bytes/s of a large pinned copy, from a rate in GB/s or the name of a link.

    Raises:
        ConfigError: the text is neither.
    """
    try:
        rate = float(text)
    except ValueError:
        return look_up("--link", text, LINKS, allowed="GB/s such as 25, or ") * _LINK_EFFICIENCY
    return rate_of("--link", rate)


def rate_of(option: str, gigabytes_per_s: float) -> float:
    """Bytes/s of a rate that an option gives in GB/s.

    Raises:
        ConfigError: it is no rate.
    """
    if not 0 < gigabytes_per_s * GB < math.inf:
        raise ConfigError(f"{option} {gigabytes_per_s:g}: it must be greater than 0, and a number of GB/s")
    return gigabytes_per_s * GB


_COUNT = re.compile(r"(?:(\d+)x)?(.+)")
_MOST_DRIVES = 1024  # of a node
_DRIVE_HELP = (
    'READ:WRITE[:CAPACITY[:ENDURANCE]] in GB/s, such as "7.0:3.4:4TB:2400TBW", or a name of the table; '
    '"4x" before it means four of them'
)


def parse_drives(texts: Sequence[str]) -> tuple[Drive, ...]:
    """Drives from the texts of options.

    Raises:
        ConfigError: a text is not understood.
    """
    drives: list[Drive] = []
    for text in texts:
        match = _COUNT.fullmatch(text.strip())
        count = int(match.group(1) or 1) if match else 0
        if match is None or count < 1:
            raise ConfigError(f"--drive {text}: allowed: {_DRIVE_HELP}")
        if len(drives) + count > _MOST_DRIVES:
            raise ConfigError(f"--drive {text}: a node has {_MOST_DRIVES} drives at most")
        drives += [_one_drive(match.group(2), text)] * count
    return tuple(drives)


def _one_drive(text: str, whole: str) -> Drive:
    if ":" not in text:
        return look_up("--drive", text, DRIVES, allowed=f"{_DRIVE_HELP}; names: ")
    parts = text.split(":")
    try:
        read, write = (float(part) * GB for part in parts[:2])
        capacity = parse_nbytes(parts[2]) if len(parts) > 2 else 0
        endurance = parse_nbytes(parts[3].removesuffix("W").removesuffix("w")) if len(parts) > 3 else 0
        model = DriveModel(read, write)
    except ValueError as error:
        raise ConfigError(f"--drive {whole}: {error}; allowed: {_DRIVE_HELP}") from None
    if len(parts) > 4:
        raise ConfigError(f"--drive {whole}: too many parts; allowed: {_DRIVE_HELP}")
    return Drive(f"{parts[0]}:{parts[1]} GB/s", model, capacity, endurance, "as given")


def from_bench(path: Path, base: Hardware) -> Hardware:
    """`base` with what `infinity bench tier --json` measured: drives, optimizer, link and memory.

    Raises:
        ConfigError: the file cannot be read or is not such a report.
    """
    report = read_json("--bench", path)
    if not isinstance(report, Mapping) or "jobs" not in report:
        raise ConfigError(f"--bench {path}: this is not what `infinity bench tier --json` writes")
    try:
        return replace(base, **_measured(report))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--bench {path}: not as `infinity bench tier --json` writes it ({type(error).__name__}: {error})"
        ) from error


def _measured(report: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Hardware` that a bench report tells. Of the rates of one name, the last one has all threads."""
    changes: dict[str, Any] = {}
    for rate in (report.get("memory") or {}).get("rates", []):
        value = _positive(rate["name"], (rate.get("beside_disk") or rate["alone"])["median"])
        if rate["name"] == "AdamW bf16":
            changes["optimizer_s"] = 1.0 / value
        elif rate["name"] == "host to device":
            changes["link_bytes_per_s"] = value
        elif rate["name"] == "host memory copy":
            changes["dram_bytes_per_s"] = 2 * value  # each byte is read and written
    if drives := _bench_drives(report["jobs"]):
        changes["drives"] = drives
    if "machine" in report:
        changes["host_memory_nbytes"] = int(_positive("memory_bytes", report["machine"]["memory_bytes"]))
    return changes


def _positive(what: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{what} is {value}, and should be greater than 0")
    return number


def _bench_drives(jobs: Sequence[Mapping[str, Any]]) -> tuple[Drive, ...]:
    """One drive per directory that was measured alone: its fastest plain reads, plain writes, and both together."""
    by_directory: dict[str, list[tuple[float, float]]] = {}
    for job in jobs:
        directory = str(job["job options"]["filename"])
        if ":" not in directory:
            pair = (float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"]))
            by_directory.setdefault(directory, []).append(pair)
    drives = []
    for directory, pairs in by_directory.items():
        read = max((r for r, w in pairs if not w), default=0.0)
        write = max((w for r, w in pairs if not r), default=0.0)
        if read and write:
            duplex = _duplex(read, write, max((pair for pair in pairs if all(pair)), key=sum, default=None))
            drives.append(Drive(directory, DriveModel(read, write, duplex=duplex), source="measured"))
    return tuple(drives)


def _duplex(read: float, write: float, mixed: tuple[float, float] | None) -> float:
    """How far both directions go at the same time, from their rates alone and together."""
    if mixed is None:
        return 0.5
    shares = sorted((mixed[0] / read, mixed[1] / write))
    return min(max(1 - (1 - shares[1]) / shares[0], 0.0), 1.0)
