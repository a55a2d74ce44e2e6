"""Buffered transfers through aiofiles: the portable path, for file systems and systems without O_DIRECT.

One asyncio loop on its own thread runs a few workers over a priority queue. Every worker has its own file object per
file, because the position of a file object is shared by everybody who uses it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import aiofiles

from storage.align import split_blocks
from storage.backends.direct import io_error
from storage.errors import ClosedError, ShortIoError
from storage.types import IoRequest, Op

_JOIN_TIMEOUT_S = 30.0


class BufferedBackend:
    """Serves requests with `seek`, `readinto` and `write` on aiofiles' threads.

    Args:
        threads: transfers served at the same time.
        block_nbytes: bytes of one read or write.
    """

    name = "buffered"
    opens_direct = False

    def __init__(self, *, threads: int, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[tuple[int, int, IoRequest]] = asyncio.PriorityQueue()
        self._requests: set[IoRequest] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._blocks_done = 0
        self._loop = asyncio.new_event_loop()
        self._workers_wanted = threads
        self._thread = threading.Thread(target=self._run, name="infinity-io-buffered", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> int:
        return self._blocks_done

    def submit(self, request: IoRequest) -> None:
        with self._lock:
            if self._is_closed:
                raise ClosedError("the I/O backend is closed")
            self._requests.add(request)
            self._loop.call_soon_threadsafe(
                self._queue.put_nowait, (int(request.priority), next(self._numbers), request)
            )

    def in_flight(self) -> list[IoRequest]:
        with self._lock:
            return list(self._requests)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)
        for request in self.in_flight():
            request.ticket.set_exception(ClosedError("the I/O backend was closed before the transfer was served"))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        workers = [self._loop.create_task(self._serve()) for _ in range(self._workers_wanted)]
        self._loop.run_forever()
        for worker in workers:
            worker.cancel()
        self._loop.run_until_complete(asyncio.gather(*workers, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        files: dict[str, Any] = {}
        try:
            while True:
                _, _, request = await self._queue.get()
                error: BaseException | None = None
                try:
                    if request.path not in files:
                        files[request.path] = await aiofiles.open(request.path, "r+b", buffering=0)
                    await self._move(files[request.path], request)
                except OSError as caught:
                    error = io_error(request, 0, len(request.memory), caught) if caught.errno else caught
                except Exception as caught:
                    error = caught
                self._complete(request, error)
        finally:
            for file in files.values():
                await file.close()

    def _complete(self, request: IoRequest, error: BaseException | None) -> None:
        with self._lock:
            self._requests.discard(request)
        if error is None:
            request.ticket.set_done()
        else:
            request.ticket.set_exception(error)

    async def _move(self, file: Any, request: IoRequest) -> None:
        await file.seek(request.offset)
        for first, nbytes in split_blocks(0, len(request.memory), self._block_nbytes):
            start, stop = first, first + nbytes
            while start < stop:
                part = request.memory[start:stop]
                moved = await (file.readinto(part) if request.op is Op.READ else file.write(part))
                if not moved:
                    raise ShortIoError(
                        f"{request.op.value} of {request.key!r} ended at offset {request.offset + start} of "
                        f"{request.path}, {stop - start} bytes early",
                        path=request.path,
                        offset=request.offset + start,
                        nbytes=stop - start,
                        key=request.key,
                    )
                start += moved
            self._blocks_done += 1
