"""Stopped in the middle of a step and continued: the losses of a run that was not, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.continuing import STOP, WAYS, Loop, Way, first, rest, whole
from tests.resume import Run

_REPOSITORY = Path(__file__).parents[2]
FAST = [Way("fp32", "swap files", "synchronous"), Way("bf16", "some of each", "deferred")]
FAST += [Way("fp16", "host memory", "synchronous")]


def check(one: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["losses"] + after.pop("losses") == one.pop("losses")
    assert after == one


@pytest.mark.parametrize("way", FAST, ids=lambda way: way.name)
def test_continued_in_the_same_process(tmp_path: Path, way: Way) -> None:
    check(whole(tmp_path, way), first(tmp_path, way), rest(tmp_path, way))


@pytest.mark.parametrize("way", FAST, ids=lambda way: way.name)
def test_saved_behind_the_rest_of_the_step(tmp_path: Path, way: Way) -> None:
    """The gradients are those of the moment, though more is added to them before the checkpoint is complete."""
    check(whole(tmp_path, way), first(tmp_path, way, behind=True), rest(tmp_path, way))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("continued")
    found = []
    for act in ("whole", "first", "rest"):
        command = [sys.executable, "-m", "tests.continuing", str(folder), act]
        ended = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_continued_by_a_new_process(processes: list[dict[str, Any]], way: Way) -> None:
    check(*(dict(found[way.name]) for found in processes))


@pytest.mark.parametrize("saved_in", FAST, ids=lambda way: way.name)
def test_gradients_that_wait_are_loaded_with_other_settings(tmp_path: Path, saved_in: Way) -> None:
    """Also where they were spilled, or will be; in fp32, which is what they are kept in."""
    first(tmp_path, saved_in)
    found = []
    for place in ("swap files", "host memory"):
        loop = Loop(tmp_path, Way("fp32", place, "synchronous"))
        loop.load(tmp_path / saved_in.name)
        loop.save(tmp_path / place)
        found.append({"losses": loop.train(STOP, STOP + 2, first_part=1), **loop.end()})
        loop = Loop(tmp_path, Way("fp32", place, "synchronous"))
        loop.load(tmp_path / place)
        found.append({"losses": loop.train(STOP, STOP + 2, first_part=1), **loop.end()})
    assert found[0] == found[1] == found[2] == found[3]


def test_saving_between_clipping_and_the_step_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FAST[0])
    with loop.engine:
        loop.backward(0, 0)
        loop.scaler.unscale_(loop.optimizer)
        with pytest.raises(infinity.IterationError, match="saving between clipping or unscaling the gradients"):
            loop.save(tmp_path / "saved")
        loop.finish()
        loop.save(tmp_path / "saved")


def test_a_missing_scheduler_is_refused_before_anything_changes(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FAST[0])
    with loop.engine:
        loop.engine.save(tmp_path / "saved")
        for name in ("scheduler", "scaler"):
            with pytest.raises(infinity.CheckpointError, match=f"was saved without a {name}; load it without one"):
                loop.engine.load(tmp_path / "saved", **{name: getattr(loop, name)})


def test_another_process_schedules_on(tmp_path: Path) -> None:
    """`Run` of the other tests keeps its scheduler in `extra`; both ways give the same."""
    run = Run(lambda model: infinity.offload(model, infinity.Config(nvme={"paths": [tmp_path]})))
    with run.engine:
        run.train(0, 2)
        run.save(tmp_path / "by extra")
        run.engine.save(tmp_path / "by name", scheduler=run.scheduler)
        losses = run.train(2, 4)
        run.load(tmp_path / "by extra")
        assert run.train(2, 4) == losses
        run.engine.load(tmp_path / "by name", optimizer=run.optimizer, scheduler=run.scheduler)
        assert run.train(2, 4) == losses
