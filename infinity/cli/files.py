"""Files that commands write: refused before anything runs when they cannot be, and written in one way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.json_text import json_text
from infinity.replacing import replaced_file


def check_files(reads: Sequence[Path | None] = (), /, **files: Path | None) -> None:
    """Refuse files that could not be written at the end, or would take the place of others.

    Args:
        reads: what the command reads.
        files: what it writes, each named like its option (`fio_files`: --fio-files).

    Raises:
        ConfigError: one is a folder, cannot be written where it is to lie, or is one of the others.
    """
    taken = {path.resolve(): "it is read, and would be lost" for path in reads if path is not None}
    for name, path in files.items():
        if path is None:
            continue
        option = f"--{name.replace('_', '-')}"
        _check_place(option, path)
        if path.exists() and not path.is_file():
            continue  # a pipe or a device takes what comes
        place = path.resolve()
        if place in taken:
            raise ConfigError(f"{option} {path}: {taken[place]}; give another name")
        taken[place] = f"{option} writes it"


def _check_place(option: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; give the name of a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist; give a file in a folder that exists")
    is_file = path.is_file() or not path.exists()  # it is made anew, and takes the place of what is there
    if not (os.access(folder, os.W_OK | os.X_OK) if is_file else os.access(path, os.W_OK)):
        raise ConfigError(f"{option} {path}: nothing can be written there; give another file")


def make_folder(option: str, path: Path) -> None:
    """Make the folder that `option` names, if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be made: {error.strerror or error}") from error


def write_text(option: str, path: Path, text: str) -> None:
    """Write what `option` asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with replaced_file(path) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from error


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write the result that --json asked for, if it did.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is not None:
        write_text("--json", path, json_text(content, indent=2) + "\n")
