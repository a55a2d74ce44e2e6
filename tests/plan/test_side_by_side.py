"""Work in forks: the same results in the same order, errors that reach the caller, and no process that is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infinity.optim.kernel_threads import usable_cores
from infinity.plan.side_by_side import side_by_side
from tests.cli.command import ROOT, TIMEOUT_S, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")

THIS = os.getpid()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def in_forks(work: Callable[[int], object], count: int) -> list[object]:
    return side_by_side(work, range(count), n_processes=2)


def has_children() -> bool:
    return psutil.Process().children() != []


@pytest.mark.parametrize("n_processes", [1, 2, 5, None])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_results_are_in_order(count: int, n_processes: int | None) -> None:
    assert side_by_side(lambda n: n * n, range(count), n_processes=n_processes) == [n * n for n in range(count)]
    assert not has_children()


def test_two_things_are_worked_on_at_once(pipe: tuple[int, int]) -> None:
    """The first waits for what the second does."""
    reading, writing = pipe

    def work(number: int) -> tuple[int, int]:
        return os.getpid(), os.write(writing, b"x") if number else len(os.read(reading, 1))

    first, second = in_forks(work, 2)
    assert first != second


@pytest.mark.parametrize("n_processes", [1, 2])
def test_the_first_is_told_before_the_others_are_over(pipe: tuple[int, int], n_processes: int) -> None:
    """The last one waits for that."""
    reading, writing = pipe
    told: list[tuple[int, int]] = []

    def work(number: int) -> tuple[int, int]:
        return number, os.getpid() if number < 2 else len(os.read(reading, 1))

    def tell(made: tuple[int, int]) -> None:
        told.append(made)
        os.write(writing, b"x")

    assert side_by_side(work, range(3), n_processes=n_processes, on_first=tell)[0] == told[0]
    assert told == [(0, THIS)]
    assert not has_children()


def test_the_first_error_is_raised_wherever_it_happened() -> None:
    def work(number: int) -> int:
        if number >= 3:
            raise ValueError(f"of {number}")
        return number

    for _ in range(5):
        with pytest.raises(ValueError, match="of 3"):
            in_forks(work, 6)
        assert not has_children()


def test_a_fork_that_is_killed_is_made_good() -> None:
    def work(number: int) -> int:
        if os.getpid() != THIS:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert in_forks(work, 20) == list(range(20))


def test_results_that_cannot_be_sent_are_made_here() -> None:
    made = in_forks(lambda number: lambda: number, 4)
    assert [each() for each in made] == [0, 1, 2, 3]  # type: ignore[operator]


def test_a_system_without_room_for_forks_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    assert in_forks(lambda _: os.getpid(), 3) == [THIS] * 3


def test_a_stop_ends_forks_in_the_middle_of_their_work(pipe: tuple[int, int]) -> None:
    def work(number: int) -> None:
        if os.getpid() == THIS:
            raise KeyboardInterrupt
        os.read(pipe[0], 1)  # for ever

    with pytest.raises(KeyboardInterrupt):
        in_forks(work, 4)
    assert not has_children()


# Of the command -----------------------------------------------------------------------------------------------------

ALONE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
PLAN = "from infinity.cli.main import app; app()"
SMALL = ("--layers", "8", "--hidden", "1024", "--gpu", "rtx4090", "--host-memory", "6GiB")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("--advice",), id="advice"),
        pytest.param(("--search",), id="search", marks=pytest.mark.slow),
        pytest.param(("--sweep", "batch=1..8"), id="sweep", marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_the_same_on_one_core_and_on_all(tmp_path: Path, asked: tuple[str, ...]) -> None:
    texts = []
    for beginning in (ALONE, ""):
        target = tmp_path / "plan.json"
        command = [sys.executable, "-c", beginning + PLAN, "plan", *SMALL, *asked, "--json", str(target)]
        done = subprocess.run(command, check=False, capture_output=True, cwd=ROOT, timeout=TIMEOUT_S)
        assert (done.returncode, done.stderr) == (0, b"")
        texts.append((done.stdout, target.read_bytes()))
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_leaves_no_process_of_a_plan(number: signal.Signals, code: int) -> None:
    process = start("plan", "--layers", "100", "--gpu", "rtx4090", "--search")
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (forks := psutil.Process(process.pid).children()):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == code, error
    assert "stopped" in error and "Traceback" not in error
    assert not any(fork.is_running() for fork in forks)
