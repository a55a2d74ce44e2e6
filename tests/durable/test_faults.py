"""A step that is lost while training with durable steps: the same process goes on from the last committed one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import infinity
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import StorageError
from storage.types import IoRequest, Op
from storage.versioned import VersionedStore
from tests.drives import wrap_faulty
from tests.durable.test_steps import check_space, note, run_in
from tests.resume import Run

PARTS: dict[str, Callable[[IoRequest], bool]] = {
    "state": lambda request: "/state" in request.key,
    "param": lambda request: "/state" not in request.key,
}


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FaultyBackend]:
    """The backend of the engine made last, ready to fail."""
    return wrap_faulty(monkeypatch, VersionedStore)


def train_and_note(run: Run, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        losses += run.train(step, step + 1)
        note(run)
    return losses


@pytest.mark.pairs
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("fault", "op"), [(Fault.NO_SPACE, Op.WRITE), (Fault.IO_ERROR, Op.WRITE), (Fault.BIT_FLIP, Op.READ)]
)
@pytest.mark.parametrize("schedule", ["synchronous", "overlapped"])
def test_the_step_is_lost_and_the_process_goes_on(
    tmp_path: Path, drive: Callable[[], FaultyBackend], schedule: str, fault: Fault, op: Op, part: str
) -> None:
    settings = {"precision": "bf16", "schedule": schedule, "host": {"budget": "300KiB"}}
    whole = run_in(tmp_path / "whole", **settings)
    expected, state = train_and_note(whole, 0, 4), whole.summary()
    whole.engine.close()

    run = run_in(tmp_path / "run", **settings)
    assert train_and_note(run, 0, 2) == expected[:2]
    run.engine.metrics()
    drive().inject(fault, op=op, when=PARTS[part], times=None)
    with pytest.raises((StorageError, infinity.IterationError)):
        train_and_note(run, 2, 5)
    if op is Op.WRITE and part == "state":  # what fails in forward has torn nothing, and is told as itself
        with pytest.raises(infinity.IterationError, match=r"engine\.restore\(\) goes back to step 2"):
            for _ in range(3):
                with contextlib.suppress(StorageError):
                    run.train(2, 3)
    drive().clear()
    extra = run.engine.restore(optimizer=run.optimizer)
    step = run.engine.committed_step
    assert step == 2
    run.scheduler.load_state_dict(extra["scheduler"])
    assert train_and_note(run, step, 4) == expected[step:]
    check_space(run.engine)
    assert run.summary() == state
    run.engine.close()


def test_a_checkpoint_does_not_take_the_place_of_a_commit_that_is_nearer(
    tmp_path: Path, drive: Callable[[], FaultyBackend]
) -> None:
    """After a lost step `load` names `restore`; after that it loads as ever, and what it loads is committed."""
    run = run_in(tmp_path, schedule="synchronous", host={"budget": "300KiB"})
    expected = train_and_note(run, 0, 1)
    run.engine.save(tmp_path / "saved", scheduler=run.scheduler)
    expected += train_and_note(run, 1, 3)
    drive().inject(Fault.IO_ERROR, op=Op.WRITE, when=PARTS["state"], times=None)
    with pytest.raises((StorageError, infinity.IterationError)):
        train_and_note(run, 3, 6)
    drive().clear()
    with contextlib.suppress(StorageError, infinity.IterationError):  # an update that ran into it, told later
        run.train(4, 5)
    with pytest.raises(infinity.IterationError, match=r"engine\.restore\(\) goes back to step 3"):
        run.engine.load(tmp_path / "saved", optimizer=run.optimizer, scheduler=run.scheduler)
    run.engine.restore(optimizer=run.optimizer)
    run.engine.load(tmp_path / "saved", optimizer=run.optimizer, scheduler=run.scheduler)
    assert run.engine.committed_step == 1
    assert train_and_note(run, 1, 3) == expected[1:]
    check_space(run.engine)
    run.engine.close()


def test_a_failure_is_told_and_closing_gives_everything_back(
    tmp_path: Path, drive: Callable[[], FaultyBackend]
) -> None:
    run = run_in(tmp_path, schedule="synchronous", host={"budget": "300KiB"})
    train_and_note(run, 0, 1)
    drive().inject(Fault.IO_ERROR, op=Op.WRITE, times=None)
    with pytest.raises((StorageError, infinity.IterationError)):
        train_and_note(run, 1, 4)
    with contextlib.suppress(StorageError):
        run.engine.close()
    assert run.engine.is_closed
    again = run_in(tmp_path, resume=True, schedule="synchronous", host={"budget": "300KiB"})
    assert again.engine.committed_step == 1
    again.engine.close()
