"""Swap files: one preallocated file per directory and rank, in a private run folder that goes when its owner does.

    <directory>/infinity-<pid>-<random>/owner.json     the lock file: pid, boot id and start time of the owner
                                        rank0.swap

The owner holds a lock (flock) on `owner.json` as long as it lives. The folder is removed by `close`, at interpreter
exit, and, if its owner was killed, by `storage.cleanup`.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
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
    return str(int(psutil.boot_time()))


class RunFolder:
    """A private folder for the swap files of one store.

    Raises:
        OSError: the directory cannot be written to; nothing is left behind.
    """

    def __init__(self, directory: Path, run_name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Absolute, so that it is found again when the working directory has changed by then.
        self.path = directory.resolve() / f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._owner_pid = os.getpid()
        self._lock_fd = -1
        atexit.register(self.remove)
        try:
            self.path.mkdir(mode=0o700)
            self._lock(run_name)
        except BaseException:
            self.remove()
            raise

    def _lock(self, run_name: str) -> None:
        owner = {
            "pid": self._owner_pid,
            "boot_id": boot_id(),
            "started": psutil.Process().create_time(),
            "run": run_name,
        }
        self._lock_fd = os.open(self.path / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A file system without locks: pid, boot id and start time have to do.
            self._unlock()
        (self.path / OWNER_FILE).write_text(json.dumps(owner))

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self) -> None:
        """Remove the folder and everything in it. Idempotent; a forked child leaves its parent's folder alone."""
        atexit.unregister(self.remove)
        if os.getpid() == self._owner_pid:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()


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
        self._owner_pid = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if direct:
            flags |= os.O_DIRECT
        self.fd = os.open(path, flags, 0o600)
        try:
            self.grow(nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def room_nbytes(self) -> int:
        """By how much the file could be made longer, as far as the file system tells."""
        return max(0, shutil.disk_usage(self.path.parent).free - self._free_margin_nbytes)

    def grow(self, nbytes: int) -> None:
        """Make the file longer and reserve the space on disk.

        Raises:
            SwapFullError: too little space; the file is as it was.
        """
        nbytes = align_up(nbytes, PAGE_NBYTES)
        if not nbytes:
            return
        free_nbytes = shutil.disk_usage(self.path.parent).free
        if nbytes + self._free_margin_nbytes > free_nbytes:
            raise SwapFullError(
                f"the swap file in {self.path.parent} needs {nbytes} bytes and a margin of {self._free_margin_nbytes}, "
                f"but only {free_nbytes} bytes are free there. Free space, choose another directory, or add one",
                path=str(self.path),
            )
        start = self.extents.capacity_nbytes
        try:
            _reserve(self.path, start, nbytes)
        except OSError as error:
            os.ftruncate(self.fd, start)
            raise SwapFullError(
                f"reserving {nbytes} bytes for the swap file {self.path} failed: {error.strerror}; {free_nbytes} bytes "
                "are free there. Free space, choose another directory, or add one",
                path=str(self.path),
                errno=error.errno,
            ) from error
        self.extents.grow(nbytes)

    def close(self) -> None:
        """Close the file and remove it. Idempotent; a forked child leaves its parent's file alone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if os.getpid() == self._owner_pid:
                self.path.unlink(missing_ok=True)


def _reserve(path: Path, start: int, nbytes: int) -> None:
    # Through a plain descriptor: where a file system cannot preallocate, the C library writes single bytes instead,
    # which O_DIRECT would refuse.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, start, nbytes)
        else:
            os.ftruncate(fd, start + nbytes)
    finally:
        os.close(fd)


def make_directory_error(directory: Path, error: OSError) -> StorageError:
    """A readable error for a directory that cannot hold swap files; SwapFullError if it is for lack of room."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SwapFullError(
            f"{directory} cannot hold swap files: {error.strerror}. Free space, choose another directory, or add one",
            path=str(directory),
            errno=error.errno,
        )
    return StorageError(
        f"{directory} cannot hold swap files: {error.strerror or error}. Choose a directory you can write to"
    )
