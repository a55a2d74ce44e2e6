"""Files that commands write: refused before anything runs when they cannot be, and written in one way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.json_text import json_text
from infinity.replacing import replaced_file


def check_files(**files: Path | None) -> None:
    """Refuse files that could not be written at the end; each is named like its option (`fio_files`: --fio-files).

    Raises:
        ConfigError: one is a folder, or lies in a folder that does not exist.
    """
    for name, path in files.items():
        if path is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if path.is_dir():
            raise ConfigError(f"{option} {path}: this is a folder; give the name of a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"{option} {path}: the folder {path.absolute().parent} does not exist; give a file in a folder that "
                "exists"
            )


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
