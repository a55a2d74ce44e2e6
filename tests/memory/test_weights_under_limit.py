"""Weights that are many times the memory: in, through a checkpoint, and out again, under a hard limit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.memory.limits import run_limited

pytest.importorskip("transformers")

_MIB = 1 << 20
_REPOSITORY = Path(__file__).parents[2]


def _step(step: str, folder: Path, layers: int, limit_nbytes: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.memory.large_weights", step, str(folder), str(layers)]
    if limit_nbytes is None:
        result = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=_REPOSITORY, check=False)
        kind = "no limit"
    else:
        limited = run_limited(command, limit_nbytes, timeout_s=500, cwd=_REPOSITORY)
        result, kind = limited.result, limited.kind
    assert result.returncode == 0, kind + result.stdout + result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def _export(folder: Path, limit_nbytes: int, size: str) -> None:
    command = [sys.executable, "-m", "infinity", "checkpoint", "export", str(folder / "saved"), str(folder / "out")]
    limited = run_limited([*command, "--shard-size", size], limit_nbytes, timeout_s=500, cwd=_REPOSITORY)
    assert limited.result.returncode == 0, limited.kind + limited.result.stdout + limited.result.stderr


def _through(folder: Path, layers: int, limit_nbytes: int, size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        made = _step("make", folder, layers, None)
        loaded = _step("load", folder, layers, limit_nbytes)
        shutil.rmtree(folder / "source")
        _export(folder, limit_nbytes, size)
        shutil.rmtree(folder / "saved")
        compared = _step("compare", folder, layers, None)
    finally:
        for name in ("source", "saved", "out"):
            shutil.rmtree(folder / name, ignore_errors=True)
    assert loaded["read_bytes"] == made["parameters"] * 4
    assert loaded["host_peak_bytes"] <= 160 * _MIB
    assert loaded["peak_rss_bytes"] <= limit_nbytes
    assert loaded["logits_equal"]
    assert compared["logits_equal"]
    return made, loaded


@pytest.mark.slow
def test_a_few_layers_under_a_limit(tmp_path: Path) -> None:
    _through(tmp_path, 3, 1024 * _MIB, "100MB")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_four_gigabytes_in_one_gibibyte(tmp_path: Path) -> None:
    """4.3 GB of weights, a limit of 1 GiB on the process; transformers reads the export and gives the same logits."""
    made, _ = _through(tmp_path, 64, 1024 * _MIB, "1GB")
    assert made["parameters"] * 4 > 4_000_000_000
