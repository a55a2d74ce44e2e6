"""Tensor-parallel models, offloaded: the same numbers as one process, and every rank holds its part of its part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.parallel import model_of, read_gradients_of_shards, train_two_by_two
from tests.ranks.spawn import run_ranks, values


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"stage": 2}], ids=str)
def test_tensor_parallel_beside_data_parallel(tmp_path: Path, settings: dict[str, int]) -> None:
    results = values(run_ranks(train_two_by_two, 4, tmp_path, 0.5, settings))
    for found in results:
        assert found["norms"] == pytest.approx(found["plain norms"], rel=1e-5)
        assert found["norms"] == results[0]["norms"]
        assert max(found["far"].values()) < 1e-5, found["far"]
        assert 'mesh=mesh["dp"]' in found["said"]
        whole = sum(p.numel() for p in model_of().parameters())
        assert whole / 2 < found["parameters"] < whole * 0.55


def test_gradients_of_shards_are_whole_to_torch(tmp_path: Path) -> None:
    for found in values(run_ranks(read_gradients_of_shards, 2, tmp_path)):
        assert found["norms"] == pytest.approx(found["plain norms"], rel=1e-5)
