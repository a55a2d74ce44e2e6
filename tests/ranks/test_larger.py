"""Parameters larger than the whole host budget of a rank pass it in chunks, with the bits of a run that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.jobs import train_cases
from tests.ranks.spawn import run_ranks, values
from tests.ranks.test_training import assert_traffic_is_the_closed_form, shares_by_case
from tests.ranks.training import Case, Outcome, assert_as_whole, assert_same_bits, train_whole

pytestmark = pytest.mark.timeout(200)  # every process imports torch
VOCAB = 8000
LARGE = Case(vocab=VOCAB, blocks=2, settings={"schedule": "synchronous", "device": {"kind": "cpu", "budget": "12MiB"}})


def assert_chunked(share: Outcome, n_groups: int = 2) -> None:
    """The embedding and the head are chunked, the budget holds neither, and what was planned is what was held."""
    metrics = share.metrics
    assert metrics["chunked"] == n_groups
    assert metrics["host/peak_bytes"] <= metrics["host budget"] < metrics["largest shard"]
    assert metrics["host/passage_peak_bytes"] > 0


def assert_as_held(cases: list[Case], folder: Path, size: int = 2, **changes: Any) -> list[list[Outcome]]:
    """Every case, in the smallest host budget, has the bits of the same run in a budget that holds everything."""
    both = [each for case in cases for each in (case, replace(case, smallest=True))]
    found = shares_by_case(values(run_ranks(train_cases, size, folder, both)))
    for held, chunked in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(held, chunked, strict=True):
            assert one.losses == other.losses
            assert one.norms == other.norms
            assert_same_bits(one.parameters, other.parameters)
            assert one.metrics["chunked"] == 0
            assert_traffic_is_the_closed_form(other)
            assert other.metrics["received"] == one.metrics["received"]
    return found[1::2]


def test_a_parameter_larger_than_the_host_budget_trains_on_two_ranks(tmp_path: Path) -> None:
    case = replace(LARGE, max_norm=0.1, clip_in_optimizer=True, accumulate=2)
    (shares,) = assert_as_held([case], tmp_path)
    assert_as_whole(train_whole(case), shares)
    for share in shares:
        assert_chunked(share)
