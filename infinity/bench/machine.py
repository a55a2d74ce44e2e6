"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from infinity.optim.kernel_threads import usable_cores
from infinity.versions import infinity_version

_CPUINFO = Path("/proc/cpuinfo")
_DEVICES = Path("/sys/dev/block")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, system and versions; `load` is the number of busy processes during the last minute."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "infinity": infinity_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def describe_drive(directory: Path) -> dict[str, Any]:
    """Name, model and kind of the block device under a directory, as far as the system tells."""
    status = directory.stat()
    node = _DEVICES / f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    if not node.exists():
        return {}
    node = node.resolve()
    drive: dict[str, Any] = {"device": node.name}
    disk = node if (node / "queue").is_dir() else node.parent  # a partition lies in its disk
    for name, file in (("model", "device/model"), ("logical_block_bytes", "queue/logical_block_size")):
        text = _read(disk / file)
        if text:
            drive[name] = int(text) if text.isdigit() else text
    if rotational := _read(disk / "queue/rotational"):
        drive["rotational"] = rotational == "1"
    return drive


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    for line in _read(_CPUINFO).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
