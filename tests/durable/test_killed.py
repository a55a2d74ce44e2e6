"""Training processes killed (SIGKILL) at points all over their steps: every time the run goes on with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
POINTS = int(os.environ.get("INFINITY_KILL_POINTS", "12"))
CASES = [
    ("fp32", "overlapped", "300KiB", "notes"),
    ("bf16", "synchronous", "300KiB", "forwards"),
    ("bf16", "overlapped", "16MiB", "notes"),
    ("fp32", "synchronous", "600KiB", "forwards"),
]


def kill_at(folder: Path, case: tuple[str, str, str, str], points: int, timeout_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.durable.killing", str(folder / "runs"), *case, str(points)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert not report["failures"], "\n".join(report["failures"].values())
    assert sum(report["steps"].values()) == points
    kinds = {"write", "start", "begun", "noted", "before commit", "committed", "freed"}
    if case[2] != "16MiB":  # there everything stays in memory, and is only written
        kinds.add("read")
    assert kinds <= report["kinds"].keys()
    return report


@pytest.mark.parametrize("case", CASES[:3], ids="-".join)
def test_killed_at_a_few_points(tmp_path: Path, case: tuple[str, str, str, str]) -> None:
    kill_at(tmp_path, case, 6, 280)


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * POINTS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_killed_at_many_points(tmp_path: Path, case: tuple[str, str, str, str]) -> None:
    """In every part of a step and of a commit; `INFINITY_KILL_POINTS=55` makes it more than 200 in all cases together.

    `benchmarks/kills.py` does the same in parts, and keeps what came out.
    """
    report = kill_at(tmp_path, case, POINTS, 50 + 30 * POINTS)
    assert set(report["steps"]) >= {"1", "2", "3"}
