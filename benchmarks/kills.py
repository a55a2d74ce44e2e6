"""Kills training runs at hundreds of points and keeps what came of each, so that it can be done in parts.

    python benchmarks/kills.py --case 3 --points 55 --first 0 --last 20
    python benchmarks/kills.py --summary

The cases are those of tests/durable/test_killed.py. Every point is a process killed (SIGKILL) in the middle of a
step with `durability="step"`, and one that continues it; both are compared with the run that was not killed, bit for
bit, and the swap files are searched for lost space. Results are added to benchmarks/results/kills.json by part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infinity.bench.arguments import at_least
from infinity.replacing import replaced_file

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "kills.json"
CASES = {
    1: ("fp32", "overlapped", "300KiB", "notes"),
    2: ("bf16", "synchronous", "300KiB", "forwards"),
    3: ("bf16", "overlapped", "16MiB", "notes"),
    4: ("fp32", "synchronous", "600KiB", "forwards"),
}


def run(case: int, points: int, first: int, last: int) -> dict[str, Any]:
    """One part of one case."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        command = [sys.executable, "-m", "tests.durable.killing", f"{folder}/runs", *CASES[case]]
        command += map(str, (points, first, last))
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    report: dict[str, Any] = json.loads(ended.stdout)
    return {
        "case": "-".join(CASES[case]),
        "part": [first, last, points],
        "killed": last - first,
        "resumed_at_step": report["steps"],
        "failures": report["failures"],
        "transfers_and_commit_steps": report["points"],
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", type=int, choices=list(CASES))
    what.add_argument("--summary", action="store_true", help="of what is kept, without killing more")
    parser.add_argument("--points", type=at_least(1), default=55)
    parser.add_argument("--first", type=at_least(0), default=0)
    parser.add_argument("--last", type=at_least(1), help="default: all points")
    parser.add_argument("--part", type=at_least(1), default=5, help="points after which the result is kept")
    options = parser.parse_args()
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if options.case is not None:
        last = options.last or options.points
        for first in range(options.first, last, options.part):
            stop = min(first + options.part, last)
            kept[f"{options.case}: {first} to {stop} of {options.points}"] = run(
                options.case, options.points, first, stop
            )
            with replaced_file(RESULT) as file:
                file.write(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(f"case {options.case}: {stop} of {last}", flush=True)
    killed = sum(part["killed"] for part in kept.values())
    failed = sum(len(part["failures"]) for part in kept.values())
    print(f"{killed} killed, {killed - failed} continued with the same bits, {failed} not")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
