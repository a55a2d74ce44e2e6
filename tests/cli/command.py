"""Running the `infinity` command as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import infinity
from infinity.cli.main import app

ROOT = Path(infinity.__file__).parent.parent
TIMEOUT_S = 100.0


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """`infinity ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-m", "infinity", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `infinity ARGUMENTS` in a process of its own."""
    process = start(*arguments)
    try:
        output, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output, error


def call(*arguments: str | Path) -> tuple[int, str, str]:
    """The same inside this process: faster, with everything but the interpreter's start."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def train_report(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """The JSON report of a successful `infinity train` with the smallest preset; leaves no swap file in `folder`."""
    target = folder / "report.json"
    swap = folder / "swap"
    swap.mkdir()
    given = ["--nvme", swap] if "--nvme" not in arguments else []
    code, _, error = call("train", "--preset", "tiny", *given, "--json", target, *arguments)
    assert code == 0, error
    assert list(swap.iterdir()) == []
    report: dict[str, Any] = json.loads(target.read_text())
    return report
