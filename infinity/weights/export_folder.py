"""What an export leaves in its folder, so that the next one may take its place and nothing else is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from infinity.errors import CheckpointError

_MARK = "infinity_export"


def marked(names: Sequence[str]) -> dict[str, str]:
    """Metadata of the first safetensors file of an export: the names of all files that it writes."""
    return {_MARK: json.dumps(sorted(names))}


class ExportFolder:
    """The folder that an export is written to, and what is there before.

    Args:
        names: files with tensors, and their index, that the export writes.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._names = frozenset(names)

    def is_replaceable(self, folder: Path) -> bool:
        """Whether an earlier export is there, beside which are only files that can be kept as they are.

        Raises:
            CheckpointError: an export is there, with something beside it that would be lost.
        """
        written = _written_in(folder)
        if written is None:
            return False
        others = [entry for entry in folder.iterdir() if entry.name not in written]
        lost = [entry.name for entry in others if entry.name in self._names or not _is_file(entry)]
        if lost:
            raise CheckpointError(
                f"{folder} holds an earlier export, and beside it {', '.join(sorted(lost))}, which would be lost, so "
                "it is not replaced; give another path, or move them away"
            )
        return True

    def keep_others(self, made: Path) -> None:
        """Files that somebody put beside the earlier export, such as a tokenizer's, come into the new folder too."""
        written = _written_in(self._path) if self._path.is_dir() else None
        if written is None:
            return
        for entry in self._path.iterdir():
            if entry.name not in written and not (made / entry.name).exists():
                _link_or_copy(entry, made / entry.name)


def _written_in(folder: Path) -> frozenset[str] | None:
    """The names of the files that an export has written to a folder; None if none has."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                mark = (file.metadata() or {}).get(_MARK)
            if mark is not None:
                return frozenset(json.loads(mark))
        except (OSError, SafetensorError, ValueError, TypeError):
            continue  # damaged, or of somebody else
    return None


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
