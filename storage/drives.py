"""Opening and closing the drives of a store: run folder, swap file and backend of each directory.

[Note: workers between blocks]
Between two blocks a worker needs a core and the interpreter's lock, and in training others want both; they give the
lock up after Python's switch interval. A drive is measured while nothing else runs. So as many workers are added as
blocks that the drive serves in one switch interval: as many again on a fast drive, none where a block takes longer.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from storage.align import is_aligned
from storage.backends.base import Backend
from storage.backends.custom import CustomEngine
from storage.backends.kernel_aio import why_not
from storage.backends.probe import Engine, choose_engine, make_backend
from storage.calibration import Calibration
from storage.calibration_cache import Calibrate, find_calibration
from storage.checksums import Checksum
from storage.errors import StorageError
from storage.health import DEFAULT_RETRY_FULL_S
from storage.plugins import BACKENDS_GROUP, plugin_names
from storage.swapfile import RunFolder, SwapFile, make_directory_error

_log = logging.getLogger(__name__)

WrapBackend = Callable[[Backend], Backend]

DEFAULT_BLOCK_NBYTES = 4 << 20
DEFAULT_THREADS = 4
# As many bytes at the drive, in more parts: there is no thread for each of them.
DEFAULT_AIO_BLOCK_NBYTES = 1 << 20
DEFAULT_AIO_DEPTH = 16


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How a store does its I/O.

    Attributes:
        engine: "auto" probes every directory; "direct", "aio" and "buffered" insist; others are brought by other
            distributions (`storage.backends.custom`).
        block_nbytes: size of one system call, a multiple of 4096; None: as calibrated, else 4 MiB ("aio": 1 MiB).
        threads: blocks at each drive at the same time; None: as calibrated, else 4 ("aio", which has one thread: 16).
        calibrate: "cached" uses what was measured of a drive before, "missing" also measures a drive that never was
            (a second or two), "off" uses neither. A setting that is given stands, with the default for the other one.
        free_margin_nbytes: bytes to leave free on every file system.
        checksum: "xxh3" notes a checksum of what is written and verifies what is read; "none" does not.
        eio_retries: how often a block is tried again after EIO.
        write_memory_nbytes: memory that writes to a drive may hold, if that is known: while they hold little of it,
            they yield to reads; when somebody will soon wait for it, they go at full share.
        files_nbytes: most bytes of all files together, whatever drives fail or fill up; None: what the disks have.
        retry_full_s: how long a drive on which a write found no room is left alone before one write tries it again.

    Raises:
        ValueError: a value is not allowed; says which.
    """

    engine: str = "auto"
    block_nbytes: int | None = None
    threads: int | None = None
    calibrate: str = Calibrate.CACHED
    free_margin_nbytes: int = 64 << 20
    checksum: str = "xxh3"
    eio_retries: int = 2
    write_memory_nbytes: int | None = None
    files_nbytes: int | None = None
    retry_full_s: float = DEFAULT_RETRY_FULL_S

    def __post_init__(self) -> None:
        if self.engine not in list(Engine) and self.engine not in (brought := plugin_names(BACKENDS_GROUP)):
            raise ValueError(f"engine is {self.engine!r}; it must be one of {', '.join([*Engine, *brought])}")
        if self.block_nbytes is not None and (self.block_nbytes <= 0 or not is_aligned(self.block_nbytes)):
            raise ValueError(f"block_nbytes is {self.block_nbytes}; it must be a positive multiple of 4096")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")
        if self.calibrate not in list(Calibrate):
            raise ValueError(f"calibrate is {self.calibrate!r}; it must be one of {', '.join(Calibrate)}")
        if self.free_margin_nbytes < 0:
            raise ValueError(f"free_margin_nbytes is {self.free_margin_nbytes}; it must not be negative")
        if self.checksum not in list(Checksum):
            raise ValueError(f"checksum is {self.checksum!r}; it must be one of {', '.join(Checksum)}")
        if self.eio_retries < 0:
            raise ValueError(f"eio_retries is {self.eio_retries}; it must not be negative")
        if self.write_memory_nbytes is not None and self.write_memory_nbytes <= 0:
            raise ValueError(f"write_memory_nbytes is {self.write_memory_nbytes}; it must be positive")
        if self.files_nbytes is not None and self.files_nbytes < 0:
            raise ValueError(f"files_nbytes is {self.files_nbytes}; it must not be negative")
        if not 0 <= self.retry_full_s < math.inf:
            raise ValueError(f"retry_full_s is {self.retry_full_s}; it must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Drive:
    """One directory of a store. Each has its own backend, so that a slow drive does not hold up the others."""

    directory: Path
    file: SwapFile
    backend: Backend
    reason: str


def open_drive(
    directory: Path,
    nbytes: int,
    *,
    run_name: str,
    rank: int,
    options: StorageOptions,
    wrap_backend: WrapBackend | None,
    closing: ExitStack,
) -> Drive:
    """Make the run folder, swap file and backend of a directory; `closing` undoes it, last made first.

    Raises:
        SwapFullError: too little space.
        StorageError: the directory cannot be used, or cannot do what `options.engine` insists on.
    """
    try:
        folder = RunFolder(directory, run_name)
        closing.callback(folder.remove)
        engine, reason = choose_engine(folder.path, options.engine)
        file = SwapFile(
            folder.path / f"rank{rank}.swap",
            nbytes,
            direct=engine.opens_direct,
            free_margin_nbytes=options.free_margin_nbytes,
        )
    except OSError as error:
        raise make_directory_error(directory, error) from error
    closing.callback(file.close)
    backend = start_backend(folder.path, engine, reason, options=options, wrap_backend=wrap_backend, closing=closing)
    return Drive(directory, file, backend, reason)


def start_backend(
    folder: Path,
    engine: Engine | CustomEngine,
    reason: str,
    *,
    options: StorageOptions,
    wrap_backend: WrapBackend | None,
    closing: ExitStack,
) -> Backend:
    """The backend of a folder's drive, with the settings that suit the drive; `closing` closes it.

    Args:
        reason: why this engine; logged with the settings and their reason.
    """
    tuning = choose_tuning(folder, engine, options)
    try:
        backend = _make_backend(tuning.engine, tuning, options)
    except StorageError as error:
        if options.engine != Engine.AUTO:
            raise
        _log.warning("%s: %s. Threads are used instead", folder, error)
        backend = _make_backend(engine, tuning, options)
    try:
        used = backend if wrap_backend is None else wrap_backend(backend)
    except BaseException:
        backend.close()
        raise
    closing.callback(used.close)
    _log.info("files in %s: %s I/O (%s), %s", folder, used.name, reason, tuning.reason)
    return used


def _make_backend(engine: Engine | CustomEngine, tuning: Tuning, options: StorageOptions) -> Backend:
    return make_backend(
        engine,
        threads=tuning.threads,
        block_nbytes=tuning.block_nbytes,
        eio_retries=options.eio_retries,
        write_memory_nbytes=options.write_memory_nbytes,
    )


@dataclass(frozen=True, slots=True)
class Tuning:
    """Engine, bytes of a block and number of them at a drive at the same time, and why."""

    engine: Engine | CustomEngine
    block_nbytes: int
    threads: int
    reason: str


def spare_workers(found: Calibration) -> int:
    """Threads beside the measured ones, at most as many, see [Note: workers between blocks]."""
    blocks_per_s = found.read_nbytes_per_s / found.block_nbytes
    return min(found.threads, int(blocks_per_s * sys.getswitchinterval()))


def choose_tuning(folder: Path, engine: Engine | CustomEngine, options: StorageOptions) -> Tuning:
    """What is set, else what was measured of the drive, else the defaults.

    Args:
        engine: what the folder can do. "auto" has chosen DIRECT where both direct engines work; then the faster or
            cheaper of them is taken if the drive was measured.
    """
    is_set = options.block_nbytes is not None or options.threads is not None
    found = None if is_set else find_calibration(folder, engine.value, Calibrate(options.calibrate))
    if found is not None:
        takes_best = options.engine == Engine.AUTO and (found.best_engine != Engine.AIO or why_not() is None)
        best = Engine(found.best_engine) if takes_best else engine
        if best is Engine.AIO:
            return Tuning(best, found.block_nbytes, found.threads, found.reason)
        spare = spare_workers(found)
        reason = f"{found.reason}; {spare} more threads, for those that wait for a core" if spare else found.reason
        return Tuning(best, found.block_nbytes, found.threads + spare, reason)
    is_aio = engine is Engine.AIO
    block_nbytes = options.block_nbytes or (DEFAULT_AIO_BLOCK_NBYTES if is_aio else DEFAULT_BLOCK_NBYTES)
    threads = options.threads or (DEFAULT_AIO_DEPTH if is_aio else DEFAULT_THREADS)
    many = f"{threads} at a time" if is_aio else f"on {threads} threads"
    reason = f"blocks of {block_nbytes} bytes {many} ({'set' if is_set else 'default'})"
    return Tuning(engine, block_nbytes, threads, reason)
