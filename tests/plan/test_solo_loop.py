"""The loop of simulations: the same order as on `VirtualTimeLoop`, and the same errors."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable

import pytest

from infinity.plan.solo_loop import SoloLoop
from infinity.testing import VirtualDeadlockError, VirtualTimeLoop

_LIMIT_S = 1e6


def _run(make_loop: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], object]) -> object:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(main())  # type: ignore[arg-type]


def solo() -> SoloLoop:
    return SoloLoop(_LIMIT_S)


async def _errands(seed: int) -> list[tuple[str, float]]:
    """Tasks that sleep, wait for each other, set and cancel timers, many of them at the same moment."""
    loop, chance = asyncio.get_running_loop(), random.Random(seed)
    log: list[tuple[str, float]] = []
    gate, timers = asyncio.Event(), []

    def note(what: str) -> None:
        log.append((what, loop.time()))

    async def errand(name: str) -> None:
        for number in range(chance.randrange(4)):
            await asyncio.sleep(chance.choice([0.0, 0.0, 0.1, 0.1, 0.25, 7.0, 1e5]))
            note(f"{name}.{number}")
            timers.append(loop.call_later(chance.choice([0.0, 0.1, 0.2]), note, f"timer {name}.{number}"))
            loop.call_soon(note, f"soon {name}.{number}")
            if chance.random() < 0.3:
                chance.choice(timers).cancel()
            if chance.random() < 0.2:
                gate.set()
            elif chance.random() < 0.2:
                await asyncio.wait([asyncio.create_task(gate.wait())], timeout=0.3)

    await asyncio.gather(*(errand(f"{number}") for number in range(20)))
    await asyncio.sleep(1.0)
    return log


@pytest.mark.parametrize("seed", range(20))
def test_everything_happens_in_the_same_order_as_on_a_virtual_loop(seed: int) -> None:
    log = _run(solo, lambda: _errands(seed))
    assert log == _run(VirtualTimeLoop, lambda: _errands(seed))
    assert log


def test_a_deadlock_names_who_waits() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(VirtualDeadlockError, match=r"deadlock at virtual time 0 s(.|\n)*stuck waits at"):
        _run(solo, stuck)


def test_what_goes_on_for_ever_ends_at_the_limit() -> None:
    async def poll() -> None:
        while True:
            await asyncio.sleep(1e5)

    with pytest.raises(VirtualDeadlockError, match="still running at virtual time"):
        _run(solo, poll)


def test_what_a_callback_raises_ends_the_run() -> None:
    """A real loop logs it and goes on: then a simulation would wait for what never comes, without a word why."""

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, [].pop)
        await asyncio.sleep(2.0)

    with pytest.raises(IndexError):
        _run(solo, main)


def test_handles_tell_when_they_are_due_and_whether_they_were_cancelled() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        timer, soon = loop.call_at(3.0, log.append, "timer"), loop.call_soon(log.append, "soon")
        assert (timer.when(), timer.cancelled()) == (3.0, False)
        assert "append" in repr(timer)
        timer.cancel()
        soon.cancel()
        assert timer.cancelled()
        await asyncio.sleep(4.0)

    log: list[str] = []
    _run(solo, main)
    assert log == []


def test_a_loop_whose_making_was_interrupted_goes_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SoloLoop, "_make_self_pipe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SoloLoop(1.0)
    gc.collect()
    assert capsys.readouterr().err == ""
