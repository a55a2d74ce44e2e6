"""What must not be left behind by a closed engine: threads, file descriptors, swap folders, memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.engine import Engine
from storage.budget import TierBudget

WAIT_S = 50.0  # for what other threads are about to do; nothing waits so long unless it never comes

_THREADS = ("infinity", "asyncio")


def engine_threads() -> set[threading.Thread]:
    """Living threads that an engine, or the event loop of one, has started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(_THREADS)}


def open_files() -> dict[int, str]:
    """What every open file descriptor of this process points to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the directory
            continue
    return found


def swap_folders(folder: Path) -> list[Path]:
    """Run folders and swap files below a directory."""
    return [*folder.rglob("infinity-*"), *folder.rglob("*.swap")]


@dataclass(frozen=True)
class LeakCheck:
    """The state before a test."""

    threads: frozenset[threading.Thread]
    files: dict[int, str]

    @classmethod
    def take(cls) -> LeakCheck:
        return cls(frozenset(engine_threads()), open_files())

    def check(self, folders: Sequence[Path]) -> None:
        """Fail when something is there that was not there before."""
        threads = sorted(thread.name for thread in engine_threads() - self.threads)
        assert not threads, f"threads left running: {threads}"
        files = {fd: path for fd, path in open_files().items() if self.files.get(fd) != path}
        assert len(self.files) >= len(open_files()), f"file descriptors left open: {files}"
        left = [path for folder in folders for path in swap_folders(folder)]
        assert not left, f"swap files left behind: {left}"


def check_given_back(budget: TierBudget) -> None:
    """Everything of a budget comes back, at the latest when the transfers in flight that hold some of it have ended.

    To ask for all of it is to wait for just that, where a look at `used_nbytes` may come too early.
    """
    with budget.request(budget.limit_nbytes, "the test") as everything:
        assert everything.wait(WAIT_S), budget.holders()


def check_empty(engine: Engine) -> None:
    """A closed engine holds no host memory, no device memory and no reservation."""
    runtime = engine._runtime
    assert runtime.is_closed
    assert runtime.pool.leased_nbytes == 0, runtime.pool.holders()
    assert runtime.pool.lent_nbytes == 0
    for budget in runtime.budgets.values():
        assert budget.used_nbytes == 0, (budget.name, budget.holders())
        assert not budget.waiting(), (budget.name, budget.waiting())
