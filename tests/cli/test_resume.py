"""`--save` and `--resume`: a run in two parts gives the bits of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import call, train_report

ONE_STEP = ("train", "--preset", "tiny", "--steps", "1")


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_a_resumed_run_goes_on_in_its_metrics_file(tmp_path: Path) -> None:
    saved, metrics = tmp_path / "saved", tmp_path / "metrics.jsonl"
    common = ("--layers", "2", "--metrics", metrics)
    train_report(_folder(tmp_path, "first"), *common, "--steps", "2", "--save", saved)
    before = metrics.read_text()
    with metrics.open("a") as file:  # as of a run that went on after it was saved, and was killed in a row
        file.write('{"step": 2, "loss": 9.0}\n{"step": 3, "lo')
    rest = train_report(_folder(tmp_path, "rest"), *common, "--steps", "2", "--resume", saved)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert metrics.read_text().startswith(before)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows[2:]] == rest["losses"]
    train_report(_folder(tmp_path, "anew"), *common, "--steps", "1")
    assert len(metrics.read_text().splitlines()) == 1


@pytest.mark.slow
def test_two_parts_are_one_run(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    settings = ("--precision", "bf16")
    whole = train_report(_folder(tmp_path, "whole"), *settings, "--steps", "5")
    first = train_report(_folder(tmp_path, "first"), *settings, "--steps", "3", "--save", saved)
    rest = train_report(_folder(tmp_path, "rest"), *settings, "--steps", "2", "--resume", saved)
    assert rest["first_step"] == 3
    assert first["losses"] + rest["losses"] == whole["losses"]
    counted = [{name: step[name] for name in rest["expected_traffic"][0]} for step in rest["traffic"]["per_step"]]
    assert counted == rest["expected_traffic"]


@pytest.mark.slow
def test_a_resumed_run_is_compared_with_the_whole_plain_run(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    settings = ("--precision", "fp32", "--clip", "0.5")
    train_report(_folder(tmp_path, "first"), *settings, "--steps", "2", "--save", saved)
    rest = train_report(_folder(tmp_path, "rest"), *settings, "--steps", "2", "--resume", saved, "--baseline")
    assert rest["baseline"]["losses"] == rest["losses"]
    assert rest["baseline"]["parameters_equal"] is True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run of one step."""
    folder = tmp_path_factory.mktemp("run")
    assert call(*ONE_STEP, "--nvme", folder, "--save", folder / "saved")[0] == 0
    return folder / "saved"


def test_says_what_is_different_from_the_saved_run(saved: Path, tmp_path: Path) -> None:
    code, output, _ = call(*ONE_STEP, "--nvme", tmp_path, "--resume", saved, "--lr", "0.5")
    assert code == 0
    assert "lr: saved with 0.003, now 0.5" in output


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    code, _, error = call(*ONE_STEP, "--nvme", tmp_path, "--resume", saved, "--layers", "4")
    assert code == 1
    assert "CheckpointError" in error
    assert list(tmp_path.iterdir()) == []
