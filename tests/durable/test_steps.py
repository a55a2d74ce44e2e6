"""`durability="step"`: every finished step is found by the process that comes after, whatever ended this one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import infinity
from storage.errors import StorageError
from storage.filesystems import sync_data
from storage.versioned import VersionedStore
from tests.conftest import small_config
from tests.resume import CASES, Run
from tests.storage.versions import check_extents
from tests.zoo import Net, build

BUDGETS = ("300KiB", "600KiB", "16MiB")


def durable(folder: Path, **settings: Any) -> infinity.Config:
    return small_config(folder, durability="step", **settings)


def run_in(folder: Path, *, resume: bool = False, **settings: Any) -> Run:
    config = durable(folder, **settings)
    return Run(lambda model: infinity.offload(model, config, resume=resume))


def store_of(engine: infinity.Engine) -> VersionedStore:
    store = engine._runtime.store
    assert isinstance(store, VersionedStore)
    return store


def check_space(engine: infinity.Engine) -> None:
    """With nothing under way no extent is shared or leaked."""
    engine.metrics()
    engine._runtime.before_overwrite()
    check_extents(store_of(engine))


@pytest.mark.parametrize("budget", [BUDGETS[0], pytest.param(BUDGETS[1], marks=pytest.mark.slow), BUDGETS[2]])
@pytest.mark.parametrize(("precision", "schedule"), CASES)
def test_a_continued_run_is_the_uninterrupted_one(tmp_path: Path, precision: str, schedule: str, budget: str) -> None:
    check_continued(tmp_path, {"precision": precision, "schedule": schedule, "host": {"budget": budget}})


@pytest.mark.parametrize("budget", [BUDGETS[0], BUDGETS[2]])
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_continued_run_with_small_moments(tmp_path: Path, form: str, budget: str) -> None:
    settings = {"precision": "bf16", "state_format": form, "schedule": "synchronous", "host": {"budget": budget}}
    check_continued(tmp_path, settings)
    with pytest.raises(infinity.CheckpointError, match=r"laid out with (fields|chunk_numel)"):
        run_in(tmp_path, resume=True, precision="bf16", schedule="synchronous", host={"budget": "16MiB"})


def test_a_run_is_not_resumed_without_one_of_its_drives(tmp_path: Path) -> None:
    """Nothing is made where the drive should be: it is mounted there, and the run goes on."""
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    settings: dict[str, Any] = {"nvme": {"paths": drives}, "host": {"budget": "300KiB"}}
    first = run_in(tmp_path, **settings)
    losses = first.train(0, 1)
    note(first)
    first.engine.close()
    for number, missing in enumerate(drives):
        missing.rename(tmp_path / "away")
        for is_mounted in (False, True):  # a folder without a drive, and an empty one where a drive should be
            if is_mounted:
                missing.mkdir()
            with pytest.raises(infinity.CheckpointError, match=rf"{missing}.*(mounted\?|committed|Mount the drive)"):
                run_in(tmp_path, resume=True, **settings)
            assert [path.name for path in tmp_path.glob(f"{'ab'[number]}/*")] == []
        missing.rmdir()
        (tmp_path / "away").rename(missing)
    again = run_in(tmp_path, resume=True, **settings)
    assert again.engine.committed_step == len(losses) == 1
    again.engine.close()


@pytest.mark.parametrize("notes", [True, False])
def test_a_step_that_was_interrupted_behind_its_updates_is_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, notes: bool
) -> None:
    """The loop goes on; commits and counters have the number of steps that the parameters have."""
    run = run_in(tmp_path, schedule="synchronous")
    run.train(0, 1)
    engine = run.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine._iteration, "end_step", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train(1, 2)
    run.optimizer.zero_grad()
    if notes:
        note(run)
        engine._runtime.before_overwrite()
        assert engine.committed_step == 2
    run.train(2, 3)
    note(run)
    engine._runtime.before_overwrite()
    assert engine.committed_step == 3
    assert len(engine.traffic.per_step) == 3
    engine.close()
    again = run_in(tmp_path, resume=True, schedule="synchronous")
    assert (again.engine.committed_step, again.engine._runtime.states[1].steps[0]) == (3, 3)
    again.engine.close()


def _interrupted() -> None:
    raise KeyboardInterrupt


def check_continued(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = Run(lambda model: infinity.offload(model, small_config(tmp_path, **settings)))
    losses, expected = whole.train(0, 5), whole.summary()
    whole.engine.close()
    first = run_in(tmp_path, **settings)
    found = first.train(0, 2)
    note(first)
    first.engine.close()
    for start, stop in ((2, 3), (3, 5)):
        rest = run_in(tmp_path, resume=True, **settings)
        assert rest.engine.committed_step == start
        rest.scheduler.load_state_dict(rest.engine.restore(optimizer=rest.optimizer)["scheduler"])
        found += rest.train(start, stop)
        check_space(rest.engine)
        if stop == 5:
            assert rest.summary() == expected
        note(rest)
        rest.engine.close()
    assert found == losses


@pytest.mark.parametrize("budget", BUDGETS)
def test_initial_values_count_what_they_wrote(tmp_path: Path, budget: str) -> None:
    """Also those of shards that have a place in host memory and are stored besides."""
    with infinity.offload(build(Net), durable(tmp_path, host={"budget": budget})) as engine:
        expected = sum(group.shard_payload_nbytes for group in engine._runtime.groups)
        assert engine.traffic.initialisation["nvme_write_bytes"] == expected


@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("loop", ["notes", "forwards"])
def test_one_transaction_and_one_sync_per_drive_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str, drives: int
) -> None:
    """What a durable step costs: no more, whether the loop notes its steps or not."""
    synced: Counter[str] = Counter()

    def counted(fd: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{fd}")] += 1
        sync_data(fd)

    monkeypatch.setattr("storage.versioned.sync_data", counted)
    paths = [tmp_path / f"drive{number}" for number in range(drives)]
    config = small_config(tmp_path, durability="step", nvme={"paths": paths}, host={"budget": "300KiB"})
    run = Run(lambda model: infinity.offload(model, config))
    store, committer = store_of(run.engine), run.engine._runtime.committer
    assert committer is not None
    before = store.generation, committer.commits
    synced.clear()
    for step in range(4):
        run.train(step, step + 1)
        if loop == "notes":
            note(run)
    run.engine.close()
    assert (store.generation, committer.commits) == (before[0] + 4, before[1] + 4)
    assert sorted(synced.values()) == [4] * drives
    assert len({Path(path).parent for path in synced}) == drives


def note(run: Run) -> None:
    run.engine.note({"scheduler": run.scheduler.state_dict()})


def test_a_schedule_that_leaves_updates_for_later_is_refused(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="schedule='deferred' contradicts durability='step'"):
        infinity.offload(build(Net), durable(tmp_path, schedule="deferred"))
    assert list(tmp_path.iterdir()) == []


def test_the_same_model_in_other_groups_is_told_from_another_model(tmp_path: Path) -> None:
    """Groups depend on settings and on the build: parameters beside fp32 statistics once lay with others of a unit."""
    first = run_in(tmp_path)
    first.train(0, 1)
    note(first)
    first_note = {"scheduler": first.scheduler.state_dict()}
    first.engine.close()
    told = r"the parameters of this model in other groups: .* \(\d+ parameters.*another build of infinity.*engine.save"
    with pytest.raises(infinity.CheckpointError, match=told):
        run_in(tmp_path, resume=True, resident_threshold="1MiB")
    with pytest.raises(infinity.CheckpointError, match="belongs to another model"):
        infinity.offload(build(lambda: Net(blocks=2)), durable(tmp_path), resume=True)
    again = run_in(tmp_path, resume=True)  # nothing of it was lost
    assert again.engine.restore() == first_note
    again.engine.close()


def test_a_run_that_ended_before_its_first_step_does_not_block_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    settings: dict[str, Any] = {"nvme": {"paths": drives}, "host": {"budget": "300KiB"}}
    infinity.offload(build(lambda: Net(blocks=2)), durable(tmp_path, **settings)).close()
    with caplog.at_level("INFO", logger="infinity"):
        first = run_in(tmp_path, **settings)  # of another model, and with everything that it needs
    assert "ended before its first step" in caplog.text
    with pytest.raises(StorageError, match="in use by process"):  # one that goes on is not replaced
        run_in(tmp_path, **settings)
    losses = first.train(0, 1)
    check_space(first.engine)
    note(first)
    first.engine.close()
    told = r"holds a run at step 1, which would be lost. Continue it \(infinity.offload\(..., resume=True\)"
    with pytest.raises(infinity.ConfigError, match=told):
        run_in(tmp_path, **settings)
    again = run_in(tmp_path, resume=True, **settings)
    assert again.engine.committed_step == len(losses) == 1
    again.engine.close()


def test_a_checkpoint_that_was_loaded_before_the_first_step_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    with infinity.offload(build(Net), durable(tmp_path / "swap")) as engine:
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
    with pytest.raises(infinity.ConfigError, match="holds a run at step 0, which would be lost"):
        infinity.offload(build(Net), durable(tmp_path / "swap"))


def test_another_optimizer_than_the_planned_one(tmp_path: Path) -> None:
    """Its records would lie elsewhere than a resumed run looks for them."""
    model = build(Net)
    with infinity.offload(model, durable(tmp_path)), pytest.raises(infinity.ConfigError, match="optimizer='sgd'"):
        infinity.SGD(model.parameters(), lr=0.1)
