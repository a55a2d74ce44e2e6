"""What observing costs: trace, stalls, counters and a metrics file, as a share of a training step.

    python benchmarks/observing.py [--preset small] [--steps 6] [--rounds 7] [--json FILE]

Every kind of note is timed by itself (CPU time of many in a row, the median of rounds), a real run says how many of
each a step takes and how long a step is, and the product is the share. That holds on a busy machine too, where two
whole runs beside each other would differ by more than what is measured. The reading of the counters after each step
and the row in a file are what `MetricsLog` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.bench.arguments import at_least, result_file
from infinity.bench.machine import describe_machine
from infinity.observe.exporters import JsonLines, MetricsLog
from infinity.observe.stalls import StallCause, StallClock
from infinity.observe.trace import Trace
from infinity.report.record import RunRecord

_PHASES = ("gather", "gradient", "step")
_N = 20_000


@dataclass(frozen=True, slots=True)
class Cost:
    """One kind of note in one step."""

    per_step: float
    cpu_us: float

    @property
    def us_per_step(self) -> float:
        return self.per_step * self.cpu_us


def cpu_us(function: Callable[[], object], count: int, rounds: int) -> float:
    """CPU microseconds of one call on this thread."""
    found = []
    for _ in range(rounds):
        begun_s = time.thread_time()
        for _ in range(count):
            function()
        found.append((time.thread_time() - begun_s) / count * 1e6)
    return statistics.median(found)


def unit_costs(rounds: int) -> dict[str, float]:
    """CPU microseconds of each kind of note."""
    trace = Trace()
    stalls = StallClock(60.0, lambda: 0, str, lambda s: trace.add(s.cause.value, "stall", s.start_s, s.duration_s))

    def phase() -> None:
        with trace.phase("blocks.0/bfloat16", "gather"):
            pass

    def stall() -> None:
        with stalls.charged(StallCause.NVME_READ):
            pass

    return {
        "span": cpu_us(lambda: trace.add("blocks.0", "forward", 0.0, 1.0, "link", nbytes=1), _N, rounds),
        "phase": cpu_us(phase, _N, rounds),
        "stall": cpu_us(stall, _N, rounds),
        "row": row_cost(rounds),
    }


def row_cost(rounds: int) -> float:
    """CPU microseconds of one `MetricsLog.step`: read all counters, write a line."""
    with tempfile.TemporaryDirectory() as scratch:
        swap = Path(scratch) / "swap"
        swap.mkdir()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        config = infinity.Config(
            precision="fp32",
            device={"kind": "cpu", "budget": "1MiB"},
            host={"budget": "300KiB"},
            nvme={"paths": [swap]},
            resident_threshold=0,
        )
        with (
            infinity.offload(model, config) as engine,
            MetricsLog(engine, [JsonLines(Path(scratch) / "run.jsonl")]) as log,
        ):
            return cpu_us(lambda: log.step(loss=1.0), 500, rounds)


def notes_per_step(preset: str, steps: int) -> tuple[Counter[str], float, dict[str, Any]]:
    """How many spans of each category a step of a real run has, the median of its seconds, and the run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "infinity", "train", "--preset", preset, "--steps", str(steps)]
        subprocess.run([*command, "--record", str(folder)], check=True, stdout=subprocess.DEVNULL)
        record = RunRecord.load(folder)
    ends = sorted(span["ts"] + span["dur"] for span in record.spans if span["cat"] == "step")
    window = [span for span in record.spans if ends[0] <= span["ts"] < ends[-1]]
    counts = Counter(span["cat"] for span in window)
    counts["held"] = sum(ends[0] <= each["ts"] < ends[-1] for each in record.held)
    seconds = statistics.median(record.run["step_seconds"][1:])
    return Counter({kind: count / (len(ends) - 1) for kind, count in counts.items()}), seconds, record.run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=at_least(3), default=6)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args()
    counts, step_s, run = notes_per_step(given.preset, given.steps)
    per_note = unit_costs(given.rounds)
    phases, stalls = sum(counts[kind] for kind in _PHASES), counts["stall"]
    costs = {
        "spans": Cost(sum(counts.values()) - phases - stalls, per_note["span"]),
        "phases": Cost(phases, per_note["phase"]),
        "stalls": Cost(stalls, per_note["stall"]),
        "row of metrics": Cost(1, per_note["row"]),
    }
    total_us = sum(cost.us_per_step for cost in costs.values())
    for name, cost in costs.items():
        print(f"{name:15} {cost.per_step:8.1f} a step x {cost.cpu_us:7.2f} us = {cost.us_per_step / 1e3:7.3f} ms")
    share = total_us / 1e6 / step_s
    print(f"together {total_us / 1e3:.3f} ms of a step of {step_s * 1e3:.1f} ms ({given.preset}): {share:.2%}")
    if given.json is not None:
        result = {
            "machine": describe_machine(),
            "preset": given.preset,
            "parameters": run["model"]["parameters"],
            "step_seconds": step_s,
            "costs": {name: asdict(cost) for name, cost in costs.items()},
            "share": share,
        }
        given.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
