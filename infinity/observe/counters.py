"""What stores and stall clocks count, by the names of docs/metrics.md."""

from __future__ import annotations

from typing import Any

from infinity.observe.stalls import StallClock
from storage.space import DriveReport
from storage.store import ShardStore
from storage.types import Op

_TOTALS = ("bytes", "payload_bytes", "operations", "s")
_COSTS = ("blocks", "python_s", "python_us_per_block", "checksum_s", "system_s")
_WITHOUT_STORE = (*(f"{way}_{total}" for way in ("read", "write") for total in _TOTALS), *_COSTS)


def store_counters(store: ShardStore | None) -> dict[str, float]:
    """Bytes, transfers and CPU time of swap files, in all and by drive; without any the same names, all 0."""
    if store is None:
        return {f"nvme/{name}": 0.0 for name in _WITHOUT_STORE}
    flat: dict[str, float] = {}
    for op, name in ((Op.READ, "read"), (Op.WRITE, "write")):
        total = store.stats.total(op)
        flat[f"nvme/{name}_bytes"] = total.moved_nbytes
        flat[f"nvme/{name}_payload_bytes"] = total.payload_nbytes
        flat[f"nvme/{name}_operations"] = total.operations
        flat[f"nvme/{name}_s"] = total.seconds
    cost = store.cost
    flat["nvme/blocks"] = cost.operations
    flat["nvme/python_s"] = cost.python_s
    flat["nvme/python_us_per_block"] = cost.python_s_per_operation * 1e6
    flat["nvme/checksum_s"] = cost.check_s
    flat["nvme/system_s"] = cost.system_s
    for number, drive in enumerate(store.drive_report()):
        flat |= {f"nvme/drive{number}/{name}": value for name, value in _drive_counters(drive).items()}
    return flat


def _drive_counters(drive: DriveReport) -> dict[str, float]:
    """Speeds are there once they were measured."""
    counters: dict[str, float] = {"held_bytes": drive.held_nbytes, "file_bytes": drive.capacity_nbytes}
    for name, reading in (("read", drive.read), ("write", drive.write)):
        counters[f"{name}_bytes"] = reading.nbytes
        counters[f"{name}_busy_s"] = reading.busy_s
        if reading.nbytes_per_s is not None:
            counters[f"{name}_bytes_per_s"] = reading.nbytes_per_s
    return counters


def stall_counters(stalls: StallClock) -> dict[str, float]:
    """Seconds and number of waits by cause, and the seconds of all."""
    flat: dict[str, float] = {}
    for cause, seconds in stalls.seconds.items():
        flat[f"stall/{cause.value}_s"] = seconds
        flat[f"stall/{cause.value}_count"] = stalls.counts[cause]
    return flat | {"stall/total_s": stalls.total_s}


def drive_facts(drive: DriveReport) -> dict[str, Any]:
    """A drive as JSON."""
    found: dict[str, Any] = {
        "directory": drive.directory,
        "held_bytes": drive.held_nbytes,
        "file_bytes": drive.capacity_nbytes,
        "state": drive.state.value,
        "cause": drive.cause,
    }
    for name, reading in (("read", drive.read), ("write", drive.write)):
        found |= {
            f"{name}_bytes": reading.nbytes,
            f"{name}_busy_s": reading.busy_s,
            f"{name}_bytes_per_s": reading.nbytes_per_s,
        }
    return found
