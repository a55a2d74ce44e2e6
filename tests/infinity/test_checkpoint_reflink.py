"""Checkpoints on file systems that share blocks between files: real ones, made in files of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.reader import CheckpointReader
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
        save.ticket.wait(60)
        assert set(save.copier.nbytes) == {CopyMethod.REFLINK}
        assert save.copier.nbytes[CopyMethod.REFLINK] > 200_000
        found += run.train(2, 4)
        assert found == losses
        with CheckpointReader(point / "saved") as checkpoint:
            assert checkpoint.verify() >= save.copier.nbytes[CopyMethod.REFLINK]
        run.engine.load(point / "saved", optimizer=run.optimizer, scheduler=run.scheduler)
        assert run.train(2, 4) == losses[2:]
        run.engine.save(point / "saved", scheduler=run.scheduler)
