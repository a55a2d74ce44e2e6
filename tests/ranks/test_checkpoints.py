"""A checkpoint of any number of ranks gives the same state, bit for bit, on any other number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.checkpoint.reader import CheckpointReader
from tests.ranks.checkpoints import (
    load_each,
    save_behind,
    save_what_one_rank_refuses,
    stored_tensors,
    train_and_save,
)
from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import assert_same_bits

Saved = dict[int, tuple[Path, list[Any]]]


def save(folder: Path, size: int, stage: int = 3, **settings: Any) -> tuple[Path, list[Any]]:
    checkpoint = folder / "checkpoint"
    return checkpoint, values(run_ranks(train_and_save, size, folder, checkpoint, {"stage": stage, **settings}))


def assert_loads(folder: Path, saved: list[tuple[Path, list[Any]]], size: int, **settings: Any) -> None:
    paths = [path for path, _ in saved]
    for found in values(run_ranks(load_each, size, folder, paths, settings)):
        for (state, losses), (_, before) in zip(found, saved, strict=True):
            assert_same_bits(state, before[0][0])
            if size == len(before):
                assert losses in [after for _, after in before]
    for number, path in enumerate(paths):  # the gradients that waited, too: they add up in another number of parts
        assert_same_bits(stored_tensors(folder / f"again{number}"), stored_tensors(path))
        assert any(name.startswith("gradient/") for name in stored_tensors(path))


def test_two_ranks_go_on_as_they_would_have(tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", 2)
    files = sorted(path.name for path in saved[0].iterdir())
    assert {name.split(".")[1] for name in files if name.startswith("group")} == {"rank0", "rank1"}
    with CheckpointReader(saved[0]) as checkpoint:
        assert len(checkpoint.index.rng) == 2
    assert_loads(tmp_path / "loaded", [saved], 2)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_written_behind_training_on_all_ranks_or_none(tmp_path: Path, stage: int) -> None:
    for seen in values(run_ranks(save_behind, 2, tmp_path, {"stage": stage})):
        assert seen["trained before"]
        assert seen["saved"]
        assert seen["differing"] == []
        for said in (seen["said"], seen["said at once"]):
            assert "No space left on device" in said
        assert seen["left"] == []
        assert '"behind"' in seen["latest"]
        assert "lost" not in seen["latest"]
        assert seen["in the end"]


def test_a_save_that_fails_on_one_rank_before_it_begins_fails_on_all(tmp_path: Path) -> None:
    """They would wait for that one, and what it does next would meet their part of the save."""
    first, second = values(run_ranks(save_what_one_rank_refuses, 2, tmp_path))
    assert "failed on rank 1: IterationError: parameters of head" in first["said"]
    assert "parameters of head" in second["said"]
    assert first["saved"]


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[Any]]]:
    """Saved on one, two and four ranks, and on two in stage 1."""
    where = [tmp_path_factory.mktemp("saved") for _ in range(4)]
    cases = ((1, 3), (2, 3), (4, 3), (2, 1))
    return [save(folder, *case) for folder, case in zip(where, cases, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "bf16", "state_format": "int8"}], ids=str)
def test_halves_and_codes_are_those_of_any_number_of_ranks(tmp_path: Path, settings: dict[str, Any]) -> None:
    saved = save(tmp_path / "saved", 2, **settings)
    for size in (1, 3):
        assert_loads(tmp_path / f"loaded{size}", [saved], size, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 3), (3, 3), (4, 3), (2, 2)])
def test_any_number_of_ranks_loads_any_other(
    tmp_path: Path, everywhere: list[tuple[Path, list[Any]]], size: int, stage: int
) -> None:
    assert_loads(tmp_path, everywhere, size, stage=stage)
