"""Finding run folders whose owner is dead, and removing them. A live owner's folder is never touched."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from storage.swapfile import FOLDER_PREFIX, OWNER_FILE, boot_id

_START_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """A run folder. `pid` is None when its owner file cannot be read."""

    path: Path
    pid: int | None
    is_alive: bool
    nbytes: int


def find_run_folders(directory: Path) -> list[FoundFolder]:
    """Every run folder in a directory, by name.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
    """
    return [
        _look(path) for path in sorted(directory.iterdir()) if path.is_dir() and path.name.startswith(FOLDER_PREFIX)
    ]


def remove_dead(directory: Path) -> list[FoundFolder]:
    """Remove the folders whose owner is dead; what was removed."""
    removed = []
    for folder in find_run_folders(directory):
        # A folder without a readable owner may be one that is being made this moment: only its owner knows.
        if folder.pid is not None and not folder.is_alive:
            shutil.rmtree(folder.path)
            removed.append(folder)
    return removed


def _look(path: Path) -> FoundFolder:
    nbytes = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    try:
        owner = json.loads((path / OWNER_FILE).read_text())
        pid, boot, started = int(owner["pid"]), str(owner["boot_id"]), float(owner["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return FoundFolder(path, None, False, nbytes)
    return FoundFolder(path, pid, _is_alive(pid, boot, started), nbytes)


def _is_alive(pid: int, boot: str, started: float) -> bool:
    if boot != boot_id():
        return False
    try:
        return abs(psutil.Process(pid).create_time() - started) <= _START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
