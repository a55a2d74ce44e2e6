"""`--durability step`: a killed run is continued with its folder alone, which is never lost by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import infinity
from infinity.cli import offloaded
from storage.durable import durable_folder
from tests.cli.command import call, start, train_report


@pytest.mark.slow
def test_a_killed_run_is_continued(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    options = ("--preset", "tiny", "--precision", "fp32", "--accumulate", "2", "--seed", "3", "--steps", "7")
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = train_report(whole, *options)["losses"]
    process = start("train", *options, "--nvme", swap, "--durability", "step", "--metrics", tmp_path / "steps")
    assert process.stdout is not None
    assert any(line.startswith("step 3") for line in process.stdout)
    process.kill()
    process.communicate()
    written = (tmp_path / "steps").read_text().splitlines()

    code, output, _ = call("clean", swap, "--json", tmp_path / "clean.json")
    left = json.loads((tmp_path / "clean.json").read_text())["left"]
    assert code == 0
    assert [run["is_alive"] for run in left] == [False]
    code, output, _ = call("doctor", swap, "--json", tmp_path / "doctor.json")
    assert f"a run at step {left[0]['step']}" in output
    code, _, error = call("train", *options, "--nvme", swap, "--durability", "step")
    assert code == 2
    assert "holds a run at step" in error

    code, output, error = call("train", "--resume", swap, "--json", tmp_path / "rest.json")
    assert code == 0, error
    rest = json.loads((tmp_path / "rest.json").read_text())
    assert rest["first_step"] == left[0]["step"] >= 3
    assert len(written) - 1 <= rest["first_step"] <= len(written) + 1
    assert rest["losses"] == expected[rest["first_step"] :]
    counted = [{name: step[name] for name in rest["expected_traffic"][0]} for step in rest["traffic"]["per_step"]]
    assert counted == rest["expected_traffic"]
    assert call("clean", "--resumable", swap)[0] == 0
    assert list(swap.iterdir()) == []


def test_a_run_that_is_stopped_in_its_first_step_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise infinity.InfinityError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(offloaded._Session, "train", stop)
        common = ("train", "--preset", "tiny", "--steps", "1", "--nvme", tmp_path, "--durability", "step")
        assert call(*common)[0] == 1
    code, output, error = call("train", "--resume", tmp_path)
    assert code == 0, error
    assert "continuing with step 0" in output


def test_a_run_of_several_ranks_is_continued_on_as_many(tmp_path: Path) -> None:
    for rank in range(2):
        durable_folder(tmp_path / f"rank{rank}").mkdir(parents=True)
    code, _, error = call("train", "--resume", tmp_path)
    assert code == 2
    assert "a run of 2 ranks lies there, and this job has 1" in error
    assert "torchrun --nproc-per-node 2" in error


def test_more_steps_than_were_planned(tmp_path: Path) -> None:
    common = ("train", "--preset", "tiny", "--steps", "1", "--nvme", tmp_path, "--durability", "step")
    assert call(*common)[0] == 0
    code, output, error = call("train", "--resume", tmp_path, "--steps", "1", "--lr", "0.5")
    assert code == 0, error
    assert "lr: saved with 0.003, now 0.5" in output
    code, _, error = call("train", "--resume", tmp_path, "--layers", "5", "--steps", "1")
    assert code == 1
    assert "another model" in error
    code, _, error = call("train", "--resume", tmp_path, "--precision", "bf16", "--nvme", tmp_path / "other")
    assert code == 1
    assert "there is no run to resume" in error
