"""The file a drive is measured with: private, of a modest size, gone afterwards whatever happens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.sizes import GIB, MIB, format_nbytes
from storage.backends.probe import probe_folder
from storage.errors import StorageError
from storage.filesystems import FileSystem, sync_data
from storage.swapfile import RunFolder, SwapFile, make_directory_error

DEFAULT_NBYTES = GIB
_LEAST_NBYTES = 64 * MIB
_GRAIN_NBYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Target:
    """A file on one drive.

    Attributes:
        directory: as given.
        file: preallocated; opened with O_DIRECT where the directory can do it.
        nbytes: its size.
        direct_problem: why O_DIRECT does not work there; None when it does.
        file_system: such as "ext4"; "" when unknown.
        notes: what a reader of the figures should know.
    """

    directory: Path
    file: SwapFile
    nbytes: int
    direct_problem: str | None
    file_system: str
    notes: tuple[str, ...]

    @property
    def path(self) -> str:
        return str(self.file.path)

    def drop_cache(self) -> None:
        """Forget what the page cache holds of the file, so that buffered reads come from the drive."""
        fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync_data(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Wait until what was written is on the drive."""
        fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync_data(fd)
        finally:
            os.close(fd)


def check_directory(directory: Path) -> None:
    """
    Raises:
        ConfigError: it is none.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: {'not a directory' if directory.exists() else 'there is no such directory'}")


def margin_nbytes(directory: Path) -> int:
    """Bytes that stay free: a twentieth of the file system, but at least 256 MiB and at most 2 GiB."""
    return min(max(shutil.disk_usage(directory).total // 20, 256 * MIB), 2 * GIB)


def choose_nbytes(directory: Path, wanted_nbytes: int | None) -> int:
    """The size of the file, whole 16 MiB: as wanted, or the default, smaller where little is free.

    Raises:
        ConfigError: there is too little room; says need and have.
    """
    if wanted_nbytes is not None:
        wanted_nbytes = max(wanted_nbytes // _GRAIN_NBYTES, 1) * _GRAIN_NBYTES
    free_nbytes = shutil.disk_usage(directory).free
    room_nbytes = free_nbytes - margin_nbytes(directory)
    need_nbytes = wanted_nbytes if wanted_nbytes is not None else _LEAST_NBYTES
    if need_nbytes > room_nbytes:
        raise ConfigError(
            f"{directory}: the test file needs {format_nbytes(need_nbytes)} and a margin of "
            f"{format_nbytes(margin_nbytes(directory))}, but only {format_nbytes(free_nbytes)} are free there. "
            "Free space, choose another directory, or give a smaller --size"
        )
    if wanted_nbytes is not None:
        return wanted_nbytes
    return min(DEFAULT_NBYTES, room_nbytes // 4 // _GRAIN_NBYTES * _GRAIN_NBYTES or _LEAST_NBYTES)


@contextmanager
def open_target(directory: Path, wanted_nbytes: int | None = None) -> Iterator[Target]:
    """A file in a private folder of `directory`; both are removed at the end, also after an error or Ctrl-C.

    Raises:
        ConfigError: not a directory, or too little room.
        StorageError: the directory cannot be written to.
    """
    check_directory(directory)
    nbytes = choose_nbytes(directory, wanted_nbytes)
    with ExitStack() as closing:
        try:
            folder = RunFolder(directory, "bench")
            closing.callback(folder.remove)
            found = probe_folder(folder.path)
            problem, file_system = found.direct_problem, found.file_system
            margin = margin_nbytes(directory)
            file = SwapFile(folder.path / "bench.data", nbytes, direct=problem is None, free_margin_nbytes=margin)
            closing.callback(file.close)
        except StorageError:
            raise
        except OSError as error:
            raise make_directory_error(directory, error) from error
        notes = _notes(file_system, problem, nbytes, wanted_nbytes)
        yield Target(directory, file, nbytes, problem, file_system.name, notes)


def _notes(file_system: FileSystem, problem: str | None, nbytes: int, wanted_nbytes: int | None) -> tuple[str, ...]:
    notes = [file_system.note] if file_system.note else []
    if problem is not None:
        notes.append(f"no direct I/O: {problem}")
    if wanted_nbytes is None and nbytes < DEFAULT_NBYTES:
        notes.append(f"little space is free: the file has only {format_nbytes(nbytes)}")
    return tuple(notes)
