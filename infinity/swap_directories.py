"""Where swap files go: the directories that were given, or a temporary one that is really on a disk."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

TEMPORARY_PREFIX = "infinity-swap-"
_log = logging.getLogger(__name__)
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
_ON_DISK = Path("/var/tmp")


@contextmanager
def swap_directories(paths: Sequence[Path] | None) -> Iterator[Sequence[Path]]:
    """The given directories; without any, a temporary one, removed afterwards or at exit.

    Where the system's temporary directory lies in memory, which would make swapping to it pointless, `/var/tmp` is
    used instead.
    """
    if paths is not None:
        for path in paths:
            if file_system_of(path) in _MEMORY_FILE_SYSTEMS:
                _log.warning("%s is in memory, not on a disk: what is swapped there still takes memory", path)
        yield paths
        return
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=default_directory()))

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    try:
        yield (folder,)
    finally:
        atexit.unregister(remove)
        remove()


def default_directory() -> Path:
    """The directory for temporary swap files."""
    usual = Path(tempfile.gettempdir())
    if file_system_of(usual) not in _MEMORY_FILE_SYSTEMS:
        return usual
    if _ON_DISK.is_dir() and file_system_of(_ON_DISK) not in _MEMORY_FILE_SYSTEMS:
        return _ON_DISK
    _log.warning("%s is in memory, not on a disk; give nvme.paths a directory on a drive", usual)
    return usual


def file_system_of(path: Path) -> str:
    """Type of the file system that holds a path, such as "ext4"; "" when the system does not tell."""
    # A path that may not be looked at counts like one that is not there; `Path.exists` would raise.
    candidates = (path.absolute(), *path.absolute().parents)
    existing = next((p for p in candidates if os.path.exists(p)), Path("/")).resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[p] for p in (existing, *existing.parents) if p in mounts), "")
