"""The engines that can be compared: the backends of `storage`, and aiofiles as most people would use it."""

from __future__ import annotations

import asyncio
import threading
import time
from enum import StrEnum
from typing import Any

import aiofiles

from infinity.errors import ConfigError
from storage.backends.base import Backend
from storage.backends.kernel_aio import why_not
from storage.backends.loop_thread import LoopThread, close_files
from storage.backends.probe import Engine, make_backend
from storage.backends.serving import CostMeasured
from storage.errors import ClosedError, ShortIoError
from storage.types import IoRequest, Op

_CLOSE_TIMEOUT_S = 30.0


class BenchEngine(StrEnum):
    """What moves the bytes."""

    DIRECT = "direct"
    AIO = "aio"
    BUFFERED = "buffered"
    AIOFILES = "aiofiles"

    @property
    def is_cached(self) -> bool:
        """Whether bytes go through the page cache."""
        return self not in (BenchEngine.DIRECT, BenchEngine.AIO)


def parse_engines(text: str) -> tuple[BenchEngine, ...]:
    """Engines from a list with commas.

    Raises:
        ConfigError: there is no such engine, or not on this machine.
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in list(BenchEngine)]
    if wrong or not names:
        raise ConfigError(f"--engines {text!r}: unknown {wrong or 'list'}; allowed: {', '.join(BenchEngine)}")
    if BenchEngine.AIO in names and (problem := why_not()) is not None:
        raise ConfigError(f"--engines aio: {problem}")
    return tuple(dict.fromkeys(BenchEngine(name) for name in names))


def make_engine(engine: BenchEngine, *, depth: int, block_nbytes: int) -> Backend:
    """A backend that keeps `depth` blocks at the drive; `close()` it."""
    if engine is BenchEngine.AIOFILES:
        return AiofilesBackend(tasks=depth)
    return make_backend(Engine(engine.value), threads=depth, block_nbytes=block_nbytes)


class AiofilesBackend(CostMeasured):
    """`await file.read(n)` and `await file.write(data)` in a few tasks, without blocks, priorities or retries.

    It is here to be compared with, as what a program with an asyncio loop does by default.
    """

    name = "aiofiles"
    opens_direct = False

    def __init__(self, *, tasks: int) -> None:
        super().__init__()
        (self._cost,) = self._costs
        self._tasks = tasks
        self._queue: asyncio.Queue[IoRequest | None] = asyncio.Queue()
        self._requests: dict[IoRequest, None] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._loop = LoopThread(self._serve, tasks, "infinity-bench-aiofiles")
        self._loop.thread.start()

    def promote(self, key: str) -> None:
        """Nothing overtakes anything here."""

    def submit(self, request: IoRequest) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the aiofiles engine is closed")
            self._requests[request] = None
            self._loop.call(self._queue.put_nowait, request)

    def in_flight(self) -> list[IoRequest]:
        with self._lock:
            return list(self._requests)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._tasks):
                    self._loop.call(self._queue.put_nowait, None)
        self._loop.thread.join(_CLOSE_TIMEOUT_S)

    async def _serve(self) -> None:
        files: dict[str, Any] = {}
        while (request := await self._queue.get()) is not None:
            error: BaseException | None = None
            try:
                await self._move(files, request)
            except Exception as caught:  # whatever it is, the ticket has to carry it
                error = caught
            self._cost.operations += 1
            self._cost.python_s = time.thread_time()
            with self._lock:
                del self._requests[request]
            request.ticket.complete(error)
        await close_files(files)

    async def _move(self, files: dict[str, Any], request: IoRequest) -> None:
        file = files.get(request.path)
        if file is None:
            file = files[request.path] = await aiofiles.open(request.path, "r+b")
        await file.seek(request.offset)
        nbytes = len(request.memory)
        if request.op is Op.READ:
            data = await file.read(nbytes)
            if len(data) < nbytes:
                raise ShortIoError(path=request.path, offset=request.offset, nbytes=nbytes, key=request.key)
            request.memory[:] = data
        else:
            await file.write(request.memory)
            await file.flush()
