"""Ranks that differ neither hang nor diverge; a rank that fails takes the others down with its own error.

PEER_DEEPSPEED section 4, 20 (ranks activate different experts: collective hang) and 23 (a group of one rank is silently
unsharded).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks.branching import (
    be_somewhere_else,
    exchange_when_the_other_has_left,
    fail,
    fail_in_offload,
    make_mistakes,
    receive_from_a_rank_that_keeps_silent,
    train_experts,
    train_experts_plain,
    train_scaled,
    train_without_the_second_step,
)
from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import assert_same_bits


@pytest.mark.parametrize("schedule", ["synchronous", pytest.param("overlapped", marks=pytest.mark.slow)])
def test_ranks_take_different_branches(tmp_path: Path, schedule: str) -> None:
    plain = train_experts_plain(clips=schedule != "overlapped")
    (ours, served), (others, served_by_other) = values(run_ranks(train_experts, 2, tmp_path, schedule))
    assert_same_bits(ours, others)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert served > 0
    assert served_by_other > 0
    idle = [name for name in plain if name.startswith("experts.3")]
    assert idle
    for name in idle:  # no gradient anywhere: no update, and no weight decay either
        assert torch.equal(ours[name], plain[name])


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    plain = train_without_the_second_step()
    results = values(run_ranks(train_scaled, 2, tmp_path))
    for parameters, scale, skipped in (found for result in results for found in result):
        assert (scale, skipped) == (2.0**9, 1)
        assert_same_bits(parameters, results[0][0][0])
        for name, value in plain.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.slow
def test_what_ranks_must_do_together_is_checked(tmp_path: Path) -> None:
    for said in values(run_ranks(make_mistakes, 2, tmp_path)):
        assert "RankError: the ranks hold different models" in said["another model"]
        assert "blocks.0.up.weight: (53, 37)" in said["another model"]
        assert "blocks.0.up.weight: (54, 37)" in said["another model"]
        assert "'synchronous' or 'auto'" in said["overlapped"]
        assert "shared out among the ranks" in said["gradient"]
        assert "the checkpoints to save differ between the ranks" in said["save"]
        assert "file is there and is not a checkpoint" in said["unsaved"]
        assert "there is no checkpoint at" in said["nothing there"]
        assert "rank 0 clips its gradients, rank 1 is in optimizer.step()" in said["clip"]
        assert "the gradients thrown away, differ between the ranks" in said["zero_grad"]
        assert int(said["again"]) > 0
        assert "2 ranks share this model, and a changed model is adopted by one rank only" in said["adopt"]


def test_a_rank_that_cannot_offload_tells_the_others_why(tmp_path: Path) -> None:
    first, second = values(run_ranks(fail_in_offload, 2, tmp_path))
    assert second[0].startswith("PlacementError")
    assert first[0].startswith("RankError: rank 1 failed with PlacementError: ")
    assert "nobody knows the first values" in first[1]
    assert second[1].startswith("RankError: rank 0 failed with ")
    assert "nobody knows the first values" in second[1]


def test_an_exchange_that_has_failed_at_once_is_no_success(tmp_path: Path) -> None:
    """What it would give is memory that nobody has written."""
    first, _ = values(run_ranks(exchange_when_the_other_has_left, 2, tmp_path))
    assert first.startswith("RankError: rank 1 has closed its engine or ended")


def test_ranks_that_are_not_in_the_same_place_are_told(tmp_path: Path) -> None:
    """What they send differs in size; their processes would end, or wait for each other."""
    for *said, last in values(run_ranks(be_somewhere_else, 2, tmp_path)):
        assert all(one.startswith("RankError: the ranks disagree: ranks [") for one in said)
        assert "ranks [0] tell each other how something went" in said[0]
        assert "ranks [1] ask each other for tensors" in said[0]
        assert "ranks [0] are in a forward, a backward, a step" in said[1]
        assert last == "still here"


def test_a_rank_that_lives_and_keeps_silent_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    first, _ = values(run_ranks(receive_from_a_rank_that_keeps_silent, 2, tmp_path))
    assert first.startswith("RankError: a transfer between ranks [0, 1] failed on rank 0")
    assert "was not there within 1 s (rank_timeout_s); see the other ranks' output" in first


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("forward", "rank 1 failed with ValueError: a module of rank 1 exploded"),
        pytest.param("outside", "rank 1 failed with ValueError: the data loader is empty", marks=pytest.mark.slow),
        pytest.param("killed", "a rank has died without a word", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_takes_the_others_down_with_its_error(tmp_path: Path, where: str, told: str) -> None:
    first, second = run_ranks(fail, 2, tmp_path, where, check=False)
    assert first.code != 0
    assert second.code != 0
    assert "RankError" in first.output
    assert told in first.output
    assert not list(tmp_path.rglob("rank0/*.swap"))
