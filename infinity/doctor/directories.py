"""Checks of a directory that is to hold swap files."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from infinity.bench.machine import describe_drive
from infinity.doctor.check import Check, Status
from infinity.doctor.statx import direct_alignment
from infinity.sizes import GIB, format_nbytes
from infinity.swap_directories import file_system_of
from storage.align import PAGE_NBYTES
from storage.backends.probe import probe_direct
from storage.cleanup import find_run_folders
from storage.errors import StorageError
from storage.swapfile import RunFolder

_LITTLE_NBYTES = 10 * GIB
_TOO_LITTLE_NBYTES = GIB // 4

_ON_DISK = frozenset({"ext4", "ext3", "ext2", "xfs", "f2fs"})
_COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_LAYERED = frozenset({"overlay", "aufs", "unionfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "afs"}
)


def check_directory(directory: Path) -> list[Check]:
    """Everything about one directory: can it be written, what is it on, how is it read, how much is free."""
    subject = str(directory)
    if not directory.is_dir():
        if directory.exists():
            fix = "infinity train --nvme DIR    # a directory"
            return [Check("directory", Status.FAILURE, f"{directory} is not a directory", fix, subject)]
        fix = f"mkdir -p {shlex.quote(subject)}    # then infinity doctor again"
        return [Check("directory", Status.WARNING, f"{directory} does not exist: nothing is known of it", fix, subject)]
    # Before a folder of our own is made there, and with its owner still alive.
    stale = check_stale_folders(directory)
    try:
        folder = RunFolder(directory, "doctor")
    except (OSError, StorageError) as error:
        fix = f"sudo chown $USER {shlex.quote(subject)}    # or give --nvme another directory"
        return [Check("directory", Status.FAILURE, f"cannot be written to: {error}", fix, subject), stale]
    try:
        kind = file_system_of(directory)
        problem = probe_direct(folder.path)
        return [
            check_file_system(directory, kind),
            check_direct(directory, kind, problem),
            check_alignment(directory, folder.path, problem),
            check_free_space(directory),
            stale,
        ]
    finally:
        folder.remove()


def check_file_system(directory: Path, kind: str) -> Check:
    """What the file system's kind means for swap files."""
    drive = describe_drive(directory)
    device = " ".join(str(drive[key]) for key in ("device", "model") if key in drive)
    found = f"{kind or 'unknown'}{f' on {device}' if device else ''}"
    name, subject, data = "file system", str(directory), {"kind": kind, "drive": drive}
    another = "infinity train --nvme DIR    # a directory on a local drive"
    if kind in _IN_MEMORY:
        return Check(name, Status.WARNING, f"{found}: memory, not a drive; swapping there gains nothing", another,
                     subject, data)  # fmt: skip
    if kind in _LAYERED:
        fix = "mount a directory of the host (docker run -v /mnt/nvme:/swap) and give --nvme /swap"
        return Check(name, Status.WARNING, f"{found}: layers of a container", fix, subject, data)
    if kind in _NETWORK or kind.startswith("fuse"):
        return Check(name, Status.WARNING, f"{found}: not a local drive", another, subject, data)
    if kind in _COPY_ON_WRITE:
        fix = f"chattr +C {shlex.quote(str(directory))}    # then make the swap files anew"
        if kind != "btrfs":
            fix = another
        return Check(name, Status.WARNING, f"{found}: copies on every write, files fragment", fix, subject, data)
    if drive.get("rotational") and kind in _ON_DISK and "virtual" not in device and not device.startswith("vd"):
        return Check(name, Status.WARNING, f"{found}: the drive reports spinning disks", another, subject, data)
    status = Status.OK if kind in _ON_DISK else Status.NOTE
    return Check(name, status, found if status is Status.OK else f"{found}: not one we know", "", subject, data)


def check_direct(directory: Path, kind: str, problem: str | None) -> Check:
    """Whether an aligned write and read with O_DIRECT came back."""
    subject, data = str(directory), {"works": problem is None}
    if problem is None:
        return Check("direct I/O", Status.OK, "a page written with O_DIRECT came back", "", subject, data)
    fix = "infinity train --nvme DIR    # on ext4 or xfs; here the page cache is used"
    return Check("direct I/O", Status.WARNING, problem, fix, subject, data | {"kind": kind})


def check_alignment(directory: Path, folder: Path, problem: str | None) -> Check:
    """How transfers must be aligned, from the kernel, else from the drive, else from the page that was tried."""
    file = folder / "alignment"
    file.write_bytes(bytes(PAGE_NBYTES))
    told = direct_alignment(file)
    logical = describe_drive(directory).get("logical_block_bytes")
    name, subject = "alignment", str(directory)
    if told is not None and told.offset_nbytes:
        needed_nbytes, source = max(told.memory_nbytes, told.offset_nbytes), "statx"
        found = f"memory {told.memory_nbytes}, offsets {told.offset_nbytes} bytes (statx)"
    elif logical:
        needed_nbytes, source = int(logical), "logical_block_size"
        found = f"logical blocks of {logical} bytes (the drive's queue/logical_block_size)"
    elif problem is None:
        needed_nbytes, source = PAGE_NBYTES, "tried"
        found = f"{PAGE_NBYTES} bytes work (tried; neither kernel nor drive tell what is needed)"
    else:
        return Check(name, Status.NOTE, "neither kernel nor drive tell, and direct I/O does not work", "", subject)
    data = {"bytes": needed_nbytes, "source": source}
    if needed_nbytes <= PAGE_NBYTES:
        return Check(name, Status.OK, found, "", subject, data)
    fix = 'engine = "buffered" in the nvme section of --config'
    return Check(name, Status.WARNING, f"{found}; transfers are aligned to {PAGE_NBYTES}", fix, subject, data)


def check_free_space(directory: Path) -> Check:
    """How much may be swapped there."""
    usage = shutil.disk_usage(directory)
    found = f"{format_nbytes(usage.free)} of {format_nbytes(usage.total)} free"
    status = Status.OK
    if usage.free < _TOO_LITTLE_NBYTES:
        status = Status.FAILURE
    elif usage.free < _LITTLE_NBYTES:
        status, found = Status.WARNING, f"{found}: about {usage.free // 14:,} parameters in bf16"
    fix = "" if status is Status.OK else "free space, or add a drive: infinity train --nvme DIR --nvme DIR2"
    return Check("free space", status, found, fix, str(directory), {"free": usage.free, "total": usage.total})


def check_stale_folders(directory: Path) -> Check:
    """Swap folders of processes that are gone."""
    subject = str(directory)
    try:
        dead = [folder for folder in find_run_folders(directory) if not folder.is_alive]
    except OSError as error:
        return Check("stale swap", Status.NOTE, f"the directory cannot be listed: {error.strerror}", "", subject)
    nbytes = sum(folder.nbytes for folder in dead)
    data = {"folders": [str(folder.path) for folder in dead], "bytes": nbytes}
    if not dead:
        return Check("stale swap", Status.OK, "no folders of dead processes", "", subject, data)
    found = f"{len(dead)} folder{'s' if len(dead) > 1 else ''} of dead processes, {format_nbytes(nbytes)}"
    return Check("stale swap", Status.WARNING, found, f"infinity clean {shlex.quote(subject)}", subject, data)
