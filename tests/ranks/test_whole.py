"""Exports and state dicts over ranks hold what a checkpoint of the same moment holds, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.spawn import run_ranks, values
from tests.ranks.whole import fail_to_read_and_write, read_and_write_hybrid, read_and_write_whole

_MADE = {"as saved", "exported", "saved"}  # and "swap", where host memory does not hold everything
_ROOMY = {"host": {"budget": "64MiB"}}


def assert_whole(found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert seen["differing"] == seen["differing moments"] == seen.get("differing on the first", []) == []
        assert seen["others get nothing"]
        assert seen["frozen left out"]
        assert seen.get("exported alike", True)
        assert set(seen.get("left beside", _MADE)) - {"swap"} == _MADE
        assert seen["goes on"]
        assert seen["goes on from the first"]
        assert seen["betas"] == (0.9, 0.999)


def test_two_ranks_give_whole_tensors(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"stage": 3},
        {"stage": 1, "precision": "bf16"},
        {"stage": 3, "precision": "bf16", "state_format": "int8"},
    ]
    for found in values(run_ranks(read_and_write_whole, 2, tmp_path, cases)):
        assert_whole(found)


@pytest.mark.slow
def test_two_ranks_in_every_stage_and_tier(tmp_path: Path) -> None:
    cases = [
        {"stage": stage, "precision": precision, **tier}
        for stage in (1, 2, 3)
        for precision in ("fp32", "bf16", "fp16")
        for tier in ({}, _ROOMY)
    ]
    for found in values(run_ranks(read_and_write_whole, 2, tmp_path, cases)):
        assert_whole(found)


@pytest.mark.slow
def test_hybrid_ranks_give_whole_tensors(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"stage": 3}, {"stage": 2, "precision": "bf16"}]
    for found in values(run_ranks(read_and_write_hybrid, 4, tmp_path, cases)):
        assert_whole(found)


def test_a_rank_that_fails_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    first, second = values(run_ranks(fail_to_read_and_write, 2, tmp_path))
    for said in (first, second):
        assert "is there and is not an export" in said["there"]
        assert "has no adapter to merge" in said["no adapter"]
        assert "RankError: the folders to export to differ" in said["other folders"]
        assert "has 'more', which the model does not have" in said["another model"]
        assert "ConfigError: options.full_state_dict is False" in said["no options"]
        assert "the drive of rank 1 is gone" in said["unreadable"]
        assert said["left"] == "False"
        assert said["state"] == "[]"
    assert first["unreadable"].startswith("CheckpointError: exporting to")
    assert "failed on rank 1: ReadError" in first["unreadable"]
    assert second["unreadable"].startswith("ReadError")
    assert "CheckpointError: replacing the parameters failed on rank 0" in second["another model"]
