"""A wear budget on several ranks, each with a drive of its own: all of them stop at the same step."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.spawn import run_ranks, values
from tests.ranks.wear import train_until_worn


def test_all_ranks_stop_when_one_of_them_has_spent_its_budget(tmp_path: Path) -> None:
    assert values(run_ranks(train_until_worn, 2, tmp_path)) == [1, 1]
