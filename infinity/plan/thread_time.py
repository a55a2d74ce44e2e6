"""The time of a simulated training thread: what it worked on, what it waited for, and why."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from infinity.observe.stalls import StallCause
from infinity.plan.timeline import Span
from storage.types import Ticket


class ThreadTime:
    """Seconds of the step under way, by what they went into; `spans` are of all steps."""

    def __init__(self) -> None:
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
        """The device computes, and the thread with it."""
        self.compute_s += seconds
        await self.spend(seconds, name, lane="compute")
