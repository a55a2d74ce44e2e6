"""Checks of a directory that is to hold swap files."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from infinity.bench.machine import describe_drive
from infinity.doctor.check import Check, Status
from infinity.sizes import GIB, format_nbytes
from infinity.swap_directories import folders_of_ranks
from storage.align import PAGE_NBYTES
from storage.backends.probe import Capabilities, probe_folder
from storage.cleanup import find_run_folders
from storage.errors import StorageError
from storage.filesystems import FileSystem, Kind
from storage.resumable import find_durable
from storage.statx import direct_alignment
from storage.swapfile import RunFolder

_LITTLE_NBYTES = 10 * GIB
_TOO_LITTLE_NBYTES = GIB // 4


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
        found = probe_folder(folder.path)
        return [
            check_file_system(directory, found.file_system),
            check_direct(directory, found),
            check_alignment(directory, folder.path, found.direct_problem),
            check_free_space(directory),
            stale,
        ]
    finally:
        folder.remove()


def check_file_system(directory: Path, file_system: FileSystem) -> Check:
    """What the file system's kind means for swap files."""
    drive = describe_drive(directory)
    device = " ".join(str(drive[key]) for key in ("device", "model") if key in drive)
    found = f"{file_system.name or 'unknown'}{f' on {device}' if device else ''}"
    name, subject = "file system", str(directory)
    data = {"kind": file_system.name, "group": file_system.kind.value, "drive": drive}
    another = "infinity train --nvme DIR    # a directory on a local drive"
    if note := file_system.note:
        fix = another
        if file_system.kind is Kind.LAYERS:
            fix = "mount a directory of the host (docker run -v /mnt/nvme:/swap) and give --nvme /swap"
        return Check(name, Status.WARNING, f"{found}: {note}", fix, subject, data)
    is_virtual = "virtual" in device or device.startswith("vd")
    if drive.get("rotational") and file_system.kind is Kind.DISK and not is_virtual:
        return Check(name, Status.WARNING, f"{found}: the drive reports spinning disks", another, subject, data)
    if file_system.kind is Kind.UNKNOWN:
        return Check(name, Status.NOTE, f"{found}: not one we know", "", subject, data)
    return Check(name, Status.OK, found, "", subject, data)


def check_direct(directory: Path, capabilities: Capabilities) -> Check:
    """Whether an aligned write and read with O_DIRECT came back, and whether that is the way to go."""
    problem, better = capabilities.direct_problem, capabilities.buffered_reason
    subject, data = str(directory), {"works": problem is None, "kind": capabilities.file_system.name}
    if problem is None and better is None:
        return Check("direct I/O", Status.OK, "a page written with O_DIRECT came back", "", subject, data)
    if problem is None:
        return Check("direct I/O", Status.NOTE, f"works, but is not used: {better}", "", subject, data)
    fix = "infinity train --nvme DIR    # on ext4 or xfs; here the page cache is used"
    return Check("direct I/O", Status.WARNING, problem, fix, subject, data)


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
        places = (directory, *folders_of_ranks(directory))
        dead = [folder for place in places for folder in find_run_folders(place) if not folder.is_alive]
        runs = [run for place in places for run in find_durable(place) if not run.folder.is_alive]
    except OSError as error:
        return Check("stale swap", Status.NOTE, f"the directory cannot be listed: {error.strerror}", "", subject)
    nbytes = sum(folder.nbytes for folder in dead)
    data = {
        "folders": [str(folder.path) for folder in dead],
        "bytes": nbytes,
        "runs": [{"path": str(run.folder.path), "step": run.step, "bytes": run.folder.nbytes} for run in runs],
    }
    if not dead and runs:
        found = ", ".join(f"a run at step {run.step} ({format_nbytes(run.folder.nbytes)})" for run in runs)
        of_ranks = len({run.folder.path.parent for run in runs} - {directory})
        launcher = f"torchrun --nproc-per-node {of_ranks} -m " if of_ranks else ""
        fix = f"{launcher}infinity train --resume {shlex.quote(subject)}    # or: infinity clean --resumable"
        return Check("stale swap", Status.NOTE, found, fix, subject, data)
    if not dead:
        return Check("stale swap", Status.OK, "no folders of dead processes", "", subject, data)
    found = f"{len(dead)} folder{'s' if len(dead) > 1 else ''} of dead processes, {format_nbytes(nbytes)}"
    return Check("stale swap", Status.WARNING, found, f"infinity clean {shlex.quote(subject)}", subject, data)
