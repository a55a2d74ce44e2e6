"""Byte counts as people write them: `512MiB`, `20GiB`, `1.5GB`, or a plain integer."""

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, Field

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_UNITS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "pb": 1000**5,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "pib": 1024**5,
}
_BINARY = (("PiB", 1024**5), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SIZE = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_ALLOWED = 'a whole number of bytes (int), or text such as "512MiB", "20GiB" (binary) or "1.5GB" (decimal)'


def parse_nbytes(value: object) -> int:
    """Bytes in `value`: a non-negative int, or text with a unit (B, KB..PB decimal, KiB..PiB binary, any case).

    A part of a byte is dropped: `6.3MiB` is 6,606,028 bytes. Raises ValueError for anything else: floats and bools (a
    size is never a guess), unknown or one-letter units (`20G` could be either), and parts of bytes given as bytes or
    that leave none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"a size cannot be negative, got {value}; allowed: {_ALLOWED}")
        return value
    if not isinstance(value, str):
        raise ValueError(f"a size cannot be {value!r} ({type(value).__name__}); allowed: {_ALLOWED}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"cannot read {value!r} as a size; allowed: {_ALLOWED}")
    number, unit = match.groups()
    factor = _UNITS.get((unit or "B").lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {value!r}{_hint(number, unit)}; allowed: {_ALLOWED}")
    # Fraction, not float: "1.1TB" has to be exactly 1 100 000 000 000.
    nbytes = Fraction(number.replace("_", "")) * factor
    if nbytes.denominator != 1 and (factor == 1 or nbytes < 1):
        raise ValueError(f"{value!r} is not a whole number of bytes; allowed: {_ALLOWED}")
    return int(nbytes)  # down: a budget is a ceiling


def format_nbytes(nbytes: int) -> str:
    """Short text for people: `1.5 GiB`, `512 MiB`, `100 B`; about three significant digits, so not for reading back."""
    if nbytes < 0:
        return "-" + format_nbytes(-nbytes)
    for name, factor in _BINARY:
        if nbytes >= factor:
            return f"{_three_digits(nbytes / factor)} {name}"
    return f"{nbytes} B"


def format_minimum_nbytes(nbytes: int) -> str:
    """`format_nbytes` rounded up: what is printed, and given back as a setting, is never below the minimum it tells."""
    for name, factor in _BINARY:
        if nbytes >= factor:
            grain = 100 if nbytes < 10 * factor else 10 if nbytes < 100 * factor else 1
            return f"{_three_digits(-(-nbytes * grain // factor) / grain)} {name}"
    return f"{nbytes} B"


def option_nbytes(nbytes: int) -> str:
    """`format_minimum_nbytes` as one word, to be pasted behind an option: `--host-memory 4.01GiB`."""
    return format_minimum_nbytes(nbytes).replace(" ", "")


def _three_digits(number: float) -> str:
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _hint(number: str, unit: str) -> str:
    letter = unit.upper()
    return f": did you mean {number}{letter}iB or {number}{letter}B?" if letter in ("K", "M", "G", "T", "P") else ""


Nbytes = Annotated[int, BeforeValidator(parse_nbytes), Field(gt=0)]
"""A positive byte count in a pydantic model; accepts what `parse_nbytes` accepts."""

NbytesOrZero = Annotated[int, BeforeValidator(parse_nbytes)]
"""A byte count that may be zero."""
