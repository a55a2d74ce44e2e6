"""What the backends that make system calls share: calls that are resumed and retried, and readable errors."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.align import PAGE_NBYTES, align_down
from storage.errors import IoError, ReadError, ShortIoError, SwapFullError, WriteError, causes_of
from storage.types import IoRequest, Op

_log = logging.getLogger(__name__)

_MAX_RETRIES = 100
_RETRY_DELAY_S = 0.001
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

VectorCall = Callable[[int, Sequence[memoryview], int], int]


def _missing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.ENOSYS, "this system has no preadv and pwritev")


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls that move bytes, as (fd, buffers, offset) → bytes moved. Tests put others in."""

    preadv: VectorCall = os.preadv if hasattr(os, "preadv") else _missing
    pwritev: VectorCall = os.pwritev if hasattr(os, "pwritev") else _missing


def move(calls: SystemCalls, request: IoRequest, start: int, stop: int, *, eio_retries: int = 0) -> None:
    """Transfer bytes `start` to `stop` of a request's memory; short and interrupted transfers are resumed.

    EIO is tried again `eio_retries` times: drives recover from some errors, and more patience only hides a dying one.

    Raises:
        ReadError, WriteError, SwapFullError, ShortIoError: what the system answered, and where.
    """
    call = calls.preadv if request.op is Op.READ else calls.pwritev
    retries = eio_count = 0
    memory = request.memory
    while start < stop:
        # Most small transfers are one block: then their memory needs no slice.
        part = memory if not start and stop == len(memory) else memory[start:stop]
        try:
            moved = call(request.fd, (part,), request.offset + start)
        except (InterruptedError, BlockingIOError) as error:
            retries += 1
            if retries > _MAX_RETRIES:
                raise io_error(request, start, stop, error) from error
            time.sleep(_RETRY_DELAY_S)
            continue
        except OSError as error:
            eio_count += error.errno == errno.EIO
            if error.errno == errno.EIO and eio_count <= eio_retries:
                _log.warning("%s of %r: EIO at %d of %s", request.op.value, request.key, start, request.path)
                continue
            raise io_error(request, start, stop, error) from error
        if moved <= 0:
            raise short_error(request, start, stop)
        if start + moved < stop:
            # O_DIRECT refuses a ragged start: what is left of a page is transferred again. A call that never gets past
            # its first page is given up like one that moves nothing.
            moved = align_down(moved, PAGE_NBYTES)
            retries += 1
            if retries > _MAX_RETRIES and not moved:
                raise short_error(request, start, stop)
        start += moved


def io_error(request: IoRequest, start: int, stop: int, error: OSError) -> IoError | SwapFullError:
    """The storage error for a system error on bytes `start` to `stop` of a request's memory."""
    offset, nbytes = request.offset + start, stop - start
    if request.op is Op.WRITE and error.errno in _FULL:
        return SwapFullError(
            f"no room to write {nbytes} bytes of {request.key!r} at offset {offset} of {request.path}: "
            f"{os.strerror(error.errno)}. Free space there; the data is still in memory",
            path=request.path,
            offset=offset,
            nbytes=nbytes,
            errno=error.errno,
            key=request.key,
        )
    kind = ReadError if request.op is Op.READ else WriteError
    return kind(path=request.path, offset=offset, nbytes=nbytes, errno=error.errno, key=request.key)


def without_frames(error: BaseException) -> BaseException:
    """The error without the worker's frames, which would keep the memory of the transfer alive as long as itself."""
    for one in causes_of(error, with_contexts=True):
        one.__traceback__ = None
    return error


def short_error(request: IoRequest, start: int, stop: int) -> ShortIoError:
    """The error for a transfer that ended before `stop` and cannot be resumed."""
    offset, nbytes = request.offset + start, stop - start
    return ShortIoError(
        f"{request.op.value} of {request.key!r} ended at offset {offset} of {request.path}, {nbytes} bytes early: "
        "the file is shorter than what was stored in it. Another program may have cut it",
        path=request.path,
        offset=offset,
        nbytes=nbytes,
        key=request.key,
    )
