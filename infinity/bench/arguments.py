"""What benchmarks are given, as `type` of arguments of argparse: refused before anything is measured."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

_NUMEL = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMB])")
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9}


def made_folder(text: str) -> Path:
    """A folder to measure in; it is made if it is not there.

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
    """A file for the result; the folder that it lies in is made.

    Raises:
        ArgumentTypeError: it is a folder, or its folder cannot be made.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{path}: this is a folder; give the name of a file")
    made_folder(str(path.parent))
    return path


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from `least` on, such as rounds: of fewer there is no median."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r}: allowed: whole numbers from {least} on")
        return int(text)

    return count


def duration_s(text: str) -> float:
    """Seconds of a measurement.

    Raises:
        ArgumentTypeError: they are no number above 0.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"{text!r}: allowed: a number of seconds above 0")
    return seconds


def numel(text: str) -> float:
    """Parameters of a model, such as "400M" or "1.5B".

    Raises:
        ArgumentTypeError: it is written otherwise, or 0.
    """
    match = _NUMEL.fullmatch(text.upper())
    if match is None or not float(match[1]):
        raise ArgumentTypeError(f"{text!r}: allowed: a number with K, M or B, such as 400M")
    return float(match[1]) * _FACTORS[match[2]]


def several(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Values with commas between them."""
    return lambda text: [kind(each) for each in text.split(",")]
