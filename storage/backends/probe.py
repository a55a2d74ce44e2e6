"""What a directory can do, tried out; and the backend for it."""

from __future__ import annotations

import errno
import mmap
import os
from enum import StrEnum
from pathlib import Path

from storage.align import PAGE_NBYTES
from storage.backends.base import Backend
from storage.backends.buffered import BufferedBackend
from storage.backends.direct import DirectBackend
from storage.errors import StorageError


class Engine(StrEnum):
    """What may be asked for: a backend by name, or the best one that works."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"


def probe_direct(directory: Path) -> str | None:
    """Why O_DIRECT does not work in a directory, or None when it does: one aligned page is written and read back."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return "this system has no O_DIRECT"
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"opening a file with O_DIRECT failed: {error.strerror}"
    try:
        return _try_page(fd)
    except OSError as error:
        # A full disk says nothing about O_DIRECT; reserving the swap file will tell how full it is.
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"O_DIRECT failed: {error.strerror}"
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _try_page(fd: int) -> str | None:
    pattern = bytes(range(256)) * (PAGE_NBYTES // 256)
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        page[:] = pattern
        written = os.pwritev(fd, [page], 0)
        page[:] = bytes(PAGE_NBYTES)
        read = os.preadv(fd, [page], 0)
        if written != PAGE_NBYTES or read != PAGE_NBYTES or page[:] != pattern:
            return "a page written with O_DIRECT did not come back"
    return None


def choose_engine(directory: Path, wanted: str) -> tuple[Engine, str]:
    """DIRECT or BUFFERED for a directory, and why.

    Raises:
        StorageError: `wanted` insists on "direct" and the directory cannot do it.
    """
    if wanted == Engine.BUFFERED:
        return Engine.BUFFERED, "asked for"
    problem = probe_direct(directory)
    if problem is None:
        return Engine.DIRECT, "O_DIRECT works here"
    if wanted == Engine.DIRECT:
        raise StorageError(f"engine 'direct' was asked for, but in {directory} {problem}. Use 'auto' or 'buffered'")
    return Engine.BUFFERED, problem


def make_backend(engine: Engine, *, threads: int, block_nbytes: int, eio_retries: int = 0) -> Backend:
    """A backend of a chosen kind."""
    kind = DirectBackend if engine is Engine.DIRECT else BufferedBackend
    return kind(threads=threads, block_nbytes=block_nbytes, eio_retries=eio_retries)
