"""Swap files: one preallocated file per directory and rank, in a private run folder that goes when its owner does.

    <directory>/infinity-<pid>-<random>/owner.json     who owns the folder: pid, boot id, start time of the process
                                        rank0.swap

The folder is removed by `close`, at interpreter exit, and, if its owner was killed, by `storage.cleanup`.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
from pathlib import Path

import psutil

from storage.align import PAGE_NBYTES, align_up
from storage.errors import StorageError, SwapFullError
from storage.extents import ExtentAllocator

OWNER_FILE = "owner.json"
FOLDER_PREFIX = "infinity-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Identifies this boot of the machine, so that a pid of an earlier boot is never taken for a live one."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text().strip()
    return str(psutil.boot_time())


class RunFolder:
    """A private folder for the swap files of one store."""

    def __init__(self, directory: Path, run_name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        owner = {
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "started": psutil.Process().create_time(),
            "run": run_name,
        }
        (self.path / OWNER_FILE).write_text(json.dumps(owner))
        self._owner_pid = os.getpid()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the folder and everything in it. Idempotent; a forked child leaves its parent's folder alone."""
        atexit.unregister(self.remove)
        if os.getpid() == self._owner_pid:
            shutil.rmtree(self.path, ignore_errors=True)


class SwapFile:
    """One preallocated file and its extents. Opened once; `fd` serves every transfer.

    Args:
        path: file to create.
        nbytes: size to preallocate.
        direct: open with O_DIRECT.
        free_margin_nbytes: bytes to leave free on the file system.

    Raises:
        SwapFullError: the file system has too little space; says need and have.
    """

    def __init__(self, path: Path, nbytes: int, *, direct: bool, free_margin_nbytes: int) -> None:
        self.path = path
        self.extents = ExtentAllocator(0)
        self._free_margin_nbytes = free_margin_nbytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        if direct:
            flags |= os.O_DIRECT
        self.fd = os.open(path, flags, 0o600)
        try:
            self.grow(nbytes)
        except BaseException:
            self.close()
            raise

    def grow(self, nbytes: int) -> None:
        """Make the file longer and reserve the space on disk."""
        nbytes = align_up(nbytes, PAGE_NBYTES)
        if not nbytes:
            return
        free_nbytes = shutil.disk_usage(self.path.parent).free
        if nbytes + self._free_margin_nbytes > free_nbytes:
            raise SwapFullError(
                f"the swap file in {self.path.parent} needs {nbytes} bytes and a margin of {self._free_margin_nbytes}, "
                f"but only {free_nbytes} bytes are free there. Free space, choose another directory, or add one"
            )
        start = self.extents.capacity_nbytes
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, start, nbytes)
            else:
                os.ftruncate(self.fd, start + nbytes)
        except OSError as error:
            raise SwapFullError(
                f"reserving {nbytes} bytes for the swap file {self.path} failed: {error.strerror}; {free_nbytes} bytes "
                "are free there. Free space, choose another directory, or add one"
            ) from error
        self.extents.grow(nbytes)

    def close(self) -> None:
        """Close the file and remove it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.path.unlink(missing_ok=True)


def make_directory_error(directory: Path, error: OSError) -> StorageError:
    """A readable error for a directory that cannot hold swap files."""
    return StorageError(
        f"{directory} cannot hold swap files: {error.strerror or error}. Choose a directory you can write to"
    )
