"""Losses of a small real training run with AdamW's moments in fp32, bf16 and int8.

    python benchmarks/state_formats.py [--steps 300] [--layers 2 --hidden 128 --seq 64 --batch 4] [--directory DIR]
        [--json FILE]

Runs `infinity train` once per format, with the same first values and batches of real text, each in its own process.
What is compared is the mean loss over windows of 20 steps: the largest relative difference of any window to that with
fp32 moments, and that of the last one. The losses are bit for bit reproducible, so one run of each is enough. The bytes
are those of the last step between memory and disk, per parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.bench.machine import describe_machine

FORMATS = ("fp32", "bf16", "int8")
_WINDOW = 20
_SHAPE = {"layers": 2, "hidden": 128, "seq": 64, "batch": 4}
_BUDGETS = ("--device-budget", "16MiB", "--host-budget", "4MiB")


def windows(losses: Sequence[float]) -> list[float]:
    """Means over consecutive steps."""
    whole = len(losses) - len(losses) % _WINDOW
    return [statistics.fmean(losses[start : start + _WINDOW]) for start in range(0, whole, _WINDOW)]


def train(folder: Path, state_format: str, arguments: Sequence[object]) -> dict[str, Any]:
    """The report of one run."""
    target = folder / f"{state_format}.json"
    command = [sys.executable, "-m", "infinity", "train", "--nvme", folder, "--json", target, *arguments]
    command += ["--precision", "bf16", "--state-format", state_format]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads(target.read_text())
    return report


def compare(folder: Path, arguments: Sequence[object]) -> dict[str, Any]:
    """Every format beside fp32."""
    reports = {state_format: train(folder, state_format, arguments) for state_format in FORMATS}
    expected = windows(reports["fp32"]["losses"])
    found = {}
    for name, report in reports.items():
        curve = windows(report["losses"])
        differences = [abs(ours - exact) / exact for ours, exact in zip(curve, expected, strict=True)]
        step = report["traffic"]["per_step"][-1]
        found[name] = {
            "first_loss": report["losses"][0],
            "last_window_loss": curve[-1],
            "largest_difference": max(differences),
            "last_difference": differences[-1],
            "disk_bytes_per_parameter": (step["nvme_read_bytes"] + step["nvme_write_bytes"])
            / report["model"]["parameters"],
            "window_losses": curve,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    for name, value in _SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--directory", type=Path, help="where swap files go; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        shape = {name: getattr(options, name) for name in _SHAPE}
        arguments = [f"--{name}={value}" for name, value in shape.items()]
        found = compare(Path(folder), (*arguments, f"--steps={options.steps}", *_BUDGETS))
    report = {"machine": describe_machine(), "shape": shape, "steps": options.steps, "found": found}
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
