"""Training over ranks gives what one process gives on the whole batch, and every rank holds and moves its share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks.jobs import train_cases
from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import Case, Outcome, assert_as_whole, assert_same_bits, train_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]  # every process imports torch
_TIGHT = {"host": {"budget": "400KiB"}, "device": {"kind": "cpu", "budget": "1MiB"}}


def shares_by_case(results: Sequence[list[Outcome]]) -> list[list[Outcome]]:
    return [[outcomes[number] for outcomes in results] for number in range(len(results[0]))]


def assert_traffic_is_the_closed_form(outcome: Outcome) -> None:
    counted = [(step["nvme_read_bytes"], step["nvme_write_bytes"]) for step in outcome.per_step]
    assert counted == list(outcome.expected)


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    cases = {
        "roomy": Case(max_norm=1.0, accumulate=2),
        "nvme": Case(max_norm=1.0, accumulate=2, clip_in_optimizer=True, settings=_TIGHT),
        "deferred": Case(max_norm=1.0, accumulate=2, settings=_TIGHT | {"schedule": "deferred"}),
        "meta": Case(meta=True),
    }
    results = values(run_ranks(train_cases, 2, tmp_path, list(cases.values())))
    found = dict(zip(cases, shares_by_case(results), strict=True))
    for name, case in cases.items():
        assert_as_whole(train_whole(case), found[name])
    for share in found["roomy"] + found["nvme"] + found["meta"]:
        assert_traffic_is_the_closed_form(share)
    for name in ("nvme", "deferred"):  # where shards lie, and when they are updated, does not change a bit
        for one, other in zip(found["roomy"], found[name], strict=True):
            assert one.losses == other.losses
            assert_same_bits(one.parameters, other.parameters)
    assert all(step["nvme_read_bytes/grad"] for step in found["nvme"][0].per_step)
