"""Checkpoints on file systems that share blocks between files: real ones, made in files of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.pace import Pace
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.saver import CapturedSave
from storage.copying import CopyMethod
from tests.conftest import small_config
from tests.infinity.test_checkpoint_background import held_up, save_behind
from tests.mounts import MakeFileSystem, mounting
from tests.resume import Run


@pytest.fixture
def make_file_system(tmp_path: Path) -> Iterator[MakeFileSystem]:
    with mounting(tmp_path) as make:
        yield make


@pytest.mark.parametrize("durability", ["none", "step"])
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_checkpoint_shares_the_blocks_of_the_swap_files(
    make_file_system: MakeFileSystem, tmp_path: Path, kind: str, durability: str
) -> None:
    """Nothing is copied, and what training writes later changes neither the checkpoint nor its own bits."""
    point = make_file_system(kind)
    settings: dict[str, Any] = {"precision": "bf16", "durability": durability, "host": {"budget": "300KiB"}}
    expected = Run(lambda model: infinity.offload(model, small_config(tmp_path / "plain", **settings)))
    with expected.engine:
        losses = expected.train(0, 4)
    run = Run(lambda model: infinity.offload(model, small_config(point / "swap", **settings)))
    with run.engine:
        found = run.train(0, 2)
        with held_up(run):
            save_behind(run, point / "saved")
            (save,) = run.engine._runtime.saver._saves
        save.ticket.wait(100)
        assert set(save.copier.nbytes) == {CopyMethod.REFLINK}
        assert save.copier.nbytes[CopyMethod.REFLINK] > 200_000
        found += run.train(2, 4)
        assert found == losses
        with CheckpointReader(point / "saved") as checkpoint:
            assert checkpoint.verify() >= save.copier.nbytes[CopyMethod.REFLINK]
        run.engine.load(point / "saved", optimizer=run.optimizer, scheduler=run.scheduler)
        assert run.train(2, 4) == losses[2:]
        run.engine.save(point / "saved", scheduler=run.scheduler)


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_shared_is_let_go_of_before_anything_is_read(
    make_file_system: MakeFileSystem, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """And hardly anything is: the store knows what it has written."""
    point = make_file_system("xfs")
    run = Run(lambda model: infinity.offload(model, small_config(point / "swap", host={"budget": "300KiB"})))
    holds: list[int] = []
    with run.engine:
        run.train(0, 2)
        store = run.engine._runtime.store
        assert store is not None
        held, read_back, init = store._space.holds, PartFileWriter.read_back, CapturedSave.__init__
        saves: list[CapturedSave] = []

        def counted(self: PartFileWriter, pace: Pace) -> None:
            holds.append(len(held._held))
            read_back(self, pace)

        def noted(self: CapturedSave, *args: Any, **given: Any) -> None:
            saves.append(self)
            init(self, *args, **given)

        monkeypatch.setattr(PartFileWriter, "read_back", counted)
        monkeypatch.setattr(CapturedSave, "__init__", noted)
        run.engine.save(point / "saved", scheduler=run.scheduler, wait=wait)
        (save,) = saves
        assert save.ticket.wait(60)  # before anybody is in a hurry
        run.engine.wait_saved()
        assert len(holds) > 3 and not any(holds)
        assert save.copier.nbytes.keys() == {CopyMethod.REFLINK}
        assert save.read_back_nbytes < save.copier.nbytes[CopyMethod.REFLINK] // 2
        assert (save.pace.rests == 0) is wait
        with CheckpointReader(point / "saved") as checkpoint:
            assert checkpoint.verify() >= save.copier.nbytes[CopyMethod.REFLINK]
