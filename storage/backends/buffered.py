"""Buffered transfers through aiofiles: the portable path, for file systems and systems without O_DIRECT.

One asyncio loop on its own thread runs a few workers over the same kind of queue as `direct`. Every worker has its own
file object per file, because the position of a file object is shared by everybody who uses it.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiofiles

from storage.backends.cost import IoCost
from storage.backends.queue import BlockQueue, shut_down
from storage.backends.system import io_error, short_error, without_frames
from storage.errors import IoError
from storage.types import IoRequest, Op


class BufferedBackend:
    """Serves requests with `seek`, `readinto` and `write` on aiofiles' threads.

    Args:
        threads: blocks transferred at the same time.
        block_nbytes: bytes of one read or write.
        close_timeout_s: how long `close` waits for calls that are in the kernel.
        eio_retries: how often a block is tried again after EIO.
        write_memory_nbytes: see `BlockQueue`.
    """

    name = "buffered"
    opens_direct = False

    def __init__(
        self,
        *,
        threads: int,
        block_nbytes: int,
        close_timeout_s: float = 30.0,
        eio_retries: int = 0,
        write_memory_nbytes: int | None = None,
    ) -> None:
        self._queue = BlockQueue(block_nbytes, write_memory_nbytes)
        self._workers = threads
        self._close_timeout_s = close_timeout_s
        self._eio_retries = eio_retries
        self._cost = IoCost()  # written by the loop's thread
        self._began_s = 0.0  # CPU time of the loop's thread at its beginning
        self._loop = asyncio.new_event_loop()
        self._has_work = asyncio.Event()
        self._is_closing = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="infinity-io-buffered", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> int:
        return self._cost.operations

    @property
    def cost(self) -> IoCost:
        """As the contract says; what aiofiles' threads do in Python is not measured, only the loop's part."""
        return IoCost.total([self._cost])

    def promote(self, key: str) -> None:
        self._queue.promote(key)

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)
        with self._lock:
            if not self._is_closed:  # else `close` has taken the request out of the queue again
                self._loop.call_soon_threadsafe(self._has_work.set)

    def in_flight(self) -> list[IoRequest]:
        return self._queue.requests()

    def close(self) -> None:
        # Where a completion's callback closes, what is in service ends, in files of its own, when the loop goes on.
        shut_down(self._queue, [self._thread], self._close_timeout_s, self._begin_stop)

    def _begin_stop(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._is_closing = True
        self._has_work.set()

    def _run(self) -> None:
        self._began_s = time.thread_time()
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="infinity-io-buffered")
        self._loop.set_default_executor(executor)
        try:
            self._loop.run_until_complete(self._serve_all())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve_all(self) -> None:
        await asyncio.gather(*(self._serve() for _ in range(self._workers)))

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
                self._cost.python_s = time.thread_time() - self._began_s
                if self._queue.block_done(transfer, error):
                    transfer.complete()
                del block, transfer, error  # an idle worker keeps nobody's memory alive
        finally:
            for file in files.values():
                await file.close()

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
                self._cost.check_s += await self._loop.run_in_executor(None, _timed, request.check, start, stop)
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
