"""`infinity bench step` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.bench.step_io import StepTraffic, _mixed
from storage.drives import StorageOptions
from storage.types import Op
from tests.cli.command import call

SMALL = ("--preset", "tiny", "--layers", "2", "--rounds", "2")


@pytest.mark.parametrize("schedule", ["overlapped", "deferred", "synchronous"])
def test_a_step_beside_its_bound(tmp_path: Path, schedule: str) -> None:
    swap, target = tmp_path / "swap", tmp_path / "step.json"
    swap.mkdir()
    code, output, error = call("bench", "step", *SMALL, "--nvme", swap, "--schedule", schedule, "--json", target)
    assert code == 0, error
    assert "compute in the step" in output and "nvme in the step" in output
    alone = ("nvme alone", "compute alone", "optimizer alone", "link alone")
    for text in ("step, median", *alone, "step / bound", "together"):
        assert text in output
    report = json.loads(target.read_text())
    assert report["schedule"] == schedule
    assert len(report["step_seconds"]["all"]) == report["rounds"] == 2
    bounds = report["bounds_seconds"]
    assert report["ratio"] == pytest.approx(report["step_seconds"]["median"] / max(bounds.values()))
    assert bounds[report["binding"]] == max(bounds.values())
    together = bounds["compute, optimizer and transfers on the CPU"]
    assert together > bounds["compute and optimizer on the CPU"] + bounds["link"] / 2  # medians of sums
    assert report["d2h_bytes"] == 4 * report["parameters"]  # each gradient once
    assert report["h2d_bytes"] > 0
    assert report["transfers_cpu_seconds"] > 0
    difference = report["difference_seconds"]
    assert sum(difference["by_cause"].values()) == pytest.approx(difference["total"])
    mean_s = sum(report["step_seconds"]["all"]) / 2
    in_step = report["in_step_seconds"]
    assert in_step["compute"] + sum(report["stalls_seconds"].values()) == pytest.approx(mean_s)
    assert all(0 < in_step[name] <= mean_s for name in ("compute", "nvme", "optimizer", "link"))
    assert report["nvme_read_bytes"] > 0
    assert list(swap.iterdir()) == []


def test_without_the_plain_model_computing_is_no_bound(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    code, _, error = call("bench", "step", *SMALL, "--no-plain", "--nvme", tmp_path, "--json", target)
    assert code == 0, error
    assert set(json.loads(target.read_text())["bounds_seconds"]) == {"nvme", "optimizer", "link"}


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path: Path) -> None:
    code, _, error = call("bench", "step", *SMALL, "--json", tmp_path / "no" / "step.json")
    assert code == 2
    assert "does not exist" in error


def test_the_drives_move_the_bytes_of_the_step(tmp_path: Path) -> None:
    traffic = StepTraffic([tmp_path], StorageOptions(calibrate="off"), 40 << 20, 24 << 20)
    try:
        before = {op: traffic._store.stats.total(op).payload_nbytes for op in Op}
        cost = traffic.measure()
        assert cost.elapsed_s > 0 < cost.cpu_s
        moved = {op: traffic._store.stats.total(op).payload_nbytes - before[op] for op in Op}
    finally:
        traffic.close()
    assert moved[Op.READ] == pytest.approx(40 << 20, rel=0.05)
    assert moved[Op.WRITE] == pytest.approx(24 << 20, rel=0.05)
    assert list(tmp_path.iterdir()) == []


def test_reads_and_writes_are_spread_evenly() -> None:
    operations = _mixed(6, 3)
    assert operations.count(Op.READ) == 6
    assert all(operations[start : start + 3].count(Op.WRITE) == 1 for start in (0, 3, 6))
    assert _mixed(0, 0) == []


def test_a_batch_beyond_memory_is_told_before_anything_runs(tmp_path: Path) -> None:
    code, _, error = call("bench", "step", *SMALL, "--nvme", tmp_path, "--batch", "999999999")
    assert code == 2
    assert "are available here. Take a smaller --batch" in error
