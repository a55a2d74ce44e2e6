"""The time of a simulated training thread: what it worked on, what it waited for, and why."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infinity.observe.stalls import StallCause
from infinity.plan.timeline import Span
from storage.types import Ticket


class ThreadTime:
    """Seconds of the step under way, by what they went into; `spans` are of all steps.

    Args:
        kernels: what the optimizer's worker did so far and does now, as (start_s, end_s) in order.
        transferred_s: what computing would have lost to all transfers that have ended so far.
        kernel_loss: seconds that computing loses for each second of a kernel beside it.
    """

    def __init__(
        self,
        kernels: Sequence[tuple[float, float]] = (),
        transferred_s: Callable[[], float] = lambda: 0.0,
        kernel_loss: float = 0.0,
    ) -> None:
        self._kernels = kernels
        self._transferred_s = transferred_s
        self._kernel_loss = kernel_loss
        self.spans: list[Span] = []
        self.compute_s = 0.0
        self._stalls: dict[str, float] = defaultdict(float)

    def begin_step(self) -> None:
        """Count from here."""
        self._stalls.clear()
        self.compute_s = 0.0

    @property
    def stalls_s(self) -> dict[str, float]:
        """Seconds of waiting by cause."""
        return dict(sorted(self._stalls.items()))

    async def wait(self, ticket: Ticket, cause: StallCause) -> None:
        """Wait for a transfer or an update; raises what it failed with."""
        if ticket.done:
            ticket.result()
            return
        with self.stalled(cause):
            await ticket

    @contextmanager
    def stalled(self, cause: StallCause) -> Iterator[None]:
        """What passes inside is a stall."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        yield
        if loop.time() > start_s:
            self._stalls[cause.value] += loop.time() - start_s
            self.spans.append(Span("stall", cause.value, start_s, loop.time()))

    async def spend(self, seconds: float, name: str, lane: str = "engine") -> None:
        """The training thread is busy for so long."""
        if seconds > 0:
            start_s = asyncio.get_running_loop().time()
            await asyncio.sleep(seconds)
            self.spans.append(Span(lane, name, start_s, start_s + seconds))

    async def compute(self, seconds: float, name: str) -> None:
        """The device computes, and the thread with it; longer while kernels and transfers take cores from it."""
        start_s, lost_s = asyncio.get_running_loop().time(), seconds
        while lost_s > 0:  # what it lost takes time as well, in which it may lose again
            begun_s, before_s = asyncio.get_running_loop().time(), self._transferred_s()
            await self.spend(lost_s, name, lane="compute")
            lost_s = self._lost_s(begun_s) + self._transferred_s() - before_s
        self.compute_s += asyncio.get_running_loop().time() - start_s

    def _lost_s(self, since_s: float) -> float:
        """Seconds that kernels took from what was computed since then."""
        if not self._kernel_loss:
            return 0.0
        now_s, beside_s = asyncio.get_running_loop().time(), 0.0
        for start_s, end_s in reversed(self._kernels):
            if end_s <= since_s:
                break
            beside_s += max(min(end_s, now_s) - max(start_s, since_s), 0.0)
        return self._kernel_loss * beside_s
