"""Finding run folders whose owner is dead, and removing them. A live owner's folder is never touched.

An owner is alive when somebody holds the lock on its `owner.json` (this is so across containers, which do not see each
other's processes), or when a process with its pid and start time runs on this boot (where locks do not work).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from storage.swapfile import FOLDER_PREFIX, OWNER_FILE, boot_id

_START_TOLERANCE_S = 1.0
_FOLDER_NAME = re.compile(rf"{FOLDER_PREFIX}\d+-[0-9a-f]{{8}}")


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """A run folder.

    Attributes:
        pid: of its owner; None when its owner file cannot be read.
        is_alive: whether its owner lives; True when that cannot be known.
        nbytes: space it takes on disk.
    """

    path: Path
    pid: int | None
    is_alive: bool
    nbytes: int


def find_run_folders(directory: Path) -> list[FoundFolder]:
    """Every run folder in a directory, by name.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
    """
    return [look(path, is_free=is_free) for path, is_free in claimed(directory, _FOLDER_NAME)]


def remove_dead(directory: Path) -> list[FoundFolder]:
    """Remove the folders whose owner is dead; what was removed.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
        OSError: a dead folder cannot be removed.
    """
    removed = []
    for path, is_free in claimed(directory, _FOLDER_NAME):
        folder = look(path, is_free=is_free)
        if is_free and not folder.is_alive:
            shutil.rmtree(path)
            removed.append(folder)
    return removed


def claimed(directory: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, bool]]:
    """The folders in a directory that have such a name, and whether nobody else holds their lock, by name.

    The lock of each is held until the next one is asked for, against other cleaners.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
    """
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink() and name.fullmatch(path.name):
            with _claim(path) as is_free:
                yield path, is_free


@contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether nobody else holds the lock of a run folder; if so, it is held meanwhile, against other cleaners."""
    try:
        fd = os.open(path / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # No owner file (it may be about to be written), or not ours to judge.
        yield False
        return
    try:
        yield _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: the owner's process decides
    return True


def look(path: Path, *, is_free: bool) -> FoundFolder:
    """What a run folder is; `is_free`: nobody holds its lock."""
    nbytes = disk_nbytes(path)
    try:
        owner = json.loads((path / OWNER_FILE).read_text())
        pid, boot, started = int(owner["pid"]), str(owner["boot_id"]), float(owner["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return FoundFolder(path, None, True, nbytes)
    return FoundFolder(path, pid, not is_free or is_running(pid, boot, started), nbytes)


def disk_nbytes(folder: Path) -> int:
    """Bytes on the drive of what is in a folder, while others may be removing it."""
    return sum(_blocks_nbytes(file) for file in folder.rglob("*"))


def _blocks_nbytes(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0  # its owner is just closing


def is_running(pid: int, boot: str, started: float) -> bool:
    """Whether the process that noted these three still runs; True when that cannot be known."""
    if boot != boot_id():
        return False
    try:
        return abs(psutil.Process(pid).create_time() - started) <= _START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
