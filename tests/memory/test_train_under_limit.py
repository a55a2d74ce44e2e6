"""A model whose state is many times its memory trains under a hard limit, and the peak stays below the stated terms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.memory.limits import run_limited

_MIB = 1 << 20
_REPOSITORY = Path(__file__).parents[2]


def _train(arguments: list[str], limit_nbytes: int, tmp_path: Path, *, timeout_s: float) -> dict[str, object]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "infinity", "train", *arguments, "--json", str(report), "--nvme", str(tmp_path)]
    limited = run_limited(command, limit_nbytes, timeout_s=timeout_s, cwd=_REPOSITORY)
    assert limited.result.returncode == 0, limited.kind + limited.result.stdout + limited.result.stderr
    if limited.peak_nbytes is not None:
        assert limited.peak_nbytes <= limit_nbytes
    written: dict[str, object] = json.loads(report.read_text())
    return written


def _check_terms(report: dict[str, object], limit_nbytes: int) -> None:
    memory = report["memory"]
    assert isinstance(memory, dict)
    terms = ("interpreter_bytes", "activation_bytes", "device_budget_bytes", "host_budget_bytes", "trace_bytes")
    assert memory["bound_bytes"] == sum(memory[term] for term in terms)
    assert memory["peak_rss_bytes"] <= memory["bound_bytes"]
    assert report["peak_rss_bytes"] <= limit_nbytes


def test_tiny_model_under_a_limit(tmp_path: Path) -> None:
    limit_nbytes = 700 * _MIB
    report = _train(["--preset", "tiny", "--precision", "fp32", "--steps", "3"], limit_nbytes, tmp_path, timeout_s=150)
    _check_terms(report, limit_nbytes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_350m_model_in_one_and_a_half_gibibytes(tmp_path: Path, precision: str) -> None:
    """4.2 GB of state; a limit of 1.5 GiB on the process, 512 MiB of it for the host tier."""
    limit_nbytes = 1536 * _MIB
    arguments = ["--preset", "350m", "--steps", "3", "--host-budget", "512MiB", "--precision", precision]
    report = _train(arguments, limit_nbytes, tmp_path, timeout_s=550)
    _check_terms(report, limit_nbytes)
    model = report["model"]
    assert isinstance(model, dict)
    assert model["parameters"] > 350_000_000
    assert model["state_bytes"] > 4_200_000_000
