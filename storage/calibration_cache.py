"""Measurements of drives, kept from run to run: one small JSON file per drive in the user's cache folder.

A file is written beside its name and then renamed, so that processes that write at the same time leave one whole
result, and readers need no lock. What cannot be read, is of another drive or procedure, or is old, counts as not there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import xxhash
from pydantic import TypeAdapter, ValidationError

from storage.align import is_aligned
from storage.backends.probe import Engine
from storage.calibration import PROCEDURE, Calibration, calibrate
from storage.devices import identify_device
from storage.errors import StorageError

_log = logging.getLogger(__name__)

_MOST_AGE_S = 90 * 86400.0  # drives wear and fill up
_LOCK_TIMEOUT_S = 30.0  # a measurement takes seconds
_LOCK_POLL_S = 0.05
_SANE_BLOCK_NBYTES, _SANE_THREADS = 1 << 30, 1024


class Calibrate(StrEnum):
    """Where block size and threads come from when they are not set."""

    CACHED = "cached"  # from a measurement, if one was made of the drive
    MISSING = "missing"  # the same; a drive that was not measured yet is measured now
    OFF = "off"


class CalibrationCache:
    """Results by drive and engine.

    Args:
        folder: default `infinity/drives` in $XDG_CACHE_HOME, else in ~/.cache.
        now_s: seconds since 1970.
    """

    def __init__(self, folder: Path | None = None, now_s: Callable[[], float] = time.time) -> None:
        self.folder = default_folder() if folder is None else folder
        self._now_s = now_s

    def path_of(self, device: str, engine: str) -> Path:
        """Where the result of a drive is."""
        digest = xxhash.xxh3_64_hexdigest(f"{device} {engine}".encode())
        return self.folder / f"{digest}.json"

    def find(self, device: str, engine: str) -> Calibration | None:
        """What was measured of a drive, if it is still good."""
        path = self.path_of(device, engine)
        try:
            found = TypeAdapter(Calibration).validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            _log.warning("%s is ignored, it is damaged: %s", path, str(error).partition("\n")[0])
            return None
        is_sane = (
            0 < found.block_nbytes <= _SANE_BLOCK_NBYTES
            and is_aligned(found.block_nbytes)
            and 0 < found.threads <= _SANE_THREADS
            and found.read_nbytes_per_s > 0
            and found.write_nbytes_per_s > 0
            and found.best_engine in (Engine.DIRECT, Engine.AIO)
        )
        is_same = (found.device, found.engine, found.procedure) == (device, engine, PROCEDURE)
        is_fresh = 0 <= self._now_s() - found.measured_s <= _MOST_AGE_S
        return found if is_sane and is_same and is_fresh else None

    def keep(self, calibration: Calibration) -> Path:
        """Write a result; where it is now.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = self.path_of(calibration.device, calibration.engine)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".json", delete=False) as file:
            try:
                file.write(TypeAdapter(Calibration).dump_json(calibration, indent=2))
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        return path

    @contextmanager
    def measuring(self, device: str, engine: str) -> Iterator[bool]:
        """Held by one process at a time per drive; False when another one still measures after a while.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.path_of(device, engine).with_suffix(".lock")
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _lock_within(fd, _LOCK_TIMEOUT_S)
        finally:
            os.close(fd)


def default_folder() -> Path:
    """The user's cache folder for measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infinity" / "drives"


def _lock_within(fd: int, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:
            return True  # a file system without locks: two may measure at once, which only makes both slower


def find_calibration(
    directory: Path, engine: str, mode: Calibrate, cache: CalibrationCache | None = None
) -> Calibration | None:
    """What is known of the drive under a directory; with MISSING it is measured when nothing is.

    A drive that cannot be measured, or a cache that cannot be written, is no reason not to run: it is logged.
    """
    if mode is Calibrate.OFF or engine != "direct":
        return None
    cache = cache or CalibrationCache()
    try:
        device = identify_device(directory)
    except OSError:
        return None
    found = cache.find(device, engine)
    if found is not None or mode is not Calibrate.MISSING:
        return found
    try:
        with cache.measuring(device, engine) as is_mine:
            found = cache.find(device, engine)
            if found is not None or not is_mine:
                return found
            found = calibrate(directory)
            cache.keep(found)
    except (OSError, StorageError) as error:
        _log.warning("the drive of %s was not calibrated: %s", directory, error)
    return found


def speeds_of(directories: Sequence[Path], cache: CalibrationCache | None = None) -> list[float] | None:
    """Bytes per second of each directory's drive, reads and writes in equal parts; None unless all were measured."""
    speeds = []
    for directory in directories:
        found = find_calibration(directory, "direct", Calibrate.CACHED, cache)
        if found is None:
            return None
        speeds.append(2 / (1 / found.read_nbytes_per_s + 1 / found.write_nbytes_per_s))
    return speeds
