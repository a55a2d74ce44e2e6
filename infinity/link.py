"""Copies between host and device that others wait for behind the training thread: how long, and what is said then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from infinity.devices.base import Fence
from infinity.observe.shortages import attach_report
from storage.errors import IoTimeoutError

_POLL_S = 0.0002  # about what a hop through a waiting thread costs


class LinkPatience:
    """The longest time that a copy may take before it counts as stuck.

    Args:
        timeout_s: infinite for what cannot get stuck.
        report: text that tells what is in flight and where every shard is, for the error.
    """

    def __init__(self, timeout_s: float, report: Callable[[], str] = lambda: "") -> None:
        self._timeout_s = timeout_s
        self._report = report

    def wait(self, fence: Fence, what: str) -> None:
        """Hold the calling thread until a copy is over.

        Raises:
            IoTimeoutError: it takes too long. And whatever went wrong with it.
        """
        try:
            fence.wait(self._timeout_s)
        except TimeoutError as error:
            raise self._stuck(what) from error

    async def until_over(self, fence: Fence, what: str) -> None:
        """As `wait`, on an asyncio loop, on whose time it is; nothing blocks."""
        loop = asyncio.get_running_loop()
        if fence.done:
            pass
        elif isinstance(fence, Awaitable):
            waiting = asyncio.ensure_future(fence)
            await asyncio.wait({waiting}, timeout=None if math.isinf(self._timeout_s) else self._timeout_s)
            if waiting.done():
                waiting.exception()  # it is raised below
            else:
                waiting.cancel()
        else:
            deadline_s = loop.time() + self._timeout_s
            while not fence.done and loop.time() < deadline_s:
                await asyncio.sleep(_POLL_S)
        if not fence.done:
            raise self._stuck(what)
        fence.wait(0)

    def _stuck(self, what: str) -> IoTimeoutError:
        stuck = IoTimeoutError(
            f"{what} is not over after {self._timeout_s:g} s. The device is stuck or far too slow; check it, or raise "
            "nvme.io_timeout_s"
        )
        attach_report(stuck, self._report)
        return stuck
