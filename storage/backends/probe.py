"""What a directory can do, tried out; and the backend for it."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

from storage.align import PAGE_NBYTES
from storage.backends.base import Backend
from storage.backends.buffered import BufferedBackend
from storage.backends.direct import DirectBackend
from storage.errors import StorageError

_log = logging.getLogger(__name__)


def probe_direct(directory: Path) -> str | None:
    """Why O_DIRECT does not work in a directory, or None when it does: one aligned page is written and read back."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return "this system has no O_DIRECT"
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"opening a file with O_DIRECT failed: {error.strerror}"
    pattern = bytes(range(256)) * (PAGE_NBYTES // 256)
    try:
        with mmap.mmap(-1, PAGE_NBYTES) as page:
            page[:] = pattern
            written = os.pwritev(fd, [page], 0)
            page[:] = bytes(PAGE_NBYTES)
            read = os.preadv(fd, [page], 0)
            if written != PAGE_NBYTES or read != PAGE_NBYTES or page[:] != pattern:
                return "a page written with O_DIRECT did not come back"
    except OSError as error:
        return f"writing a page with O_DIRECT failed: {error.strerror}"
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
    return None


def make_backend(directory: Path, engine: str, threads: int, block_nbytes: int) -> tuple[Backend, str]:
    """A backend for a directory, and why this one.

    Raises:
        StorageError: `engine` insists on "direct" and the directory cannot do it.
    """
    problem = "asked for" if engine == "buffered" else probe_direct(directory)
    if problem is None:
        _log.info("%s: O_DIRECT works", directory.parent)
        return DirectBackend(threads=threads, block_nbytes=block_nbytes), "O_DIRECT works here"
    if engine == "direct":
        raise StorageError(
            f"engine 'direct' was asked for, but in {directory.parent} {problem}. Use 'auto' or 'buffered'"
        )
    _log.info("%s: buffered I/O, because %s", directory.parent, problem)
    return BufferedBackend(threads=threads, block_nbytes=block_nbytes), problem
