"""Where swap files go: the directories that were given, or a temporary one that is really on a disk."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from storage.filesystems import find_file_system, find_mount
from storage.forks import in_this_process
from storage.swapfile import make_directory_error

TEMPORARY_PREFIX = "infinity-swap-"
_log = logging.getLogger(__name__)
_FOLDER_OF_RANK = re.compile(r"rank(\d+)")
_ON_DISK = Path("/var/tmp")


@contextmanager
def swap_directories(paths: Sequence[Path] | None, *, rank: int | None = None) -> Iterator[Sequence[Path]]:
    """The given directories; without any, a temporary one, removed afterwards or at exit.

    One that is missing is made, and told with where it lies. Each of several ranks gets a folder of its own in every
    directory that was given.

    Where the system's temporary directory lies in memory, which would make swapping to it pointless, `/var/tmp` is
    used instead.

    Raises:
        ConfigError: the folder in which one should lie is missing too.
        StorageError: one cannot be made.
    """
    if paths is not None:
        for path in paths:  # one after the other: one may lie in the one before
            _check_directory(path)
            _make_directory(path)
        if rank is None:
            yield paths
            return
        own = [directory_of_rank(path, rank) for path in paths]
        for path in own:
            with _told(path):
                path.mkdir(exist_ok=True)
        try:
            yield own
        finally:
            for path in own:
                with suppress(OSError):  # not empty: whoever put something there keeps it
                    path.rmdir()
        return
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=default_directory()))

    @in_this_process
    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    try:
        yield (folder,)
    finally:
        atexit.unregister(remove)
        remove()


def _make_directory(path: Path) -> None:
    """Make a directory that was given, if it is missing.

    It may be a slip, or the drive that belongs there is not mounted: then swap files would wear out another drive. So
    only one level is made, and where that is gets told.
    """
    if path.is_dir():
        return
    with _told(path):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():  # else another rank has made it
                raise
            return
        free = format_nbytes(shutil.disk_usage(path).free)
    _log.warning(
        "nvme.paths: %s did not exist and was made, %s with %s free. If a drive should be mounted there, stop this run "
        "and mount it",
        *(path, _place_of(path), free),
    )


def check_directories(paths: Sequence[Path] | None) -> None:
    """Refuse given directories that could not be made. Makes nothing: a run that fits in memory needs none.

    Raises:
        ConfigError: the folder in which one should lie is missing too.
        StorageError: one is a file.
    """
    to_make: set[Path] = set()
    for path in paths or ():
        _check_directory(path, to_make)
        to_make.add(path.absolute())


def _check_directory(path: Path, to_make: Container[Path] = ()) -> None:
    """Args: to_make: what will be there by then."""
    parent = path.absolute().parent
    if not path.is_dir() and not parent.is_dir() and parent not in to_make:
        raise ConfigError(
            f"nvme.paths: {path} cannot be made, because there is no folder {parent} to make it in. Check the "
            f"spelling, and whether the drive is mounted; if it shall lie there: mkdir -p {shlex.quote(str(path))}"
        )
    if path.exists() and not path.is_dir():  # in this order: another rank may be making it
        raise make_directory_error(path, FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)))


def _place_of(path: Path) -> str:
    """On which file system a directory lies, for people."""
    mount = find_mount(path)
    if mount is None:
        return f"on the file system of {path.absolute().parent}"
    of = f" ({mount.source})" if mount.source not in ("", "none", mount.type_name) else ""
    return f"on the {mount.type_name}{of} that is mounted at {mount.point}"


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise make_directory_error(path, error) from error


def directory_of_rank(path: Path, rank: int) -> Path:
    """The folder of one rank among several in a directory that was given."""
    return path / f"rank{rank}"


def folders_of_ranks(path: Path) -> list[Path]:
    """The folders of ranks that are in a directory that was given, by the number of the rank."""
    if not path.is_dir():
        return []
    ranks = [int(match[1]) for inside in path.iterdir() if (match := _FOLDER_OF_RANK.fullmatch(inside.name))]
    folders = [directory_of_rank(path, rank) for rank in sorted(ranks)]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def default_directory() -> Path:
    """The directory for temporary swap files."""
    usual = Path(tempfile.gettempdir())
    if not find_file_system(usual).is_memory:
        return usual
    if _ON_DISK.is_dir() and not find_file_system(_ON_DISK).is_memory:
        return _ON_DISK
    _log.warning("%s is in memory, not on a disk; give nvme.paths a directory on a drive", usual)
    return usual
