"""`infinity bench calibrate`: measure drives shortly, keep what was found, show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from infinity.bench.target import check_directory
from infinity.cli.console import make_console
from infinity.cli.files import check_files, write_json
from infinity.sizes import format_nbytes
from infinity.swap_directories import default_directory
from storage.calibration import MOST_WRITTEN_NBYTES, Calibration, calibrate
from storage.calibration_cache import CalibrationCache
from storage.errors import StorageError


def run(paths: Sequence[Path], report: Path | None) -> None:
    """Calibrate the drives one after the other.

    Raises:
        ConfigError: a directory or the report's folder does not exist, or the result cannot be written.
        StorageError: a drive cannot be measured. Those before it have been, and are kept.
    """
    paths = paths or (default_directory(),)
    for path in paths:
        check_directory(path)
    check_files(json=report)
    console, cache = make_console(), CalibrationCache()
    found: dict[str, Calibration] = {}
    console.print(f"each drive is written to, at most {format_nbytes(MOST_WRITTEN_NBYTES)}")
    for path in paths:
        with console.status(escape(f"measuring {path}")):
            found[str(path)] = calibrate(path)
        try:
            kept = cache.keep(found[str(path)])
        except OSError as error:
            raise StorageError(
                f"{path}: {found[str(path)].reason}. But it cannot be kept in {cache.folder}: {error.strerror}. "
                "Set XDG_CACHE_HOME to a folder you can write to, or set nvme.block_nbytes and nvme.threads"
            ) from error
        console.print(f"{path}: {found[str(path)].reason}\n  kept in {kept}", soft_wrap=True)
    write_json(report, {path: asdict(one) for path, one in found.items()})
