"""Waiting for copies between host and device behind the training thread: bounded, and what went wrong is raised."""

from __future__ import annotations

import asyncio

import pytest

from infinity.link import LinkPatience
from infinity.observe.shortages import report_of
from storage.errors import IoTimeoutError
from storage.types import Ticket

PATIENCE = LinkPatience(0.02, lambda: "residency: everywhere")


class Polled:
    """A copy that can only be asked whether it is over."""

    def __init__(self) -> None:
        self.ticket = Ticket("copy")

    @property
    def done(self) -> bool:
        return self.ticket.done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.ticket.wait(timeout_s):
            raise TimeoutError
        self.ticket.result()


class Awaited(Polled):
    """One that wakes who awaits it."""

    def __await__(self):  # type: ignore[no-untyped-def]
        return self.ticket.__await__()


KINDS = pytest.mark.parametrize("kind", [Polled, Awaited])


@KINDS
async def test_stuck_on_the_loop(kind: type[Polled]) -> None:
    with pytest.raises(IoTimeoutError, match=r"a copy is not over after 0\.02 s") as stuck:
        await PATIENCE.until_over(kind(), "a copy")
    assert "residency: everywhere" in str(report_of(stuck.value))
    assert len(asyncio.all_tasks()) <= 2  # this one, and what has been cancelled


def test_stuck_on_a_thread() -> None:
    with pytest.raises(IoTimeoutError, match=r"a copy is not over after 0\.02 s") as stuck:
        PATIENCE.wait(Polled(), "a copy")
    assert "residency: everywhere" in str(report_of(stuck.value))


@KINDS
async def test_failed_on_the_loop(kind: type[Polled]) -> None:
    fence = kind()
    asyncio.get_running_loop().call_soon(fence.ticket.set_exception, ArithmeticError("lost"))
    with pytest.raises(ArithmeticError, match="lost"):
        await PATIENCE.until_over(fence, "a copy")


@KINDS
async def test_over_on_the_loop(kind: type[Polled]) -> None:
    fence = kind()
    asyncio.get_running_loop().call_soon(fence.ticket.set_done)
    await PATIENCE.until_over(fence, "a copy")
