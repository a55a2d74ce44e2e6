"""What a directory can do, tried out; and the backend for it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Unpack

from storage.align import PAGE_NBYTES
from storage.backends.aio import AioBackend
from storage.backends.base import Backend
from storage.backends.buffered import BufferedBackend
from storage.backends.custom import CustomEngine, load_engine
from storage.backends.direct import DirectBackend
from storage.backends.gds import gds_refusal
from storage.backends.kernel_aio import why_not
from storage.backends.serving import QueueOptions
from storage.errors import StorageError
from storage.filesystems import FileSystem, find_file_system, stop_copying
from storage.statx import direct_alignment

_log = logging.getLogger(__name__)

_LARGER_BLOCKS = (8 << 10, 16 << 10, 32 << 10, 64 << 10)


class Engine(StrEnum):
    """What may be asked for: a backend by name, or the best one that works."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"
    AIO = "aio"
    GDS = "gds"  # tried, and refused with the reason: see `storage.backends.gds`

    @property
    def opens_direct(self) -> bool:
        """Whether its files are opened with O_DIRECT."""
        return self in (Engine.DIRECT, Engine.AIO)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What files in a folder can do.

    Attributes:
        direct_problem: why O_DIRECT does not work; None when it does.
        buffered_reason: why the page cache is the better way, although O_DIRECT may work; None when it is not.
    """

    file_system: FileSystem
    direct_problem: str | None
    buffered_reason: str | None


def probe_folder(folder: Path) -> Capabilities:
    """Find out what a folder can do that belongs to us, and prepare it.

    On btrfs copying on write is switched off for the files that will be made there: direct writes to a file with
    checksums fail when the memory changes meanwhile, fragment it, and newer kernels turn them into buffered ones.
    """
    file_system = find_file_system(folder)
    reason = None
    if file_system.is_memory:
        reason = f"{file_system.name} is memory"
    elif file_system.name == "btrfs" and (refusal := stop_copying(folder)) is not None:
        reason = f"btrfs does not let this folder go without copy on write and checksums ({refusal})"
    return Capabilities(file_system, probe_direct(folder), reason)


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
        return _refused_by_kernel(path) or _try_page(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return None  # a full disk says nothing about O_DIRECT; reserving the swap file will tell how full it is
        if error.errno == errno.EINVAL and (works_nbytes := _smallest_block(fd)):
            return _too_coarse(works_nbytes)
        return f"O_DIRECT failed: {error.strerror}"
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _refused_by_kernel(path: Path) -> str | None:
    told = direct_alignment(path)
    if told is None:
        return None
    if not told.offset_nbytes:
        return "the kernel says that files here have no direct I/O"
    needed_nbytes = max(told.memory_nbytes, told.offset_nbytes)
    return _too_coarse(needed_nbytes) if needed_nbytes > PAGE_NBYTES else None


def _too_coarse(needed_nbytes: int) -> str:
    return f"direct I/O needs multiples of {needed_nbytes} bytes, and transfers are multiples of {PAGE_NBYTES}"


def _smallest_block(fd: int) -> int | None:
    """The smallest block above a page that can be written with O_DIRECT, if any can."""
    for nbytes in _LARGER_BLOCKS:
        with mmap.mmap(-1, nbytes) as block:
            try:
                if os.pwritev(fd, [block], 0) == nbytes:
                    return nbytes
            except OSError:
                continue
    return None


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


def choose_engine(folder: Path, wanted: str) -> tuple[Engine | CustomEngine, str]:
    """DIRECT, AIO or BUFFERED for the files of a folder of ours, and why. What its file system means is logged, once.

    A name that is none of ours is one that another distribution brings.

    Raises:
        StorageError: `wanted` insists on "direct" or "aio" and the folder or the kernel cannot do it, or on "gds".
        PluginError: nobody brings the engine that is wanted, or it cannot be used.
    """
    if wanted == Engine.GDS:
        raise gds_refusal(folder)
    capabilities = probe_folder(folder)
    if note := capabilities.file_system.note:
        _log.warning("%s: %s", folder, note)
    problem = capabilities.direct_problem
    if wanted not in list(Engine):
        custom = load_engine(wanted)
        if custom.opens_direct and problem is not None:
            raise StorageError(f"engine {wanted!r} opens files with O_DIRECT, but in {folder} {problem}. Use 'auto'")
        return custom, f"asked for, from {custom.origin}"
    if wanted == Engine.BUFFERED:
        return Engine.BUFFERED, "asked for"
    if wanted in (Engine.DIRECT, Engine.AIO):
        if problem is not None:
            raise StorageError(f"engine '{wanted}' was asked for, but in {folder} {problem}. Use 'auto' or 'buffered'")
        if wanted == Engine.AIO and (refusal := why_not()) is not None:
            raise StorageError(f"engine 'aio' was asked for, but {refusal}. Use 'auto' or 'direct'")
        return Engine(wanted), "asked for, and O_DIRECT works here"
    if problem is None and capabilities.buffered_reason is None:
        return Engine.DIRECT, "O_DIRECT works here"
    return Engine.BUFFERED, problem or capabilities.buffered_reason or ""


def make_backend(
    engine: Engine | CustomEngine, *, threads: int, block_nbytes: int, **options: Unpack[QueueOptions]
) -> Backend:
    """A backend of a chosen kind, with `threads` blocks at the drive at a time.

    Args:
        options: see `QueueOptions`.

    Raises:
        StorageError: the kernel has no room for so many asynchronous transfers, or another distribution's backend
            cannot be made.
    """
    if isinstance(engine, CustomEngine):
        return engine.make(
            threads=threads,
            block_nbytes=block_nbytes,
            eio_retries=options.get("eio_retries", 0),
            write_memory_nbytes=options.get("write_memory_nbytes"),
        )
    if engine is Engine.AIO:
        try:
            return AioBackend(depth=threads, block_nbytes=block_nbytes, **options)
        except OSError as error:
            raise StorageError(
                f"engine 'aio' with {threads} transfers at a time: the kernel refuses: {error.strerror}. Raise "
                "fs.aio-max-nr (sysctl), which all processes share, or use 'direct'"
            ) from error
    kind = DirectBackend if engine is Engine.DIRECT else BufferedBackend
    return kind(threads=threads, block_nbytes=block_nbytes, **options)
