"""Values of options that their types do not say all about."""

from __future__ import annotations

import math

from infinity.errors import ConfigError
from infinity.sizes import parse_nbytes


def positive_nbytes(option: str, text: str) -> int:
    """The bytes of a size such as "5GB".

    Raises:
        ConfigError: it is no size, or 0.
    """
    try:
        nbytes = parse_nbytes(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from None
    if not nbytes:
        raise ConfigError(f"{option} {text!r}: must be more than nothing; give a size such as 5GB")
    return nbytes


def check_finite(**values: float | None) -> None:
    """Refuse infinity, which every lower limit lets pass; each value is named like its option.

    Raises:
        ConfigError: one is infinite, or no number.
    """
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be a finite number")
