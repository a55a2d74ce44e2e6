"""Kills jobs of `infinity train --durability step` (SIGKILL), continues what they left, compares with one that was not.

    python -m tests.ranks.killing FOLDER STAGE COUNT

Every rank is a process of its own, forked from this one, which has loaded torch and started no thread. COUNT points are
spread over what ranks do from their first commit on: every transfer that is handed to a drive, and every step of a
commit. At each of them, by turns of one rank and of the other, the whole job is killed. It prints one JSON object: how
many points there were, at which steps jobs went on, and what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from infinity.cli import train  # what every command loads, before forking
from storage.versioned import VersionedStore
from tests.cli.command import call
from tests.durable.killing import Watched

assert train
SIZE = 2
STEPS = 4
_SMALL = ("--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "2")
_FIRST_COMMITS = 2  # of what was offloaded, and of what the command notes before its first step


class Points:
    """Counts what happens in this rank, and kills the job at one of it."""

    def __init__(self, last: int) -> None:
        self.names: list[str] = []
        self._last = last
        self._commits = 0

    def reach(self, name: str) -> None:
        if self._commits >= _FIRST_COMMITS:
            if len(self.names) == self._last:
                os.killpg(0, signal.SIGKILL)
            self.names.append(name)
        self._commits += name == "freed"


def run_command(points: Points, *arguments: str | Path) -> dict[str, Any]:
    """The command in this process, with a store that tells its points."""
    opened = VersionedStore.open

    def open_watched(*args: Any, **given: Any) -> VersionedStore:
        wrap = given.pop("wrap_backend")
        watched = {"wrap_backend": lambda b: Watched(wrap(b), points), "on_commit_point": points.reach}  # type: ignore[arg-type]
        return opened(*args, **given, **watched)

    VersionedStore.open = open_watched  # type: ignore[method-assign, assignment]
    code, output, error = call("train", *arguments)
    return {"code": code, "output": output, "error": error, "points": points.names}


def in_children(folder: Path, *arguments: str | Path, killer: int = -1, last: int = -1) -> list[dict[str, Any]]:
    """The command on all ranks: what each gave, and how it ended. Rank `killer` kills the job at its point `last`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    for rank in range(SIZE):
        result = folder / f"result{rank}"
        result.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, port, result, arguments, Points(last if rank == killer else -1))
        pids.append(pid)
        os.setpgid(pid, pids[0])
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    found = [folder / f"result{rank}" for rank in range(SIZE)]
    return [
        {"ended": code, **(json.loads(file.read_text()) if file.exists() else {})}
        for code, file in zip(codes, found, strict=True)
    ]


def _be_rank(rank: int, port: int, result: Path, arguments: tuple[str | Path, ...], points: Points) -> None:
    try:
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in given.items()} | {"MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        result.write_text(json.dumps(run_command(points, *arguments)))
    except BaseException:
        result.write_text(json.dumps({"code": -1, "error": traceback.format_exc()}))
    finally:
        os._exit(0)


class Job:
    """One job, of which every run has a folder of its own."""

    def __init__(self, folder: Path, stage: int) -> None:
        self._folder = folder
        config = folder / "config.toml"
        config.write_text(f'stage = {stage}\nprecision = "fp32"\nrank_timeout_s = 30.0\n')
        self._config = ("--config", config)

    def start(self, name: str, **kill: int) -> list[dict[str, Any]]:
        place = self._folder / name
        place.mkdir()
        options = ("--nvme", place / "swap", "--durability", "step", "--steps", str(STEPS), *_SMALL, *self._config)
        return in_children(place, *options, *self._reports(place), **kill)

    def resume(self, name: str) -> list[dict[str, Any]]:
        place = self._folder / name
        return in_children(place, "--resume", place / "swap", *self._config, *self._reports(place))

    def _reports(self, place: Path) -> tuple[str | Path, ...]:
        steps = place / ("rest" if (place / "steps").exists() else "steps")
        return ("--json", place / "report", "--metrics", steps, "--save", place / "saved")

    def outcome(self, name: str) -> tuple[int, list[float], dict[str, bytes]]:
        """The first step and the losses of the last run, and what was saved of parameters and state."""
        place = self._folder / name
        report = json.loads((place / "report").read_text())
        saved = {file.name: file.read_bytes() for file in (place / "saved").glob("group-*")}
        return report["first_step"], report["losses"], saved

    def finished(self, name: str) -> int:
        """Steps that were over when the job was killed."""
        return len((self._folder / name / "steps").read_text().splitlines())


def judge(job: Job, name: str, whole: tuple[int, list[float], dict[str, bytes]], rest: list[dict[str, Any]]) -> str:
    """What is wrong with a job that was continued; "" when nothing is."""
    if any(one.get("code") != 0 for one in rest):
        return str(rest)
    first, losses, saved = job.outcome(name)
    finished = job.finished(name)
    if not finished - 1 <= first <= finished + 1:
        return f"went on with step {first} after {finished} were over"
    if losses != whole[1][first:]:
        return f"losses from step {first}: {losses}, not {whole[1][first:]}"
    if saved != whole[2]:
        return f"from step {first} another state"
    return ""


def main(folder: Path, stage: int, count: int) -> None:
    folder.mkdir(exist_ok=True)
    job = Job(folder, stage)
    uninterrupted = job.start("whole")
    assert [one.get("code") for one in uninterrupted] == [0, 0], uninterrupted
    whole = job.outcome("whole")
    assert len(whole[1]) == STEPS
    assert len(whole[2]) > 1
    totals = [len(one["points"]) for one in uninterrupted]
    failures: dict[str, str] = {}
    steps: Counter[int] = Counter()
    for number in range(count):
        killer = number % SIZE
        point = (2 * number + 1) * totals[killer] // (2 * count)
        name = f"killed{killer}-{point}"
        ended = [one["ended"] for one in job.start(name, killer=killer, last=point)]
        if ended != [-signal.SIGKILL] * SIZE:
            failures[name] = f"the ranks ended with {ended}"
            continue
        if problem := judge(job, name, whole, job.resume(name)):
            failures[name] = problem
        else:
            steps[job.outcome(name)[0]] += 1
    kinds = Counter(name for one in uninterrupted for name in one["points"])
    print(json.dumps({"points": totals, "kinds": kinds, "steps": steps, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
