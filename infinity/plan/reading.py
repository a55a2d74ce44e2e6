"""Reading what options name: JSON files, and names of tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from infinity.errors import ConfigError

_T = TypeVar("_T")


def read_json(option: str, path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {path}: not valid JSON: {error}") from error


def look_up(option: str, name: str, table: Mapping[str, _T], *, allowed: str = "") -> _T:
    """An entry of a table; upper and lower case are alike.

    Args:
        allowed: what may be given besides the names, for the message.

    Raises:
        ConfigError: there is no such entry.
    """
    found = table.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), table, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{option} {name}: unknown; {hint}allowed: {allowed}{', '.join(table)}")
    return found
