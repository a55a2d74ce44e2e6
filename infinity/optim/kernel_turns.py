"""Whose kernel runs next on the optimizer worker.

A worker that takes chunks as they become ready serves those first whose group lies in host memory: they are ready as
soon as the gradient is there. Meanwhile chunks of an earlier group that have come from a drive wait with the buffers
that further ones would be read into, and the drive has nothing to do. So kernels go by the order of their updates, and
the worker is given few at a time: what becomes ready later may belong to an earlier update.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import count
from typing import TypeVar

_T = TypeVar("_T")

_HANDED_OVER = 2  # kernels: one runs, the next is there when it ends


class KernelTurns:
    """Hands kernels to a worker, those of the earliest update first. Used on the I/O loop only."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._handed_over = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def run(self, turn: int, kernel: Callable[[], _T]) -> _T:
        """What a kernel returns, or raises, once it has had its turn; the lowest turn comes first."""
        if self._handed_over < _HANDED_OVER:
            self._handed_over += 1
        else:
            await self._place(turn)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, kernel)
        finally:
            self._pass_on()

    async def _place(self, turn: int) -> None:
        """Wait until a kernel that was handed over has ended and its place is given to this one."""
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._numbers), given))
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """A place is free: the next one that still waits gets it."""
        while self._waiting:
            given = heapq.heappop(self._waiting)[-1]
            if not given.done():
                given.set_result(None)
                return
        self._handed_over -= 1
