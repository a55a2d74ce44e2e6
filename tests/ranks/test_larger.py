"""Parameters larger than the whole host budget of a rank pass it in chunks, with the bits of a run that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.jobs import train_cases, train_hybrid
from tests.ranks.larger import SETTINGS, VOCAB, fail_in_a_chunk, train_unevenly, use_every_way
from tests.ranks.spawn import run_ranks, values
from tests.ranks.test_training import assert_traffic_is_the_closed_form, shares_by_case
from tests.ranks.training import Case, Outcome, assert_as_whole, assert_same_bits, train_whole

LARGE = Case(vocab=VOCAB, blocks=2, settings=SETTINGS)


def assert_chunked(share: Outcome, n_groups: int = 2) -> None:
    """The embedding and the head are chunked, the budget holds not even one, and what was planned is what was held."""
    metrics = share.metrics
    assert metrics["chunked"] == n_groups
    assert metrics["host/peak_bytes"] <= metrics["host budget"] < metrics["largest"]
    assert metrics["host/passage_peak_bytes"] > 0


def assert_as_held(cases: list[Case], folder: Path, size: int = 2, **changes: Any) -> list[list[Outcome]]:
    """Every case, in the smallest host budget, has the bits of the same run in a budget that holds everything."""
    both = [each for case in cases for each in (case, replace(case, smallest=True))]
    found = shares_by_case(values(run_ranks(train_cases, size, folder, both)))
    for case, held, chunked in zip(cases, found[::2], found[1::2], strict=True):
        for one, other in zip(held, chunked, strict=True):
            assert one.losses == other.losses
            assert one.norms == other.norms
            assert_same_bits(one.parameters, other.parameters)
            assert one.metrics["chunked"] == 0
            assert_traffic(case, other)
            assert other.metrics["received"] == one.metrics["received"]
    return found[1::2]


def assert_traffic(case: Case, share: Outcome) -> None:
    if case.frozen:  # autograd has no use for it in a backward, where the closed form counts a read
        written = [step["nvme_write_bytes"] for step in share.per_step]
        assert written == [write_nbytes for _, write_nbytes in share.expected]
        return
    # clip_grad_norm_ says only when the first gradients are in the swap file that it needs their norms.
    is_late = case.max_norm is not None and not case.clip_in_optimizer
    assert_traffic_is_the_closed_form(share, first=int(is_late))


def test_a_parameter_larger_than_the_host_budget_trains_on_two_ranks(tmp_path: Path) -> None:
    case = replace(LARGE, max_norm=0.1, clip_in_optimizer=True, accumulate=2)
    (shares,) = assert_as_held([case], tmp_path)
    assert_as_whole(train_whole(case), shares)
    for share in shares:
        assert_chunked(share)


@pytest.mark.slow
def test_every_stage_schedule_and_precision(tmp_path: Path) -> None:
    """The stages that hold parameters whole chunk whole parameters, and trade them after the step chunk by chunk."""
    clipped = replace(LARGE, max_norm=0.1, clip_in_optimizer=True, accumulate=2)
    cases = {
        "stage 1": _with(clipped, stage=1),
        "stage 2": _with(clipped, stage=2),
        "deferred": _with(clipped, schedule="deferred"),
        "overlapped": _with(LARGE, schedule="overlapped"),
        "clip_grad_norm_": replace(LARGE, max_norm=0.1, accumulate=2),
        "bf16": _with(clipped, precision="bf16"),
        "bf16 in stage 1": _with(clipped, precision="bf16", stage=1),
        "durable": _with(LARGE, durability="step"),
        "frozen": replace(LARGE, frozen=True),
        "meta": replace(LARGE, meta=True),
        "meta in stage 2": _with(replace(LARGE, meta=True), stage=2),
    }
    found = dict(zip(cases, assert_as_held(list(cases.values()), tmp_path), strict=True))
    for name, shares in found.items():
        if not name.startswith("bf16"):
            assert_as_whole(train_whole(cases[name]), shares)
        for share in shares:
            assert_chunked(share)
    for one, other in zip(found["stage 1"], found["stage 2"], strict=True):
        assert one.losses == other.losses
        assert_same_bits(one.parameters, other.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_need_not_chunk_alike(tmp_path: Path, stage: int) -> None:
    """Where nodes have other budgets, or other numbers of ranks, each rank chunks what its own budget asks for."""
    outcomes = values(run_ranks(train_unevenly, 2, tmp_path, stage))
    for held, uneven in outcomes:
        assert held.losses == uneven.losses
        assert_same_bits(held.parameters, uneven.parameters)
    assert [uneven.metrics["chunked"] for _, uneven in outcomes] == [0, 2]


def _with(case: Case, **settings: Any) -> Case:
    return replace(case, settings=case.settings | settings)


@pytest.mark.slow
def test_edits_branches_checkpoints_and_weights(tmp_path: Path) -> None:
    for ways in values(run_ranks(use_every_way, 2, tmp_path)):
        for held, chunked in ways.values():
            assert_same_bits(held, chunked)


@pytest.mark.slow
def test_replicas_of_shards(tmp_path: Path) -> None:
    """Four ranks, two replicas of two shards: averages over both dimensions pass in chunks as well."""
    case = replace(LARGE, max_norm=0.1, clip_in_optimizer=True, accumulate=2)
    found = values(run_ranks(train_hybrid, 4, tmp_path, [case, replace(case, smallest=True)]))
    assert_as_whole(train_whole(case), [chunked for _, chunked in found])
    for held, chunked in found:
        assert held.losses == chunked.losses
        assert_same_bits(held.parameters, chunked.parameters)
        assert_traffic_is_the_closed_form(chunked)
        assert_chunked(chunked)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["head/float32", "embed/float32/grad"])
def test_a_rank_that_cannot_read_a_chunk_takes_the_others_down(tmp_path: Path, key: str) -> None:
    first, second = run_ranks(fail_in_a_chunk, 2, tmp_path, key, check=False)
    assert first.code != 0
    assert second.code != 0
    assert key in second.output
    assert "rank 1 failed with " in first.output
    assert key in first.output.split("rank 1 failed with ")[1]
