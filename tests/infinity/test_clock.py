"""The virtual loop never waits, never hangs and always runs the same way."""

import asyncio
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infinity
from infinity.testing import RealClock, VirtualClock, VirtualDeadlockError, VirtualTimeLoop, run_virtual

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("clock", [RealClock(), VirtualClock()])
def test_clocks_only_go_forward(clock: RealClock | VirtualClock) -> None:
    before_s = clock.now_s()
    for duration_s in (-1.0, 0.0, 1e-6):
        clock.sleep(duration_s)
    assert clock.now_s() >= before_s + 1e-6


def test_virtual_clock_adds_up() -> None:
    clock = VirtualClock()
    clock.sleep(1.5)
    clock.sleep(-1)
    clock.sleep(2)
    assert clock.now_s() == 3.5


def test_virtual_time_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(100_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 103_600


def test_timers_run_in_order_of_time() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def wake(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((name, loop.time()))

        await asyncio.gather(wake("c", 3.0), wake("a", 0.1), wake("b", 0.3))
        return seen

    assert run_virtual(main()) == [("a", 0.1), ("b", 0.3), ("c", 3.0)]


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop, seen = asyncio.get_running_loop(), []
        for number in range(20):
            loop.call_at(1.0, seen.append, number)
        loop.call_later(0.5, seen.append, -1)
        await asyncio.sleep(2.0)
        return seen

    assert run_virtual(main()) == [-1, *range(20)]


@given(st.lists(st.floats(1e-9, 1e5), max_size=20))
def test_every_timer_fires_once_and_not_early(delays: list[float]) -> None:
    async def main() -> list[float]:
        loop, late = asyncio.get_running_loop(), []

        async def wake(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            late.append(loop.time() - delay_s)

        await asyncio.gather(*map(wake, delays))
        return late

    late = run_virtual(main())
    assert len(late) == len(delays)
    assert all(-1e-9 <= seconds <= 1e-6 for seconds in late)


def test_deadlock_is_an_error_that_names_the_tasks() -> None:
    async def wait_for_ever(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_ever(asyncio.Event()), name="read blocks.3")

    with pytest.raises(VirtualDeadlockError) as caught:
        run_virtual(main())
    for fact in ("deadlock at virtual time 0 s", "read blocks.3", "wait_for_ever", "locks.py", "Event.wait"):
        assert fact in str(caught.value)


def test_endless_polling_is_an_error() -> None:
    async def poll() -> None:
        while True:
            await asyncio.sleep(10)

    with (
        asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(limit_s=1000)) as runner,
        pytest.raises(VirtualDeadlockError, match="still running at virtual time 1010 s"),
    ):
        runner.run(poll())


def test_time_stands_still_for_thread_jobs() -> None:
    async def main() -> float:
        loop, gate = asyncio.get_running_loop(), threading.Event()
        waiter = asyncio.create_task(asyncio.to_thread(gate.wait, 30))
        opener = asyncio.create_task(asyncio.to_thread(gate.set))
        assert await asyncio.wait_for(waiter, timeout=1)
        await opener
        return loop.time()

    assert run_virtual(main()) == 0.0


def test_other_threads_get_the_grace_asked_for() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(answer.set_result, "done"))
        thread.start()
        result: str = await answer
        thread.join()
        return result

    assert run_virtual(main(), thread_grace_s=30) == "done"


def test_tasks_left_behind_are_cancelled() -> None:
    ended = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(True)

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return task

    assert run_virtual(main()).cancelled()
    assert ended == [True]


def test_pytest_asyncio_runs_tests_on_the_virtual_loop(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(infinity.__file__).parents[1]))
    pytester.makeconftest(
        """
        from infinity.testing import VirtualTimeLoop

        def pytest_asyncio_loop_factories(config, item):
            return {"virtual": VirtualTimeLoop}
        """
    )
    pytester.makepyfile(
        """
        import asyncio
        import pytest

        @pytest.fixture
        async def start_s():
            await asyncio.sleep(1000)
            yield asyncio.get_running_loop().time()
            await asyncio.sleep(1000)

        async def test_virtual(start_s):
            await asyncio.sleep(1000)
            assert (start_s, asyncio.get_running_loop().time()) == (1000, 2000)

        async def test_deadlock():
            await asyncio.Event().wait()

        async def test_after():
            assert asyncio.get_running_loop().time() == 0
        """
    )
    options = ("-W", "error", "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    result = pytester.runpytest_subprocess(*options, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*VirtualDeadlockError: deadlock*"])


def test_virtual_time_runs_where_a_loop_runs_already() -> None:
    """As in a notebook."""

    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    async def cell() -> float:
        return run_virtual(main())

    assert asyncio.run(cell()) == 3600
