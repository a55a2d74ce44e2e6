"""An asyncio loop on a thread of its own, for backends whose work is coroutines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_log = logging.getLogger(__name__)


class LoopThread:
    """Runs `serve` a few times at once, and as many helper threads for what would block. Ends when all have ended.

    Args:
        serve: a worker; it catches the errors of what it does.
        workers: how many.
        name: of the threads.
    """

    def __init__(self, serve: Callable[[], Coroutine[Any, Any, None]], workers: int, name: str) -> None:
        self._serve = serve
        self._workers = workers
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._is_over = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have something called on the loop, from any thread. Nothing happens when the loop has ended."""
        with self._lock:
            if not self._is_over:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        self._loop.set_default_executor(ThreadPoolExecutor(self._workers, thread_name_prefix=self._name))
        try:
            self._loop.run_until_complete(self._serve_all())
        finally:
            with self._lock:
                self._is_over = True
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve_all(self) -> None:
        await asyncio.gather(*(self._serve() for _ in range(self._workers)))


async def close_files(files: Mapping[str, Any]) -> None:
    """Close files of aiofiles, by path. Some file systems tell here of bytes that they lost: logged, nobody waits."""
    for path, file in files.items():
        try:
            await file.close()
        except OSError as error:
            _log.error("closing %s: %s", path, error.strerror or error)
