"""Where swap files go: the directories that were given, or a temporary one that is really on a disk."""

from __future__ import annotations

import atexit
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.filesystems import find_file_system
from storage.forks import in_this_process

TEMPORARY_PREFIX = "infinity-swap-"
_log = logging.getLogger(__name__)
_FOLDER_OF_RANK = re.compile(r"rank(\d+)")
_ON_DISK = Path("/var/tmp")


@contextmanager
def swap_directories(paths: Sequence[Path] | None, *, rank: int | None = None) -> Iterator[Sequence[Path]]:
    """The given directories; without any, a temporary one, removed afterwards or at exit.

    Each of several ranks gets a folder of its own in every directory that was given.

    Where the system's temporary directory lies in memory, which would make swapping to it pointless, `/var/tmp` is
    used instead.
    """
    if paths is not None:
        if rank is None:
            yield paths
            return
        own = [directory_of_rank(path, rank) for path in paths]
        for path in own:
            path.mkdir(parents=True, exist_ok=True)
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
