"""A step that is lost on one rank is lost on all of them, and all go on together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from storage.types import Op
from tests.ranks.lost import lose_a_step
from tests.ranks.spawn import run_ranks, values


@pytest.mark.parametrize(
    ("failing", "op"),
    [
        ([0], Op.WRITE),
        pytest.param([1], Op.READ, marks=pytest.mark.slow),
        pytest.param([0, 1], Op.WRITE, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_fails_while_spans_are_traded_is_lost_on_all_ranks(
    tmp_path: Path, failing: list[int], op: Op
) -> None:
    """Nobody waits for spans that never come, and a checkpoint brings all ranks back."""
    for rank, (expected, one) in enumerate(values(run_ranks(lose_a_step, 2, tmp_path, 2, failing, op))):
        if rank in failing:
            assert one["said"].startswith(("WriteError", "ReadError")), one["said"]
        else:
            assert f"lost on all ranks, because it failed on rank {failing[0]}: " in one["said"]
        assert not one["held"]
        for name, value in one["parameters"].items():
            assert torch.equal(value, expected["parameters"][name]), name
