"""What a drive itself says was written to it: by SMART where that can be read, else by the kernel's counter.

Both count every program's writes, so over a run they show what else wrote, and that nothing of the run was missed.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from storage.devices import disk_of

_log = logging.getLogger(__name__)
_SMART_TIMEOUT_S = 10.0
_DATA_UNIT_NBYTES = 512_000  # NVMe base specification, SMART / health log: thousands of 512-byte units
_SECTOR_NBYTES = 512  # Documentation/block/stat.rst of Linux: always, whatever the device has
_WRITE_SECTORS_FIELD = 6  # the seventh of the same


@dataclass(frozen=True, slots=True)
class DriveCount:
    """Bytes written to a drive in its life or since boot; None where that cannot be read, and `source` says why."""

    nbytes: int | None
    source: str


def count_written(directory: Path, block_devices: Path | None = None) -> DriveCount:
    """What the drive under a directory counts.

    Args:
        block_devices: where the kernel lists block devices by number; default: /sys/dev/block.
    """
    disk = disk_of(directory, block_devices)
    if disk is None:
        return DriveCount(None, "not a block device of its own (network, overlay or memory file system)")
    if disk.name.startswith("nvme"):
        nbytes = smart_written_nbytes(Path("/dev") / disk.name)
        if nbytes is not None:
            return DriveCount(nbytes, "SMART")
    try:
        fields = (disk / "stat").read_text().split()
        return DriveCount(int(fields[_WRITE_SECTORS_FIELD]) * _SECTOR_NBYTES, f"the kernel's counter of {disk.name}")
    except (OSError, ValueError, IndexError) as error:
        return DriveCount(None, f"neither SMART nor {disk / 'stat'} can be read ({error})")


def smart_written_nbytes(device: Path) -> int | None:
    """Bytes that the host has written to an NVMe drive in its life, by SMART; None where that cannot be read.

    Args:
        device: such as `/dev/nvme0n1`. Reading it mostly needs root, and smartctl.
    """
    command = shutil.which("smartctl")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "--json", "--all", str(device)],
            capture_output=True,
            text=True,
            timeout=_SMART_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("SMART of %s cannot be read: %s", device, error)
        return None
    return parse_smart(done.stdout)


def parse_smart(text: str) -> int | None:
    """Bytes written, from the JSON that smartctl prints; None when it does not tell."""
    try:
        report = json.loads(text)
        return int(report["nvme_smart_health_information_log"]["data_units_written"]) * _DATA_UNIT_NBYTES
    except (ValueError, KeyError, TypeError):
        return None
