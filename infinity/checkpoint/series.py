"""A series of checkpoints in one folder, with a file `latest` that names them, newest last.

`latest` is JSON: `{"kind": "infinity checkpoints", "checkpoints": ["step100", "step200"]}`. It is replaced as a whole,
after a new checkpoint is in its place and before an old one is removed; so what it names is there whatever happens.
Only folders that it names are ever removed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Literal

from infinity.checkpoint.format import INDEX_FILE, damaged
from infinity.errors import CheckpointError, ConfigError
from storage.filesystems import sync_folder

LATEST_FILE = "latest"
Keep = int | Literal["all"] | None
_KIND = "infinity checkpoints"
_log = logging.getLogger(__name__)


def check_keep(keep: Keep) -> None:
    """Refuse what is not a number of checkpoints. Raises ConfigError."""
    is_number = isinstance(keep, int) and not isinstance(keep, bool) and keep > 0
    if keep is not None and keep != "all" and not is_number:
        raise ConfigError(f'keep is {keep!r}; allowed: a number of checkpoints from 1 on, "all", or None for no series')


def note_saved(path: Path, keep: Keep) -> None:
    """A checkpoint is in its place: make it the latest of its folder, and remove those that are too old.

    Raises:
        CheckpointError: `latest` cannot be written; the checkpoint is there.
    """
    folder = path.parent
    try:
        names = [name for name in _read(folder) if name != path.name]
    except CheckpointError as error:
        _log.warning("%s; it begins again with %s", error, path.name)
        names = []
    names.append(path.name)
    kept = names if keep is None or keep == "all" else names[-keep:]
    try:
        _write(folder, kept)
        for name in names[: len(names) - len(kept)]:
            old = folder / name
            (old / INDEX_FILE).unlink(missing_ok=True)  # first: a half-removed folder is not a checkpoint
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} is there, but {folder / LATEST_FILE} could not be brought up to date: "
            f"{error.strerror or error}"
        ) from error


def candidates(path: Path) -> list[Path]:
    """The checkpoints to try for `path`, best first: itself, or those that its `latest` names, newest first.

    Raises:
        CheckpointError: `latest` is damaged.
    """
    if (path / INDEX_FILE).exists() or not (path / LATEST_FILE).is_file():
        return [path]
    return [path / name for name in reversed(_read(path))] or [path]


def _read(folder: Path) -> list[str]:
    file = folder / LATEST_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise damaged(file, str(error)) from error
    names = content.get("checkpoints") if isinstance(content, dict) and content.get("kind") == _KIND else None
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise damaged(file, "it does not name checkpoints")
    return names


def _is_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")


def _write(folder: Path, names: list[str]) -> None:
    new = folder / f".{LATEST_FILE}.new"
    with new.open("w", encoding="utf-8") as file:
        json.dump({"kind": _KIND, "checkpoints": names}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / LATEST_FILE)
    sync_folder(folder)
