"""Kills training processes (SIGKILL) at chosen points, continues what they left, compares with a run that was not.

    python -m tests.durable.killing FOLDER PRECISION SCHEDULE BUDGET LOOP COUNT [FIRST LAST]

Every run is a process of its own, forked from this one, which has loaded torch and started no thread. COUNT points are
spread evenly over what the uninterrupted run does from its second step on: every transfer that is handed to a drive,
and every step of a commit. FIRST and LAST choose some of them (LAST excluded), so that many can be done in parts. It
prints one JSON object: how many points there were, which kinds of them, and what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from storage.backends.base import Backend
from storage.types import IoRequest
from storage.versioned import VersionedStore
from tests.conftest import small_config
from tests.resume import Run
from tests.storage.versions import check_extents

STEPS = 4


class Points:
    """Counts what happens, and ends the process at one of it."""

    def __init__(self, last: int) -> None:
        self.names: list[str] = []
        self._last = last
        self._is_counting = False

    def start(self) -> None:
        self._is_counting = True

    def reach(self, name: str) -> None:
        if not self._is_counting:
            return
        if len(self.names) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


class Watched:
    """A backend whose transfers are points, before they are handed over."""

    def __init__(self, inner: Backend, points: Points) -> None:
        self._inner = inner
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, request: IoRequest) -> None:
        self._points.reach(request.op.value)
        self._inner.submit(request)


class Case:
    """One way to train."""

    def __init__(self, folder: Path, precision: str, schedule: str, budget: str, loop: str) -> None:
        self.folder = folder
        self._settings: dict[str, Any] = {"precision": precision, "schedule": schedule, "host": {"budget": budget}}
        self._notes = loop == "notes"

    def open(self, name: str, points: Points, *, resume: bool = False) -> Run:
        config = small_config(self.folder / name, durability="step", **self._settings)
        opened = VersionedStore.open
        watched = {"wrap_backend": lambda backend: Watched(backend, points), "on_commit_point": points.reach}

        def open_watched(*args: Any, **given: Any) -> VersionedStore:
            return opened(*args, **{**given, **watched})

        VersionedStore.open = open_watched  # type: ignore[method-assign, assignment]
        try:
            return Run(lambda model: infinity.offload(model, config, resume=resume))
        finally:
            VersionedStore.open = opened  # type: ignore[method-assign]

    def train(self, run: Run, start: int, points: Points, tell: Callable[[str], None]) -> dict[str, Any]:
        """Train to the last step; tells every step that is over, and whether a note says so."""
        losses = []
        for step in range(start, STEPS):
            if step:
                points.start()
            losses += run.train(step, step + 1)
            if self._notes:
                run.engine.note({"scheduler": run.scheduler.state_dict(), "loss": losses[-1]})
            tell(f"{step + 1} {run.engine.committed_step}")
        run.engine.close()
        return {"losses": losses}

    def whole(self, name: str, last: int, tell: Callable[[str], None]) -> dict[str, Any]:
        points = Points(last)
        found = self.train(self.open(name, points), 0, points, tell)
        return found | {"points": points.names}

    def rest(self, name: str, tell: Callable[[str], None]) -> dict[str, Any]:
        """Continue what a process left; what its store held, and what comes after."""
        points = Points(-1)
        run = self.open(name, points, resume=True)
        step = run.engine.committed_step
        extra = run.engine.restore(optimizer=run.optimizer)
        store = run.engine._runtime.store
        assert isinstance(store, VersionedStore)
        check_extents(store)
        if self._notes and step:
            run.scheduler.load_state_dict(extra["scheduler"])
        elif step:  # what the loop does after a step, where nobody has noted it
            run.scheduler.last_epoch = step
            run.scheduler._last_lr = [group["lr"] for group in run.optimizer.param_groups]
        losses = run.train(step, STEPS)
        run.engine.metrics()
        run.engine._runtime.before_overwrite()
        check_extents(store)
        summary = run.summary()
        capacity_nbytes = sum(drive.file.extents.capacity_nbytes for drive in store._drives)
        planned_nbytes = run.engine.plan.placement.nvme_nbytes
        run.engine.close()
        return {"step": step, "losses": losses, "summary": summary, "space": [capacity_nbytes, planned_nbytes]}


def in_child(work: Callable[[Callable[[str], None]], dict[str, Any]], folder: Path) -> tuple[int, dict[str, Any]]:
    """Do some work in a process of its own: how it ended, and what it gave, with the lines that it told."""
    told, result = folder / "told", folder / "result"
    told.write_text("")
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            with told.open("a", buffering=1) as lines:
                result.write_text(json.dumps(work(lambda line: print(line, file=lines))))
            status = 0
        except BaseException:
            result.write_text(json.dumps({"error": traceback.format_exc()}))
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    found = json.loads(result.read_text()) if result.exists() else {}
    return os.waitstatus_to_exitcode(status), found | {"told": told.read_text().splitlines()}


def judge(expected: dict[str, Any], told: list[str], rest: dict[str, Any], *, notes: bool) -> str:
    """What is wrong with a run that was continued; "" when nothing is."""
    if "error" in rest:
        return str(rest["error"])
    step = rest["step"]
    finished, committed = map(int, told[-1].split()) if told else (0, 0)
    # What was committed when a step was over is there, and nothing that was never finished.
    if not committed <= step <= finished + 1:
        return f"resumed at step {step} after {told}"
    if rest["losses"] != expected["losses"][step:]:
        return f"losses from step {step}: {rest['losses']}, not {expected['losses'][step:]}"
    if rest["summary"] != expected["summary"]:
        return f"from step {step} another state: {rest['summary']} not {expected['summary']}"
    if rest["space"][0] > rest["space"][1] * 1.05 + (1 << 16):
        return f"files of {rest['space'][0]} bytes, planned were {rest['space'][1]}"
    return ""


def main(
    folder: Path, precision: str, schedule: str, budget: str, loop: str, count: int, first: int = 0, last: int = 0
) -> None:
    case = Case(folder, precision, schedule, budget, loop)
    folder.mkdir(exist_ok=True)
    if precision == "bf16":
        SplitMasterAdamW().warm_up()  # once, instead of in every process
    status, expected = in_child(lambda tell: case.whole("whole", -1, tell), folder)
    assert status == 0, expected
    status, rest = in_child(lambda tell: case.rest("whole", tell), folder)
    assert status == 0, rest
    expected["summary"] = rest["summary"]
    total = len(expected["points"])
    failures: dict[int, str] = {}
    steps: Counter[int] = Counter()
    for number in range(first, last or count):
        point = number * total // count
        name = f"killed{point}"
        status, killed = in_child(lambda tell, p=point, n=name: case.whole(n, p, tell), folder)  # type: ignore[misc]
        if status not in (-signal.SIGKILL, 0):  # 0: this time there were a few transfers less
            failures[point] = str(killed)
            continue
        _, rest = in_child(lambda tell, n=name: case.rest(n, tell), folder)  # type: ignore[misc]
        if problem := judge(expected, killed["told"], rest, notes=loop == "notes"):
            failures[point] = problem
        else:
            steps[rest["step"]] += 1
            for file in sorted((folder / name).rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
    print(json.dumps({"points": total, "kinds": Counter(expected["points"]), "steps": steps, "failures": failures}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:6], *map(int, sys.argv[6:]))
