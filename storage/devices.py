"""Names of drives that stay the same from boot to boot, so that what was measured of a drive can be kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from storage.filesystems import existing_part, find_mount
from storage.swapfile import boot_id

_BLOCK_DEVICES = Path("/sys/dev/block")
_UUIDS = Path("/dev/disk/by-uuid")
# What identifies a disk, best first: the drive's own number, then what software made of several or of a file.
_IDENTITIES = ("wwid", "device/wwid", "serial", "device/serial", "dm/uuid", "md/uuid", "loop/backing_file")


def identify_device(directory: Path) -> str:
    """A name for the drive, or the share of a network, that holds a directory, or will when it is made.

    Made of the drive's serial number and size, or of the file system's UUID, or of what a network file system is
    mounted from. Where nothing of that can be found, the name holds until the next boot.
    """
    for number in _numbers_of(directory):
        if found := _identify_block(number):
            return found
    mount = find_mount(directory)
    if mount is not None and mount.source not in ("", "none", mount.type_name):
        return f"{mount.type_name} {mount.source}"
    number = existing_part(directory).stat().st_dev
    return f"device {os.major(number)}:{os.minor(number)} of boot {boot_id()}"


def describe_device(directory: Path) -> str:
    """The drive under a directory in words for people: its model and the kernel's name for it, and the directory."""
    disk = disk_of(directory)
    if disk is not None:
        model = " ".join(_read(disk / "device/model").split())
        name = f"{model} ({disk.name})" if model else f"drive {disk.name}"
    else:
        mount = find_mount(directory)
        name = "what" if mount is None else f"{mount.type_name} file system"
    return f"{name} under {directory}"


def disk_of(directory: Path, block_devices: Path | None = None) -> Path | None:
    """The kernel's folder of the disk that holds a directory, or will; None where that is no block device.

    Args:
        block_devices: where the kernel lists block devices by number; default: /sys/dev/block.
    """
    for number in _numbers_of(directory):
        if (disk := _disk(number, block_devices or _BLOCK_DEVICES)) is not None:
            return disk
    return None


def _numbers_of(directory: Path) -> Iterator[int]:
    """Numbers by which the kernel may know the block device: the file system's, and what that is mounted from."""
    yield existing_part(directory).stat().st_dev
    mount = find_mount(directory)
    if mount is not None and mount.source.startswith("/dev/"):  # btrfs and others have numbers of their own
        with suppress(OSError):
            yield os.stat(mount.source).st_rdev


def _disk(number: int, block_devices: Path) -> Path | None:
    node = block_devices / f"{os.major(number)}:{os.minor(number)}"
    if not node.exists():
        return None
    node = node.resolve()
    return node if (node / "queue").is_dir() else node.parent  # a partition lies in its disk


def _identify_block(number: int) -> str | None:
    disk = _disk(number, _BLOCK_DEVICES)
    if disk is None:
        return None
    size = _read(disk / "size")
    model = " ".join(_read(disk / "device/model").split())
    for name in _IDENTITIES:
        if text := " ".join(_read(disk / name).split()):
            return " ".join(part for part in (model, text, f"{size} sectors") if part)
    uuid = _uuid_of(number)
    return f"file system {uuid}" if uuid else None


def _uuid_of(number: int) -> str | None:
    try:
        links = list(_UUIDS.iterdir())
    except OSError:
        return None
    for link in links:
        try:
            if link.stat().st_rdev == number:
                return link.name
        except OSError:
            continue
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
