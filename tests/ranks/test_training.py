"""Training over ranks gives what one process gives on the whole batch, and every rank holds and moves its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks.jobs import (
    pipeline_batch,
    pipeline_loss,
    pipeline_part,
    train_cases,
    train_on_grids,
    train_pipeline,
    train_with_unequal_budgets,
)
from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import STEPS, Case, Outcome, assert_as_whole, assert_same_bits, train_whole

_TIGHT = {"host": {"budget": "400KiB"}, "device": {"kind": "cpu", "budget": "1MiB"}}
# Groups of many chunks, none of which passes in chunks, and room for little more than one gradient.
_IN_PARTS = {"schedule": "overlapped", "chunk": "64KiB", "host": {"budget": "5MiB"}}


def shares_by_case(results: Sequence[list[Outcome]]) -> list[list[Outcome]]:
    return [[outcomes[number] for outcomes in results] for number in range(len(results[0]))]


def assert_traffic_is_the_closed_form(outcome: Outcome, first: int = 0) -> None:
    counted = [(step["nvme_read_bytes"], step["nvme_write_bytes"]) for step in outcome.per_step]
    assert counted[first:] == list(outcome.expected)[first:]


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """One case of each kind; the others are slow."""
    overlapped = Case(settings=_TIGHT | {"schedule": "overlapped"})
    in_parts = Case(vocab=8000, blocks=2, settings=_IN_PARTS)
    cases = [Case(max_norm=1.0, clip_in_optimizer=True, settings=_TIGHT), overlapped, in_parts]
    found = shares_by_case(values(run_ranks(train_cases, 2, tmp_path, cases)))
    for case, shares in zip(cases, found, strict=True):
        assert_as_whole(train_whole(case), shares)
        for share in shares:
            assert_traffic_is_the_closed_form(share)
    assert all(share.metrics["updated_early"] > 0 for share in found[1] + found[2])
    for share in found[2]:
        assert share.metrics["chunked"] == 0
        assert share.metrics["host/gradients_peak_bytes"] < 2 * share.metrics["largest"]


@pytest.mark.slow
def test_the_stages_give_the_same_bits_and_hold_their_share(tmp_path: Path) -> None:
    """Parameters, gradients and state held by a rank: all, all, half; all, half, half; half, half, half."""
    settings = [{"stage": stage} | tier for tier in ({}, _TIGHT) for stage in (1, 2, 3)]
    cases = [Case(max_norm=1.0, accumulate=2, clip_in_optimizer=True, settings=each) for each in settings]
    found = shares_by_case(values(run_ranks(train_cases, 2, tmp_path, cases)))
    whole = train_whole(cases[0])
    for case, shares in zip(cases, found, strict=True):
        assert_as_whole(whole, shares)
        for share, reference in zip(shares, found[2], strict=True):
            assert share.losses == reference.losses
            assert_same_bits(share.parameters, reference.parameters)
            assert_traffic_is_the_closed_form(share)
            stage = case.settings["stage"]
            # Everything is held in host memory, so the plan is what is held: parameters, state, gradients.
            numel = share.metrics["numel"]
            if "host" not in case.settings:
                pinned = numel * 4 // (2 if stage == 3 else 1) + numel * 8 // 2
                gradients = numel * 4 // (1 if stage == 1 else 2)
                assert share.metrics["pinned"] == pinned
                assert share.metrics["host/gradients_peak_bytes"] == gradients
                assert share.metrics["host/peak_bytes"] >= pinned + gradients


@pytest.mark.slow
def test_ranks_with_unequal_budgets_agree_on_the_schedule(tmp_path: Path) -> None:
    """Updates in one rank's forward and in the other's step would be waited for twice in every step."""
    roomy = Case(max_norm=1.0, accumulate=2, clip_in_optimizer=True)
    tight = replace(roomy, settings=_TIGHT)
    found = values(run_ranks(train_with_unequal_budgets, 2, tmp_path, [roomy, tight]))
    assert_as_whole(train_whole(roomy), [outcome for outcome, _, _ in found])
    assert [schedule for _, schedule, _ in found] == ["synchronous"] * 2
    roomy_reason, tight_reason = (reason for _, _, reason in found)
    assert "the host memory of another rank" in roomy_reason and "host memory does not hold" in tight_reason


@pytest.mark.slow
def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    cases = {
        "roomy": Case(max_norm=1.0, accumulate=2),
        "nvme": Case(max_norm=1.0, accumulate=2, clip_in_optimizer=True, settings=_TIGHT),
        "deferred": Case(
            max_norm=1.0, accumulate=2, clip_in_optimizer=True, settings=_TIGHT | {"schedule": "deferred"}
        ),
        "meta": Case(meta=True),
    }
    results = values(run_ranks(train_cases, 2, tmp_path, list(cases.values())))
    found = dict(zip(cases, shares_by_case(results), strict=True))
    for name, case in cases.items():
        assert_as_whole(train_whole(case), found[name])
        for share in found[name]:
            assert_traffic_is_the_closed_form(share)
    for name in ("nvme", "deferred"):  # where shards lie, and when they are updated, does not change a bit
        for one, other in zip(found["roomy"], found[name], strict=True):
            assert one.losses == other.losses
            assert_same_bits(one.parameters, other.parameters)
    assert all(step["nvme_read_bytes/grad"] for step in found["nvme"][0].per_step)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_sharded_hybrid_and_in_groups(tmp_path: Path, stage: int) -> None:
    case = Case(max_norm=1.0, settings={"stage": stage})
    whole = train_whole(case)
    everywhere, hybrid, half, group = shares_by_case(values(run_ranks(train_on_grids, 4, tmp_path, case)))
    for shares in (everywhere, hybrid):
        assert_as_whole(whole, shares)
    for pair in ((half[0], half[2]), (half[1], half[3]), group[:2], group[2:]):
        assert_as_whole(whole, pair)
        assert_same_bits(pair[0].parameters, half[0].parameters)
    held = [shares[0].metrics["pinned"] / shares[0].metrics["numel"] for shares in (everywhere, hybrid, half)]
    parameters = {1: (4, 4, 4), 2: (4, 4, 4), 3: (1, 2, 2)}[stage]  # bytes per parameter: whole, or a part
    assert held == [own + 8 / shards for own, shards in zip(parameters, (4, 2, 2), strict=True)]


@pytest.mark.slow
def test_ranks_together_move_the_state_once(tmp_path: Path) -> None:
    """So each moves 1/N of it; between ranks goes what each lacks, in two gathers and one reduction per step."""
    for size in (2, 4):
        case = Case(settings=_TIGHT | {"host": {"budget": f"{200 * size}KiB"}})
        shares = [outcomes[0] for outcomes in values(run_ranks(train_cases, size, tmp_path / str(size), [case]))]
        whole = 8 * sum(value.numel() for value in shares[0].parameters.values())
        for step in range(STEPS):
            moved = [share.per_step[step]["nvme_write_bytes/state"] for share in shares]
            assert all(share.metrics["swapped states"] == share.metrics["units"] for share in shares)
            assert sum(moved) == whole
        for share in shares:
            assert share.metrics["received"] == STEPS * 3 * 4 * share.metrics["numel"] * (size - 1) / size


@pytest.mark.slow
def test_pipeline_stages_of_offloaded_models(tmp_path: Path) -> None:
    parts = [pipeline_part(0), pipeline_part(1)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        inputs, target = pipeline_batch(step)
        pipeline_loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    results = values(run_ranks(train_pipeline, 4, tmp_path))
    for rank, (losses, parameters) in enumerate(results):
        assert len(losses) == (2 if rank >= 2 else 0)  # the schedule keeps those of the last step
        for name, value in parts[rank // 2].named_parameters():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=2e-6, msg=name)
        assert_same_bits(parameters, results[rank - rank % 2][1])
