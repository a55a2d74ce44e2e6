"""Durable steps over ranks: all go on from the same step, whichever of them had committed the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.durable import KILLED_AT, resume, train_until_killed
from tests.ranks.spawn import run_ranks, values


@pytest.mark.parametrize(
    ("stage", "points"),
    [
        (3, ("freed", "before commit")),
        pytest.param(1, ("begun", "committed"), marks=pytest.mark.slow),
        pytest.param(3, ("start", "noted"), marks=pytest.mark.slow),
        pytest.param(3, ("freed", "committed"), marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_from_the_last_step_that_all_have_committed(
    tmp_path: Path, stage: int, points: tuple[str, str]
) -> None:
    killed = run_ranks(train_until_killed, 2, tmp_path, stage, points, check=False)
    assert [result.code for result in killed] == [9, 9], killed[0].output + killed[1].output
    is_committed = all(point in ("committed", "freed") for point in points)
    for found in values(run_ranks(resume, 2, tmp_path, stage)):
        assert found["first"] == (KILLED_AT if is_committed else KILLED_AT - 1)
        assert found["losses"] == found["expected"]
        assert found["differing"] == []
