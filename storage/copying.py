"""Copying ranges between files without passing them through this process, where the system can.

Tried in this order, for every pair of file systems once: sharing the blocks (reflink, `FICLONERANGE`: nothing moves),
copying inside the kernel (`copy_file_range`), and reading and writing here. What a system refuses is not tried again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections import Counter
from enum import StrEnum

from storage.errors import ReadError

_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range), as on x86 and ARM
_REFUSALS = {
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS),
    *(errno.EPERM, errno.ETXTBSY),  # immutable files, files used for paging
}
_STEP_NBYTES = 16 << 20  # of one call, so that another thread can end the process in between
_BUFFER_NBYTES = 1 << 20


class CopyMethod(StrEnum):
    """How bytes get from one file to another, best first."""

    REFLINK = "reflink"
    KERNEL = "copy_file_range"
    PLAIN = "read and write"


class RangeCopier:
    """Copies ranges by the best method that works; used by one thread at a time.

    Args:
        methods: those to try, best first; for tests and for systems whose answer is known. `PLAIN` always works.

    Attributes:
        nbytes: bytes copied, by method.
    """

    def __init__(self, methods: tuple[CopyMethod, ...] = tuple(CopyMethod)) -> None:
        self.nbytes: Counter[CopyMethod] = Counter()
        self._methods = methods
        self._refused: set[tuple[CopyMethod, int, int]] = set()

    def copy(self, source: int, offset: int, target: int, target_offset: int, nbytes: int) -> CopyMethod:
        """Copy a range between two open files; how it was done. Offsets and size are page multiples.

        Raises:
            ReadError: the source ends inside the range.
            OSError: it could not be read or written.
        """
        between = (os.fstat(source).st_dev, os.fstat(target).st_dev)
        for method in self._methods:
            if method is CopyMethod.PLAIN or (method, *between) in self._refused:
                continue
            try:
                if method is CopyMethod.REFLINK:
                    share = struct.pack("qQQQ", source, offset, nbytes, target_offset)
                    fcntl.ioctl(target, _FICLONERANGE, share)
                else:
                    _copy_in_kernel(source, offset, target, target_offset, nbytes)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._refused.add((method, *between))
                continue
            self.nbytes[method] += nbytes
            return method
        _copy_here(source, offset, target, target_offset, nbytes)
        self.nbytes[CopyMethod.PLAIN] += nbytes
        return CopyMethod.PLAIN


def _copy_in_kernel(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> None:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done = 0
    while done < nbytes:
        step = min(nbytes - done, _STEP_NBYTES)
        count = os.copy_file_range(source, target, step, offset + done, target_offset + done)
        if count == 0:
            raise _ended(source, offset + done)
        done += count


def _copy_here(source: int, offset: int, target: int, target_offset: int, nbytes: int) -> None:
    buffer = memoryview(bytearray(min(nbytes, _BUFFER_NBYTES)))
    done = 0
    while done < nbytes:
        count = read_some(source, buffer[: min(nbytes - done, len(buffer))], offset + done)
        if count == 0:
            raise _ended(source, offset + done)
        write_all(target, buffer[:count], target_offset + done)
        done += count


def read_some(fd: int, memory: memoryview, offset: int) -> int:
    """Read into memory from an offset, as much as one call gives; how many bytes, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [memory], offset)
    data = os.pread(fd, len(memory), offset)
    memory[: len(data)] = data
    return len(data)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at an offset, however many calls it takes."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _ended(source: int, offset: int) -> ReadError:
    try:
        path = os.readlink(f"/proc/self/fd/{source}")
    except OSError:
        path = ""
    return ReadError(f"{path or 'a file'} ends at offset {offset}, inside what is to be copied", path=path)
