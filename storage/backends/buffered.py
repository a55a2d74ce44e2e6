"""Buffered transfers through aiofiles: the portable path, for file systems and systems without O_DIRECT.

One asyncio loop on its own thread runs a few workers over the same kind of queue as `direct`. Every worker has its own
file object per file, because the position of a file object is shared by everybody who uses it.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any, Unpack

import aiofiles

from storage.backends.loop_thread import LoopThread, close_files
from storage.backends.serving import QueuedBackend, QueueOptions
from storage.backends.system import io_error, short_error, without_frames
from storage.errors import IoError
from storage.types import IoRequest, Op


class BufferedBackend(QueuedBackend):
    """Serves requests with `seek`, `readinto` and `write` on aiofiles' threads.

    Of its CPU time only the loop's is measured, not what aiofiles' threads do in Python.

    Args:
        threads: blocks transferred at the same time.
        block_nbytes: bytes of one read or write.
        options: see `QueueOptions`.
    """

    name = "buffered"
    opens_direct = False

    def __init__(self, *, threads: int, block_nbytes: int, **options: Unpack[QueueOptions]) -> None:
        super().__init__(costs=1, block_nbytes=block_nbytes, **options)
        (self._cost,) = self._costs
        self._has_work = asyncio.Event()
        self._is_closing = False
        self._loop = LoopThread(self._serve, threads, "infinity-io-buffered")
        self._start([self._loop.thread])

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)
        self._loop.call(self._has_work.set)

    def close(self) -> None:
        # Where a completion's callback closes, what is in service ends, in files of its own, when the loop goes on.
        self._shut_down(lambda: self._loop.call(self._stop))

    # On the loop ---------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._is_closing = True
        self._has_work.set()

    async def _serve(self) -> None:
        files: dict[str, Any] = {}
        try:
            while not self._is_closing:
                block = self._queue.take_nowait()
                if block is None:
                    self._has_work.clear()
                    await self._has_work.wait()
                    continue
                transfer, start, stop = block
                error = await self._serve_block(files, transfer.request, start, stop)
                self._cost.operations += 1
                self._cost.python_s = time.thread_time()
                if self._queue.block_done(transfer, error):
                    transfer.complete()
                del block, transfer, error  # an idle worker keeps nobody's memory alive
        finally:
            await close_files(files)

    async def _serve_block(
        self, files: dict[str, Any], request: IoRequest, start: int, stop: int
    ) -> BaseException | None:
        retries = 0
        while (error := await self._move(files, request, start, stop)) is not None:
            retries += 1
            if not isinstance(error, IoError) or error.errno != errno.EIO or retries > self._eio_retries:
                return error
        if request.check is not None:
            try:
                self._cost.check_s += await asyncio.to_thread(_timed, request.check, start, stop)
            except Exception as problem:
                return without_frames(problem)
        return None

    async def _move(self, files: dict[str, Any], request: IoRequest, start: int, stop: int) -> BaseException | None:
        try:
            file = files.get(request.path)
            if file is None:
                file = files[request.path] = await aiofiles.open(request.path, "r+b", buffering=0)
            await file.seek(request.offset + start)
            while start < stop:
                part = request.memory[start:stop]
                moved = await (file.readinto(part) if request.op is Op.READ else file.write(part))
                if not moved:
                    return short_error(request, start, stop)
                start += moved
        except OSError as error:
            problem = io_error(request, start, stop, error)
            problem.__cause__ = error
            return without_frames(problem)
        except Exception as error:
            return error
        return None


def _timed(check: Callable[[int, int], None], start: int, stop: int) -> float:
    """CPU seconds of a check."""
    began_s = time.thread_time()
    check(start, stop)
    return time.thread_time() - began_s
