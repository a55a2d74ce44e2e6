"""FSDP2 with optimizer state in the tiers: the bits of FSDP2 with torch's optimizer, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.fsdp import STEPS, train_beside_torch
from tests.ranks.spawn import run_ranks, values


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_another_line_and_the_same_bits(tmp_path: Path, size: int) -> None:
    states = []
    for found in values(run_ranks(train_beside_torch, size, tmp_path)):
        assert found["same losses and norms"]
        assert found["differing"] == found["differing saved"] == found["steps taken by looking"] == []
        assert found["same again"]
        assert found["left"] == []
        counted = found["metrics"]
        assert counted["host/peak_bytes"] <= counted["host/budget_bytes"] == 160 * 1024
        assert counted["nvme/write_bytes"] == STEPS * counted["nvme/capacity_bytes"] > 0
        assert counted["nvme/capacity_bytes"] + counted["host/kept_bytes"] >= found["state"]
        states.append(found["state"])
    assert max(states) < sum(states) / size * 1.1
