"""A file that has all of its new contents or none of them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from storage.paths import StrPath


@contextmanager
def replaced_file(path: StrPath, *, newline: str | None = None) -> Iterator[IO[str]]:
    """A text file to fill, which takes the place of `path` at the end of the block; after a failure it is removed.

    It is made beside `path`, under a hidden name that nothing has, so that of two who write at a time one wins. What a
    link names is replaced, not the link, and keeps its mode; into a pipe, a terminal or another device is written as it
    comes.

    Raises:
        OSError: it could not be written; what was there before is as it was.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with path.open("w", newline=newline, encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()  # not before: the link to a pipe, /dev/stdout, leads to no path
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with beside.open("x", newline=newline, encoding="utf-8") as file:
            yield file
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = str(path)  # what was asked for
        raise
