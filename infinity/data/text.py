"""Where the text comes from: files, or what every CPython ships. A token is a byte, so nothing has to be learned first.

[Note: the text without `--data`]
`pydoc_data.topics` (the language reference behind `help()`) and the docstrings of the standard library's top modules,
in the order of their file names. Sources are parsed, never imported. One Python release always gives the same text.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infinity.errors import ConfigError
from infinity.sizes import MIB, format_nbytes

SHIPPED_NBYTES = MIB  # parsing more sources would take longer than a second
LIMIT_NBYTES = 256 * MIB  # the text is held in host memory, outside the budgets
_PROBE_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Text:
    """Text to train on. `tokens` is uint8 [n]; `source` says in a line where it comes from."""

    tokens: NDArray[np.uint8]
    source: str


def load_text(paths: Sequence[Path], *, shortest_nbytes: int) -> Text:
    """The text in `paths` (files, or folders with all their text files), or Python's own without paths.

    Args:
        paths: read in the given order, folders in the order of their file names. More than 256 MiB are left out.
        shortest_nbytes: what one sample needs.

    Raises:
        ConfigError: a path is missing, empty or binary, or all of it together is too short.
    """
    text = _read_all(paths) if paths else shipped_text()
    if len(text.tokens) < shortest_nbytes:
        raise ConfigError(
            f"{text.source}: {len(text.tokens)} bytes of text are too short for one sample of {shortest_nbytes} bytes "
            "(--seq plus one); give more text with --data or use a smaller --seq"
        )
    return text


@functools.cache
def shipped_text() -> Text:
    """Text that every Python has: see the note above. Once read it is kept: it is small, and reading it takes a second.

    Raises:
        ConfigError: this Python came without its library's sources.
    """
    parts: list[str] = []
    total = 0
    for part in _shipped_parts():
        parts.append(part)
        total += len(part)
        if total >= SHIPPED_NBYTES:
            break
    if not parts:
        raise ConfigError("this Python has neither pydoc topics nor library sources to train on; give text with --data")
    encoded = "\n\n".join(parts).encode()
    tokens = np.frombuffer(encoded, dtype=np.uint8)
    return Text(tokens, f"Python's own documentation ({format_nbytes(len(tokens))})")


def _shipped_parts() -> Iterator[str]:
    try:
        from pydoc_data import topics
    except ImportError:
        pages = {}  # some distributions put it in a package of its own; docstrings are left
    else:
        pages = topics.topics
    yield from (pages[name] for name in sorted(pages))
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from _docstrings(source)


def _docstrings(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # not readable here: one module less
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """In the order of `ast.walk`, without expressions: they are nine of ten nodes and hold no docstring."""
    ahead = deque[ast.AST]([tree])
    while ahead:
        node = ahead.popleft()
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, block, ())
            ahead.extend(inner if isinstance(inner, list) else ())  # what a lambda or a condition has is an expression
        yield node


def _read_all(paths: Sequence[Path]) -> Text:
    parts: list[bytes] = []
    left = LIMIT_NBYTES
    n_files = 0
    for path in paths:
        for content in _contents(path):
            if left > 0:
                parts.append(content[:left])
                left -= len(content)
                n_files += 1
    tokens = np.frombuffer(b"\n".join(parts), dtype=np.uint8)
    cut = f", cut at {format_nbytes(LIMIT_NBYTES)}" if left < 0 else ""
    names = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return Text(tokens, f"{names} ({n_files} files, {format_nbytes(len(tokens))}{cut})")


def _contents(path: Path) -> Iterator[bytes]:
    """Text of a file, or of every text file below a folder, where what is hidden, empty or binary is passed over."""
    if path.is_dir():
        found = False
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if hidden or not file.is_file():
                continue
            content = _read(file)
            if content and not _is_binary(content):
                found = True
                yield content
        if not found:
            raise ConfigError(f"--data {path}: this folder has no text file")
        return
    if not path.exists():
        raise ConfigError(f"--data {path}: there is no such file or folder")
    content = _read(path)
    if not content:
        raise ConfigError(f"--data {path}: this file is empty")
    if _is_binary(content):
        raise ConfigError(f"--data {path}: this is a binary file (it has NUL bytes); give text")
    yield content


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LIMIT_NBYTES)
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read: {error.strerror or error}") from error


def _is_binary(content: bytes) -> bool:
    return b"\0" in content[:_PROBE_NBYTES]
