"""`infinity train --durability step` on two ranks, killed (SIGKILL) at points all over its steps, goes on with the same
bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.spawn import ROOT

pytestmark = pytest.mark.timeout(400)  # every job is two processes


def kill_at(folder: Path, stage: int, points: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.ranks.killing", str(folder / "jobs"), str(stage), str(points)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert not report["failures"], "\n".join(report["failures"].values())
    assert sum(report["steps"].values()) == points
    assert {"read", "write", "start", "begun", "noted", "before commit", "committed", "freed"} <= report["kinds"].keys()
    return report


@pytest.mark.slow
def test_a_killed_job_goes_on(tmp_path: Path) -> None:
    kill_at(tmp_path, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "points"), [(3, 8), (1, 4)])
def test_killed_at_many_points(tmp_path: Path, stage: int, points: int) -> None:
    report = kill_at(tmp_path, stage, points)
    assert len(report["steps"]) > 1
