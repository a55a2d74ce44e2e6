"""Folders and files that stay when their owner goes: what a versioned store keeps on each drive.

    <directory>/versioned-rank0/owner.json                  the lock file: who uses the folder
                                drive0-<identity>.shards    the bytes
                                manifest.sqlite             the metadata, on the first drive

One process at a time uses such a folder: it holds a lock (flock) on `owner.json`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from storage.align import PAGE_NBYTES, align_down
from storage.backends.probe import choose_engine
from storage.cleanup import is_running
from storage.drives import Drive, StorageOptions, WrapBackend, start_backend
from storage.errors import IntegrityError, SwapInUseError
from storage.extents import ExtentAllocator
from storage.filesystems import make_folders, sync_folder
from storage.swapfile import OWNER_FILE, SwapFile, boot_id, make_directory_error

_log = logging.getLogger(__name__)

DURABLE_PREFIX = "versioned-rank"
_OWNER_NBYTES = 512  # of the lock file, at least


def durable_folder(directory: Path, rank: int = 0) -> Path:
    """Where a versioned store keeps its files in a directory."""
    return directory / f"{DURABLE_PREFIX}{rank}"


class DurableFolder:
    """A folder that one process at a time uses.

    Raises:
        SwapInUseError: another one does; names it.
        OSError: the directory cannot be written to.
    """

    def __init__(self, path: Path, run_name: str) -> None:
        make_folders(path, mode=0o700)
        self.path = path.resolve()
        self._run_name = run_name
        self._owner_pid = 0
        self._fd = os.open(self.path / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._owner_pid = os.getpid()
            self._note_owner(run_name, boot_id())
        except BaseException:
            self.close()
            raise

    def _note_owner(self, run_name: str, boot: str) -> None:
        owner = {
            "pid": os.getpid(),
            "boot_id": boot,
            "started": psutil.Process().create_time(),
            "run": run_name,
        }
        # In place, so that it takes no room on a full disk; and before the end is cut, so that it is never empty.
        data = json.dumps(owner).encode().ljust(_OWNER_NBYTES)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use() from error
        except OSError as error:
            # A file system without locks: pid, boot id and start time have to do.
            owner = self._owner()
            if owner is not None and is_running(owner.pid, owner.boot_id, owner.started):
                raise self._in_use() from error

    def _owner(self) -> _Owner | None:
        try:
            found = json.loads(os.pread(self._fd, PAGE_NBYTES, 0))
            return _Owner(int(found["pid"]), str(found["boot_id"]), float(found["started"]), str(found["run"]))
        except (ValueError, KeyError, TypeError):
            return None  # its owner is just writing it

    def _in_use(self) -> SwapInUseError:
        owner = self._owner()
        who = "another process" if owner is None else f"process {owner.pid} (run {owner.run!r})"
        return SwapInUseError(f"{self.path} is in use by {who}. End it first, or choose another directory")

    def sync(self) -> None:
        """Make the names of the folder and of what is in it durable."""
        for path in (self.path, self.path.parent):
            sync_folder(path)

    def close(self) -> None:
        """Let go of the folder; what is in it stays. Idempotent."""
        if self._fd >= 0:
            try:
                if self._owner_pid == os.getpid():
                    self._note_owner(self._run_name, boot="")  # nobody uses it, though this process lives on
            except OSError as error:  # it only matters where locks do not work
                _log.warning("%s: could not note that nobody uses it: %s", self.path, error.strerror)
            finally:
                os.close(self._fd)
                self._fd = -1


@dataclass(frozen=True, slots=True)
class _Owner:
    pid: int
    boot_id: str
    started: float
    run: str


class DurableFile(SwapFile):
    """A swap file that stays. `used` are the spans whose bytes matter; the rest is free.

    Raises:
        IntegrityError: the file is missing, or shorter than what is said to be in it, or the spans overlap.
        SwapFullError: the file system has too little space.
    """

    def __init__(
        self, path: Path, nbytes: int, *, direct: bool, free_margin_nbytes: int, used: Iterable[tuple[int, int]]
    ) -> None:
        used = list(used)
        if used and not path.exists():
            raise IntegrityError(f"{path} is missing, but the manifest says that shards are in it", path=str(path))
        self.path = path
        self._free_margin_nbytes = free_margin_nbytes
        self._owner_pid = os.getpid()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self.fd = os.open(path, flags, 0o600)
        try:
            size = align_down(os.fstat(self.fd).st_size, PAGE_NBYTES)
            try:
                self.extents = ExtentAllocator.restore(size, used)
            except ValueError as error:
                raise IntegrityError(f"{path} and the manifest do not agree: {error}", path=str(path)) from error
            self.grow(max(0, nbytes - size))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; it stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_folder(directory: Path, rank: int, run_name: str, closing: ExitStack) -> DurableFolder:
    """The folder of a versioned store in a directory; `closing` lets go of it.

    Raises:
        SwapInUseError: another process uses it.
        StorageError: the directory cannot be used.
    """
    try:
        folder = DurableFolder(durable_folder(directory, rank), run_name)
    except OSError as error:
        raise make_directory_error(directory, error) from error
    closing.callback(folder.close)
    return folder


def open_durable_drive(
    folder: DurableFolder,
    name: str,
    nbytes: int,
    *,
    used: Iterable[tuple[int, int]],
    options: StorageOptions,
    wrap_backend: WrapBackend | None,
    closing: ExitStack,
) -> Drive:
    """Open or make the file of a drive, and its backend; `closing` undoes it, last made first.

    Raises:
        IntegrityError, SwapFullError: as DurableFile.
        StorageError: the directory cannot do what `options.engine` insists on.
    """
    engine, reason = choose_engine(folder.path, options.engine)
    file = DurableFile(
        folder.path / name,
        nbytes,
        direct=engine.opens_direct,
        free_margin_nbytes=options.free_margin_nbytes,
        used=used,
    )
    closing.callback(file.close)
    backend = start_backend(folder.path, engine, reason, options=options, wrap_backend=wrap_backend, closing=closing)
    return Drive(folder.path, file, backend, reason)
