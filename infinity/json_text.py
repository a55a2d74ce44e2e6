"""JSON that every reader takes. It has no NaN and no infinity, which a loss that diverges is: they become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """What `json.dumps` gives, where every number is one."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # the rare case is looked for when it is there
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
