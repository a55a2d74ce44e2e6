"""Folders and files that benchmarks are given: made, or refused, before anything is measured."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def made_folder(text: str) -> Path:
    """A folder to measure in, as the `type` of an argument of argparse; it is made if it is not there.

    Raises:
        ArgumentTypeError: it cannot be made.
    """
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{path}: cannot be made: {error.strerror or error}; give another folder") from None
    return path


def result_file(text: str) -> Path:
    """A file for the result, likewise; the folder that it lies in is made.

    Raises:
        ArgumentTypeError: it is a folder, or its folder cannot be made.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{path}: this is a folder; give the name of a file")
    made_folder(str(path.parent))
    return path
