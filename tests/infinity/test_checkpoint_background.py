"""Checkpoints written behind training: the values are those of the moment they were asked for."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.checkpoint import part_file
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.saver import MAX_IN_FLIGHT, CapturedSave
from storage.copying import CopyMethod
from storage.held import HeldKeys
from tests.conftest import small_config
from tests.infinity.test_checkpoint import _tensors
from tests.resume import Run
from tests.storage.versions import check_extents
from tests.zoo import batch, loss_of

MakeEngine = Callable[..., infinity.Engine]
PLACES: dict[str, dict[str, Any]] = {
    "all in swap files": {"host": {"budget": "300KiB"}},
    "some in memory": {"host": {"budget": "600KiB"}},
    "all in memory": {"host": {"budget": "16MiB"}},
}
FAST = [
    ("all in swap files", "bf16", "synchronous"),
    ("some in memory", "fp32", "overlapped"),
    ("all in memory", "bf16", "deferred"),
]
CASES = [
    case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
    for case in product(PLACES, ("fp32", "bf16"), ("synchronous", "overlapped", "deferred"))
]


@pytest.fixture
def start(offload: MakeEngine) -> Callable[..., Run]:
    return lambda **settings: Run(lambda model: offload(model, **settings))


@contextmanager
def held_up(run: Run) -> Iterator[None]:
    """Nothing is written in this block: the thread that writes has something else to do."""
    go_on = threading.Event()
    run.engine._runtime.saver._thread.submit(go_on.wait, 60)
    try:
        yield
    finally:
        go_on.set()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def save_behind(run: Run, path: Path, **how: Any) -> None:
    run.engine.save(path, scheduler=run.scheduler, wait=False, **how)


@pytest.mark.parametrize(("place", "precision", "schedule"), CASES)
def test_exact_as_of_the_step_it_was_asked_for(
    start: Callable[..., Run], tmp_path: Path, place: str, precision: str, schedule: str
) -> None:
    """Three steps overwrite everything, wherever it lies, before a byte of the checkpoint is written."""
    settings = {"precision": precision, "schedule": schedule, **PLACES[place]}
    whole = start(**settings)
    losses = whole.train(0, 5)
    run = start(**settings)
    found = run.train(0, 2)
    run.engine.save(tmp_path / "now", scheduler=run.scheduler)
    with held_up(run):
        save_behind(run, tmp_path / "behind")
        found += run.train(2, 5)
    assert found == losses
    run.engine.wait_saved()
    assert same(_tensors(tmp_path / "now"), _tensors(tmp_path / "behind"))
    again = start(**settings)
    again.engine.load(tmp_path / "behind", optimizer=again.optimizer, scheduler=again.scheduler)
    assert again.train(2, 5) == losses[2:]
    run.engine.metrics()
    if run.engine._runtime.store is not None:
        check_extents(run.engine._runtime.store)


def test_asking_waits_for_no_drive(start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread syncs nothing and lays no file out, but that of the gradients that wait, which it fills."""
    run = start(host={"budget": "300KiB"})
    run.train(0, 2)
    loss_of(run.model, batch(2)).backward()  # type: ignore[no-untyped-call]
    fsync, lay_out = os.fsync, part_file.lay_out
    acts: Counter[tuple[str, bool]] = Counter()

    def count(what: str) -> None:
        acts[what, threading.current_thread() is threading.main_thread()] += 1

    def counted_fsync(fd: int) -> None:
        count("fsync")
        fsync(fd)

    def counted_lay_out(*args: Any, **given: Any) -> Any:
        count("lay out")
        return lay_out(*args, **given)

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(part_file, "lay_out", counted_lay_out)
    save_behind(run, tmp_path / "behind")
    assert acts["fsync", True] == 0
    assert acts["lay out", True] == 1
    run.engine.wait_saved()
    assert acts["fsync", False] > acts["lay out", False] > 5
    with CheckpointReader(tmp_path / "behind") as checkpoint:
        assert checkpoint.verify() > 0
        assert all("gradient" in entry.tensors for entry in checkpoint.index.parameters.values())


def test_only_saves_that_nobody_waits_for_take_their_time(start: Callable[..., Run], tmp_path: Path) -> None:
    """Behind training they rest after every piece of work; when somebody waits they do not, nor those before them."""
    run = start(host={"budget": "300KiB"})
    run.train(0, 1)
    saver = run.engine._runtime.saver
    save_behind(run, tmp_path / "behind")
    (behind,) = saver._saves
    assert behind.ticket.wait(60)
    assert behind.pace.rests > len(list((tmp_path / "behind").glob("group-*"))) > 5
    ready = threading.Event()
    waiting: list[CapturedSave] = []

    def until_somebody_waits() -> None:
        assert ready.wait(60)
        assert waiting[-1].pace._is_in_a_hurry.wait(60)

    saver._thread.submit(until_somebody_waits)
    for name in ("one", "other"):
        save_behind(run, tmp_path / name)
    waiting += saver._saves
    ready.set()
    run.engine.wait_saved()
    assert [(save.path.name, save.pace.rests) for save in waiting] == [("one", 0), ("other", 0)]


def test_edits_and_new_optimizer_state_come_after(start: Callable[..., Run], tmp_path: Path) -> None:
    """What changes stored values outside of a step saves them first, too."""
    run = start(host={"budget": "16MiB"})
    run.train(0, 2)
    state = run.optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1
    run.engine.save(tmp_path / "now")
    with held_up(run):
        save_behind(run, tmp_path / "behind")
        with infinity.gathered(run.model), torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(1)
        run.optimizer.load_state_dict(state)
    run.engine.wait_saved()
    assert same(_tensors(tmp_path / "now"), _tensors(tmp_path / "behind"))
    run.engine.save(tmp_path / "after")
    assert not same(_tensors(tmp_path / "now"), _tensors(tmp_path / "after"))


def test_two_in_flight_and_one_that_waits(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(host={"budget": "300KiB"})
    expected = []
    for number in range(MAX_IN_FLIGHT + 1):
        run.train(number, number + 1)
        run.engine.save(tmp_path / f"now{number}")
        expected.append(_tensors(tmp_path / f"now{number}"))
    other = start(host={"budget": "300KiB"})
    saver = other.engine._runtime.saver
    with held_up(other):
        for number in range(MAX_IN_FLIGHT):
            other.train(number, number + 1)
            save_behind(other, tmp_path / f"behind{number}")
        assert len(saver._saves) == MAX_IN_FLIGHT
        assert not (tmp_path / "behind0").exists()
        other.train(MAX_IN_FLIGHT, MAX_IN_FLIGHT + 1)
    save_behind(other, tmp_path / f"behind{MAX_IN_FLIGHT}")  # waits for the first
    assert (tmp_path / "behind0").exists()
    other.engine.wait_saved()
    for number, tensors in enumerate(expected):
        assert same(_tensors(tmp_path / f"behind{number}"), tensors)


def test_two_to_one_place(start: Callable[..., Run], tmp_path: Path) -> None:
    """The second waits for the first and replaces it; also one that is written at once."""
    run = start(host={"budget": "300KiB"})
    run.train(0, 1)
    save_behind(run, tmp_path / "saved")
    run.train(1, 2)
    save_behind(run, tmp_path / "saved")
    run.train(2, 3)
    run.engine.save(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as checkpoint:
        assert checkpoint.index.step == 3
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


def _break(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("infinity.checkpoint.part_file.PartFileWriter.finish", full)


@pytest.mark.parametrize("told_by", ["step", "save", "wait_saved", "close"])
def test_failures_are_told_once_and_harm_no_step(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    expected = start().train(0, 3)
    run = start()
    found = run.train(0, 1)
    with monkeypatch.context() as patch:
        _break(run, patch)
        save_behind(run, tmp_path / "saved")
        run.engine._runtime.saver._saves[0].ticket.wait(100)
    acts: dict[str, Callable[[], Any]] = {
        "step": run.optimizer.step,
        "save": lambda: run.engine.save(tmp_path / "other"),
        "wait_saved": run.engine.wait_saved,
        "close": run.engine.close,
    }
    with pytest.raises(infinity.CheckpointError, match="saved could not be written: No space left on device"):
        acts[told_by]()
    assert not [path for path in tmp_path.iterdir() if "saved" in path.name]
    if told_by == "close":
        assert run.engine.is_closed
        return
    found += run.train(1, 3)
    assert found == expected
    run.engine.wait_saved()
    save_behind(run, tmp_path / "saved")
    run.engine.wait_saved()
    assert (tmp_path / "saved").exists()


def test_two_failures_are_both_told(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one is raised; an exception can carry no other, so the second one is in the log."""
    run = start()
    run.train(0, 1)
    with monkeypatch.context() as patch:
        _break(run, patch)
        for name in ("first", "second"):
            save_behind(run, tmp_path / name)
        for save in run.engine._runtime.saver._saves:
            save.ticket.wait(100)
    with pytest.raises(infinity.CheckpointError, match="first could not be written"):
        run.engine.wait_saved()
    (record,) = [record for record in caplog.records if record.name == "infinity.checkpoint.saver"]
    assert "second could not be written: No space left on device" in record.getMessage()
    run.engine.wait_saved()


def test_memory_that_cannot_be_saved_fails_the_save_and_not_the_step(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's thread saves what it is about to overwrite; a full drive is the save's trouble."""
    expected = start(host={"budget": "16MiB"}).train(0, 3)
    run = start(host={"budget": "16MiB"})
    found = run.train(0, 1)

    def full(*unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with held_up(run), monkeypatch.context() as patch:
        save_behind(run, tmp_path / "saved")
        patch.setattr("infinity.checkpoint.part_file.PartFileWriter.write", full)
        found += run.train(1, 3)
    assert found == expected
    with pytest.raises(infinity.CheckpointError, match="No space left on device"):
        run.engine.wait_saved()
    assert not (tmp_path / "saved").exists()


def test_closing_writes_what_is_under_way(tmp_path: Path) -> None:
    run = Run(lambda model: infinity.offload(model, small_config(tmp_path, host={"budget": "300KiB"})))
    run.train(0, 2)
    save_behind(run, tmp_path / "saved")
    run.engine.close()
    with CheckpointReader(tmp_path / "saved") as checkpoint:
        assert checkpoint.verify() > 0


def test_too_little_room_holds_training_up(
    start: Callable[..., Run], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(host={"budget": "300KiB"})
    run.train(0, 1)
    monkeypatch.setattr("storage.store.ShardStore.room_nbytes", 4096)
    save_behind(run, tmp_path / "saved")
    assert (tmp_path / "saved").exists()
    assert "holds up training" in caplog.text
    assert "and there are 4096" in caplog.text


def test_bytes_are_counted_and_stay_out_of_the_closed_forms(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(host={"budget": "300KiB"})
    run.train(0, 2)
    save_behind(run, tmp_path / "saved")
    (save,) = run.engine._runtime.saver._saves
    run.train(2, 4)
    run.engine.wait_saved()
    for number, counted in enumerate(run.engine.traffic.per_step):
        expected = run.engine.plan.expected_traffic(number, 1)
        assert counted["nvme_read_bytes"] == expected.read_nbytes
        assert counted["nvme_write_bytes"] == expected.write_nbytes
    stored = sum(file.stat().st_size for file in (tmp_path / "saved").glob("group-*"))
    copied = sum(save.copier.nbytes.values())
    assert 0.9 * stored < copied <= stored
    assert set(save.copier.nbytes) <= set(CopyMethod)


def test_going_back_to_a_commit_waits_for_the_save(tmp_path: Path) -> None:
    config = small_config(tmp_path, durability="step", host={"budget": "300KiB"})
    run = Run(lambda model: infinity.offload(model, config))
    with run.engine:
        run.train(0, 2)
        run.engine.note({})
        run.engine.save(tmp_path / "now")
        save_behind(run, tmp_path / "behind")
        expected = run.train(2, 4)
        run.engine.save(tmp_path / "later")
        run.engine.restore(optimizer=run.optimizer)
        assert run.engine.committed_step >= 2
        assert same(_tensors(tmp_path / "now"), _tensors(tmp_path / "behind"))
        run.engine.load(tmp_path / "behind", optimizer=run.optimizer, scheduler=run.scheduler)
        assert run.train(2, 4) == expected
        store = run.engine._runtime.store
        run.engine.metrics()
        run.engine._runtime.before_overwrite()
        assert store is not None
        check_extents(store)


def test_a_save_that_cannot_be_made_leaves_nothing_behind(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at the end of its capture (Ctrl-C), it holds no bytes of the swap files, and no folder."""
    run = start(host={"budget": "300KiB"}, schedule="synchronous")
    run.train(0, 1)
    store = run.engine._runtime.store
    assert store is not None

    def interrupted(self: HeldKeys, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HeldKeys, "share_with", interrupted)
        run.engine.save(tmp_path / "kept" / "saved")
    assert not list((tmp_path / "kept").iterdir())
    assert not store._space.holds._held
    run.engine.save(tmp_path / "kept" / "saved")
    assert (tmp_path / "kept" / "saved").is_dir()
    run.engine.close()
