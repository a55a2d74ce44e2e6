"""A folder that appears whole or not at all, in place of what was there before.

The new content is made in a hidden folder beside it, `.<name>.saving`. When everything is on the drive the two change
places in one system call, and then what was there before is removed. A crash at any moment leaves either the old folder
or the new one under the name, never a mixture. (On a file system that cannot exchange two names it may leave the old
one as `.<name>.before`.)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from infinity.errors import CheckpointError
from storage.errors import StorageError
from storage.filesystems import make_folders, sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# How file systems answer that do not lock folders, such as those of a network; there nobody else may save to the path.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def replaced_folder(path: Path, is_replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `path` at the end of the block; after a failure it is removed.

    Args:
        path: where the folder shall be. Parents are made.
        is_replaceable: whether a folder that is already there may be replaced.

    Raises:
        CheckpointError: something else is at `path`, another process is saving there, or writing failed.
    """
    path = Path(os.path.abspath(path))
    refuse_other(path, is_replaceable)
    made = path.parent / f".{path.name}.saving"
    with writing(path):
        make_folders(path.parent)
        made.mkdir(exist_ok=True)
        with ExitStack() as locks:
            locks.callback(os.close, _lock(made, path))
            try:
                _empty(made)
                yield made
                sync_folder(made)
                if path.exists():  # in a moment it is at `made`, which another process might take over
                    locks.callback(os.close, _lock(path, path))
                _swap(made, path)
                sync_folder(path.parent)
                shutil.rmtree(before_of(path), ignore_errors=True)
            finally:
                shutil.rmtree(made, ignore_errors=True)


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
            f"the checkpoint {path} could not be written: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
            + ("; the one that was there before is untouched" if path.exists() else "")
        ) from error


def refuse_other(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    """Refuse a path where something is that may not be replaced. Raises CheckpointError."""
    if not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and _is_empty(path)):
        return
    if path.is_symlink() or not path.is_dir() or not is_replaceable(path):
        raise CheckpointError(f"{path} is there and is not a checkpoint, so it is not replaced; give another path")


def _is_empty(path: Path) -> bool:
    return next(path.iterdir(), None) is None


def _lock(folder: Path, path: Path) -> int:
    """A descriptor that locks a folder until it is closed. One that a killed process left is not locked.

    Raises:
        CheckpointError: another process, which is saving to `path`, has the lock.
    """
    with ExitStack() as undo:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.path.samestat(os.fstat(fd), folder.stat())  # whoever had the lock may have renamed it
        except BlockingIOError:
            is_mine = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_mine = True
        if not is_mine:
            raise CheckpointError(f"another process is saving to {path}; give another path")
        undo.pop_all()
    return fd


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
    return path.with_name(f".{path.name}.before")


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
