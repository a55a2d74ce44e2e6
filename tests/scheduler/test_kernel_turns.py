"""Kernels go by the order of their updates, few at a time, and a place is never lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infinity.optim.kernel_turns import KernelTurns


async def _settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Worker:
    """A worker whose kernels run one by one once `go` is set; `ran` says which did, in order."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.go = threading.Event()
        self.ran: list[str] = []

    def kernel(self, name: str) -> str:
        if not self.go.wait(30):
            raise TimeoutError("nobody let the kernels run")
        self.ran.append(name)
        if name.startswith("fails"):
            raise ValueError(name)
        return name


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_the_earliest_update_goes_first_and_kernels_of_one_in_order(worker: Worker) -> None:
    async def main() -> list[str]:
        turns = KernelTurns(worker.executor)
        asked = [(0, "a"), (0, "b"), (5, "f1"), (3, "d1"), (5, "f2"), (3, "d2"), (4, "e")]
        tasks = []
        for turn, name in asked:
            tasks.append(asyncio.create_task(turns.run(turn, lambda name=name: worker.kernel(name))))
            await _settle()
        worker.go.set()
        return await asyncio.gather(*tasks)

    with worker.executor:
        assert asyncio.run(main()) == ["a", "b", "f1", "d1", "f2", "d2", "e"]
    assert worker.ran == ["a", "b", "d1", "d2", "e", "f1", "f2"]


def test_a_kernel_that_fails_gives_its_place_on(worker: Worker) -> None:
    async def main() -> list[str | BaseException]:
        turns = KernelTurns(worker.executor)
        names = enumerate(["fails 1", "fails 2", "c", "fails 3", "d"])
        tasks = [asyncio.create_task(turns.run(n, lambda name=name: worker.kernel(name))) for n, name in names]
        worker.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with worker.executor:
        found = asyncio.run(main())
    assert [str(each) for each in found] == ["fails 1", "fails 2", "c", "fails 3", "d"]
    assert [isinstance(each, ValueError) for each in found] == [True, True, False, True, False]


@pytest.mark.parametrize("cancelled", [{0}, {1}, {2}, {3}, {0, 1}, {2, 3}, {1, 2, 4}, {0, 1, 2, 3, 4}])
def test_whoever_is_cancelled_keeps_no_place(worker: Worker, cancelled: set[int]) -> None:
    """Whether it runs, has been given a place in this very moment, or waits."""

    async def main() -> list[str]:
        turns = KernelTurns(worker.executor)
        tasks = [asyncio.create_task(turns.run(n, lambda n=n: worker.kernel(str(n)))) for n in range(5)]
        await _settle()
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True) if cancelled == set(range(5)) else await _settle()
        worker.go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found] == [n in cancelled for n in range(5)]
        return await asyncio.gather(*(turns.run(n, lambda n=n: worker.kernel(f"later {n}")) for n in range(4)))

    with worker.executor:
        assert asyncio.run(main()) == [f"later {n}" for n in range(4)]


def test_a_place_that_is_given_to_a_task_cancelled_at_once_goes_on(worker: Worker) -> None:
    async def main() -> str:
        turns = KernelTurns(worker.executor)
        given: list[asyncio.Task[str]] = []

        async def run_and_cancel(number: int) -> None:
            await turns.run(0, lambda: worker.kernel(f"first {number}"))
            given[number].cancel()  # the place has just been passed on to it, and it has not gone on yet

        running = [asyncio.create_task(run_and_cancel(number)) for number in range(2)]
        await _settle()
        given += [asyncio.create_task(turns.run(1, lambda: worker.kernel("given"))) for _ in range(2)]
        last = asyncio.create_task(turns.run(2, lambda: worker.kernel("last")))
        await _settle()
        worker.go.set()
        await asyncio.gather(*running)
        return await asyncio.wait_for(last, 30)

    with worker.executor:
        assert asyncio.run(main()) == "last"
    assert worker.ran == ["first 0", "first 1", "last"]
