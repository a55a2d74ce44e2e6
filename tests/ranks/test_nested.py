"""Two engines over one model, each with collectives of its own, on several ranks."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.nested import CASES, train_two_engines, train_whole
from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import assert_as_whole


def test_an_engine_inside_the_model_of_another(tmp_path: Path) -> None:
    shares = values(run_ranks(train_two_engines, 2, tmp_path))
    for number, (_, _, checkpointing) in enumerate(CASES):
        assert_as_whole(train_whole(checkpointing), [share[number] for share in shares])
