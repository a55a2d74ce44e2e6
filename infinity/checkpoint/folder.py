"""A folder that appears whole or not at all, in place of what was there before.

The new content is made in a hidden folder beside it, `.<name>.infinity-saving`. When everything is on the drive the two
change places in one system call, and then what was there before is removed. A crash at any moment leaves either the old
folder or the new one under the name, never a mixture. (On a file system that cannot exchange two names it may leave the
old one as `.<name>.before`.)

A process that is killed leaves what it was making. Whoever saves next into the same parent removes it, and so does
`infinity clean`: the maker of a folder holds its lock as long as it lives, so one that can be locked has no maker.
Locks of file systems that several machines share may not be seen by all of them, so nothing is removed there but what
is in the way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import CheckpointError
from storage.cleanup import disk_nbytes
from storage.errors import StorageError
from storage.filesystems import Kind, find_file_system, make_folders, sync_folder

_log = logging.getLogger(__name__)
_SAVING = ".infinity-saving"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# How file systems answer that do not lock folders, such as those of a network; there nobody else may save to the path.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_LOCAL = (Kind.DISK, Kind.COPY_ON_WRITE, Kind.MEMORY, Kind.LAYERS)
# Whoever removes what a killed process left holds its lock for a moment.
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 20, 0.01


@contextmanager
def replaced_folder(
    path: Path, is_replaceable: Callable[[Path], bool], *, kind: str = "a checkpoint"
) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `path` at the end of the block; after a failure it is removed.

    Args:
        path: where the folder shall be. Parents are made.
        is_replaceable: whether a folder that is already there may be replaced.
        kind: what such a folder is, for the refusal of another one.

    Raises:
        CheckpointError: something else is at `path`, another process is saving there, or writing failed.
    """
    path = Path(os.path.abspath(path))
    refuse_other(path, is_replaceable, kind=kind)
    made = made_for(path)
    with writing(path):
        make_folders(path.parent)
        with ExitStack() as locks:
            locked = [_lock(made, path, is_to_make=True)]
            locks.callback(os.close, locked[0])
            _remove_left(path.parent)
            try:
                _empty(made)
                yield made
                sync_folder(made)
                if path.exists():  # in a moment it is at `made`, which another process might take over
                    locked.append(_lock(path, path))
                    locks.callback(os.close, locked[-1])
                _swap(made, path)
                sync_folder(path.parent)
                shutil.rmtree(before_of(path), ignore_errors=True)
            finally:
                _remove_own(made, locked)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a part of what shall be at `path`.

    Raises:
        CheckpointError: the system refused something.
    """
    try:
        yield
    except StorageError:
        raise  # a swap file, not the checkpoint; it says so itself
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
            + ("; the one that was there before is untouched" if path.exists() else "")
        ) from error


def refuse_other(path: Path, is_replaceable: Callable[[Path], bool], *, kind: str = "a checkpoint") -> None:
    """Refuse a path where something is that may not be replaced. Raises CheckpointError."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and _is_empty(path)):
        return
    if path.is_symlink() or not path.is_dir() or not is_replaceable(path):
        raise CheckpointError(f"{path} is there and is not {kind}, so it is not replaced; give another path")


def _is_empty(path: Path) -> bool:
    return next(path.iterdir(), None) is None


def made_for(path: Path) -> Path:
    """Where the folder that shall be at `path` is made."""
    return path.parent / f".{path.name}{_SAVING}"


def _lock(folder: Path, path: Path, *, is_to_make: bool = False) -> int:
    """A descriptor that locks a folder until it is closed. One that a killed process left is not locked.

    Args:
        is_to_make: the folder is made if it is not there.

    Raises:
        CheckpointError: another process, which is saving to `path`, has the lock.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        if attempt:
            time.sleep(_LOCK_PAUSE_S)
        if is_to_make:
            folder.mkdir(exist_ok=True)
        fd = _try_lock(folder)
        if fd is not None:
            return fd
    raise CheckpointError(f"another process is saving to {path}; give another path")


def _try_lock(folder: Path, *, is_needed: bool = False) -> int | None:
    """As `_lock`; None if somebody else has the lock, or the folder has gone.

    Args:
        is_needed: None also where the file system has no locks, instead of a descriptor that locks nothing.
    """
    with ExitStack() as undo:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            undo.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), folder.stat()):  # whoever had the lock may have renamed it
                return None
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if is_needed:
                return None
        undo.pop_all()
    return fd


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A folder in which somebody was making one.

    Attributes:
        why_left: None when it has been removed.
    """

    path: Path
    nbytes: int
    why_left: str | None


def remove_unfinished(parent: Path) -> list[Unfinished]:
    """Remove what killed processes were making in a folder: what was found there, by name.

    Raises:
        OSError: one cannot be removed.
    """
    found = []
    for path in sorted(parent.glob(f".*{_SAVING}")):
        with suppress(FileNotFoundError):  # whoever was making it is done
            if path.is_dir() and not path.is_symlink():
                found.append(Unfinished(path, disk_nbytes(path), _remove_one(path)))
    return found


def _remove_left(parent: Path) -> None:
    """The same for whoever saves there. What goes wrong with that is logged: saving goes on."""
    try:
        for left in remove_unfinished(parent):
            if left.why_left is None:
                _log.warning("removed %s, which a process that was killed had not finished", left.path)
    except OSError as error:
        _log.warning("what a killed process left in %s could not be removed: %s", parent, error)


def _remove_one(left: Path) -> str | None:
    """Why it stays; None when it has been removed."""
    if find_file_system(left.parent).kind not in _LOCAL:
        return "another machine may be saving there"
    if left.stat().st_uid != os.geteuid():
        return "it belongs to another user"
    fd = _try_lock(left, is_needed=True)
    if fd is None:
        return "a process is saving there"
    try:
        # Out of the way of whoever saves under its name now; and if this process is killed, the next one removes it.
        mine = left.with_name(f".{os.getpid()}-{secrets.token_hex(4)}{_SAVING}")
        left.rename(mine)
        shutil.rmtree(mine)
    finally:
        os.close(fd)
    return None


def _remove_own(folder: Path, locked: Sequence[int]) -> None:
    """Remove a folder if it is one that is locked here: under a name that is free again another process may save."""
    with suppress(OSError):  # the next save removes it then
        there = folder.stat()
        if any(os.path.samestat(os.fstat(fd), there) for fd in locked):
            shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _swap(made: Path, path: Path) -> None:
    """Put `made` in the place of `path`; what was there before is at `made` afterwards, or at `before_of(path)`."""
    if not path.exists():
        made.rename(path)
    elif not _exchange(made, path):
        before = before_of(path)
        shutil.rmtree(before, ignore_errors=True)
        path.rename(before)
        try:
            made.rename(path)
        except OSError:
            before.rename(path)
            raise


def before_of(path: Path) -> Path:
    """Where the old folder is for a moment, on file systems that cannot exchange two names."""
    path = Path(os.path.abspath(path))  # "." has no name of its own
    return path.parent / f".{path.name}.before"


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))
