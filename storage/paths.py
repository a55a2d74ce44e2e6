"""How the public interface takes a path: as text or as anything that stands for a path."""

from __future__ import annotations

import os

StrPath = str | os.PathLike[str]
"""A path as people have it: text, a `pathlib.Path`, or another object with `__fspath__` that gives text."""
