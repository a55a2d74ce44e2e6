"""`torchrun -m infinity train`: the command of one process, started on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.spawn import ROOT

pytestmark = pytest.mark.slow  # every process imports torch
_SMALL = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "2"]
_TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def train(folder: Path, launcher: list[str], *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    report = folder / f"report{len(launcher)}.json"
    command = [sys.executable, *launcher, "-m", "infinity", "train", *_SMALL, "--precision", "fp32", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += [str(report), *options]
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    return done, report


def test_two_ranks_train_and_one_prints(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    common = ("--clip", "1.0", "--nvme", str(swap))
    ranks, report = train(tmp_path, _TORCHRUN, *common, "--save", str(tmp_path / "checkpoint"))
    assert ranks.returncode == 0, ranks.stderr[-3000:]
    together: dict[str, Any] = json.loads(report.read_text())
    assert list(swap.rglob("*.swap")) == []
    resumed, _ = train(tmp_path, [], "--accumulate", "2", *common, "--resume", str(tmp_path / "checkpoint"))
    assert "continuing with step 2" in resumed.stdout, resumed.stderr[-3000:]
    single, report = train(tmp_path, [], "--accumulate", "2", *common)
    assert single.returncode == 0, single.stderr[-3000:]
    alone = json.loads(report.read_text())
    for word in ("budgets:", "text:"):
        assert ranks.stdout.count(word) == single.stdout.count(word) == 1, ranks.stdout
    assert len(together["grad_norms"]) == 2
    for told in ("of each rank, for which", "Where everything lies, of one rank"):
        assert told in ranks.stdout and told not in single.stdout
    for ours, theirs in zip(together["grad_norms"], alone["grad_norms"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)  # two ranks with a batch each, or one that accumulates two


def test_what_one_rank_only_can_do_is_refused_before_training(tmp_path: Path) -> None:
    ranks, report = train(tmp_path, _TORCHRUN, "--baseline")
    assert ranks.returncode != 0
    assert "--baseline works with one rank, and this job has 2" in ranks.stderr
    assert not report.exists()
