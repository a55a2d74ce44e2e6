"""Folders of versioned stores in a directory: which of them a process can go on from, and removing them when asked."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from storage.cleanup import FoundFolder, claimed, look
from storage.durable import DURABLE_PREFIX
from storage.errors import StorageError
from storage.manifest import MANIFEST_FILE, Manifest

_FOLDER_NAME = re.compile(rf"{DURABLE_PREFIX}\d+")


@dataclass(frozen=True, slots=True)
class FoundRun:
    """The folder of a versioned store.

    Attributes:
        step: of the last commit; -1 when nothing was ever committed; None when it cannot be told: the manifest lies on
            another drive, or is damaged.
    """

    folder: FoundFolder
    step: int | None

    @property
    def is_resumable(self) -> bool:
        """Whether something would be lost with it."""
        return self.step != -1


def find_durable(directory: Path) -> list[FoundRun]:
    """Every folder of a versioned store in a directory, by name.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
    """
    return [_found(path, is_free=is_free) for path, is_free in claimed(directory, _FOLDER_NAME)]


def remove_durable(directory: Path, *, with_resumable: bool) -> list[FoundRun]:
    """Remove folders whose owner is dead; what was removed.

    Args:
        with_resumable: also those that a process could go on from.

    Raises:
        NotADirectoryError, FileNotFoundError: `directory` is not a directory.
        OSError: a folder cannot be removed.
    """
    removed = []
    for path, is_free in claimed(directory, _FOLDER_NAME):
        found = _found(path, is_free=is_free)
        if is_free and not found.folder.is_alive and (with_resumable or not found.is_resumable):
            shutil.rmtree(path)
            removed.append(found)
    return removed


def _found(path: Path, *, is_free: bool) -> FoundRun:
    return FoundRun(look(path, is_free=is_free), _step_of(path))


def _step_of(folder: Path) -> int | None:
    if not (folder / MANIFEST_FILE).exists():
        return None
    try:
        manifest = Manifest(folder / MANIFEST_FILE, None)
    except StorageError:
        return None
    try:
        return manifest.step if manifest.generation else -1
    finally:
        manifest.close()
