"""Checkpoints of ranks through torch.distributed.checkpoint: every rank writes and reads its part of DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.checkpoint.reader import CheckpointReader
from tests.ranks.dtensors import save_and_load
from tests.ranks.spawn import run_ranks, values


@pytest.mark.slow
def test_two_ranks_write_and_read_dtensors(tmp_path: Path) -> None:
    assert values(run_ranks(save_and_load, 2, tmp_path / "ranks", tmp_path / "saved")) == [True, True]
    with CheckpointReader(tmp_path / "saved") as checkpoint:
        assert checkpoint.verify() > 0
        pieces = checkpoint.index.parameters["blocks.1.up.weight"].tensors["parameter"]
        assert [piece.file for piece in pieces] == ["group-00000.rank0.safetensors", "group-00000.rank1.safetensors"]
