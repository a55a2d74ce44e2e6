"""Blocks of 4 KiB, 32 at a time (RND4K Q32): our engines beside each other, an earlier tree, and fio.

    python benchmarks/small_blocks.py DIRECTORY [--rounds 7] [--seconds 1] [--before TREE] [--json FILE]

All sides use the same file, depth and O_DIRECT, and take turns in changing order; medians over rounds with the range.
`direct` is a thread per block in flight, `aio` one thread with the kernel's asynchronous transfers. `--before` names a
checkout of an earlier version, whose `direct` runs in a process of its own. CPU time is that of the whole process per
block; beside throughput it tells more on a machine that is busy with other work (`load` in the result): there a thread
that was woken waits its turn, and while one thread waits all its transfers end and the drive idles. fio has both kinds:
libaio and io_uring run on one thread, psync on 32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.bench.arguments import at_least, duration_s, made_folder, result_file
from infinity.bench.engines import BenchEngine
from infinity.bench.machine import describe_machine
from infinity.bench.profiles import RND4K, Order, Workload, block_load
from infinity.bench.target import Target, open_target
from infinity.bench.tier import fill, ready

_BLOCK_NBYTES, _DEPTH = 4096, 32
_FILE_NBYTES = 1 << 30
_GRACE_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks per second, and CPU microseconds per block."""

    blocks_per_s: float
    cpu_us_per_block: float


Side = Callable[[Workload], Run]


def run_engine(engine: BenchEngine, target: Target, workload: Workload, seconds: float) -> Run:
    """One run of one of our engines in this process."""
    with ready(workload, engine, [target]) as runner:
        measured = runner.run(seconds)
    blocks = measured.nbytes / _BLOCK_NBYTES
    return Run(blocks / measured.elapsed_s, measured.cpu.total_s / blocks * 1e6)


def run_tree(tree: Path, directory: Path, read_percent: int, seconds: float) -> Run:
    """One run of `direct` as another checkout has it."""
    command = [sys.executable, __file__, str(directory), "--seconds", str(seconds), "--only", str(read_percent)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    answer = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds + _GRACE_S, check=True
    )
    return Run(**json.loads(answer.stdout))


def fio_side(target: Target, seconds: float, engine: str) -> Side:
    """fio on the same file."""
    from infinity.bench.fio import FioSetup, run_fio  # an earlier tree need not have it

    def run(workload: Workload) -> Run:
        measured = run_fio(workload, target, seconds, FioSetup(engine))
        blocks = measured.moved_nbytes / _BLOCK_NBYTES
        return Run(measured.bytes_per_s / _BLOCK_NBYTES, measured.cpu_s / blocks * 1e6)

    return run


def measure(directory: Path, rounds: int, seconds: float, before: Path | None) -> list[dict[str, object]]:
    """All sides in turns, reads and then writes."""
    figures: list[dict[str, object]] = []
    with open_target(directory, _FILE_NBYTES) as target:
        fill(target)
        sides: dict[str, Side] = {
            "direct": lambda workload: run_engine(BenchEngine.DIRECT, target, workload, seconds),
            "aio": lambda workload: run_engine(BenchEngine.AIO, target, workload, seconds),
        }
        if before is not None:
            sides["before"] = lambda workload: run_tree(before, directory, workload.read_percent, seconds)
        for engine in ("libaio", "io_uring", "psync"):
            sides[f"fio {engine}"] = fio_side(target, seconds, engine)
        for workload in RND4K.workloads:
            runs: dict[str, list[Run]] = {name: [] for name in sides}
            for number in range(rounds):
                for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    runs[name].append(sides[name](workload))
            figures += [_figure(name, workload, some) for name, some in runs.items()]
    return figures


def _figure(side: str, workload: Workload, runs: list[Run]) -> dict[str, object]:
    rates = [run.blocks_per_s for run in runs]
    cpu = statistics.median(run.cpu_us_per_block for run in runs)
    print(
        f"{workload.mix:<6}{side:<13}{statistics.median(rates) / 1e3:6.1f} kIOPS ({min(rates) / 1e3:.1f} to "
        f"{max(rates) / 1e3:.1f})  {cpu:5.1f} CPU µs per block",
        flush=True,
    )
    return {
        "side": side,
        "mix": workload.mix,
        "blocks_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "values": rates},
        "cpu_us_per_block": cpu,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=made_folder)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--seconds", type=duration_s, default=1.0)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=result_file)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # one run of `direct`, for `--before`
    chosen = parser.parse_args()
    if chosen.only is not None:
        workload = block_load("RND4K", chosen.only, _BLOCK_NBYTES, _DEPTH, Order.RANDOM)
        with open_target(chosen.directory, _FILE_NBYTES) as target:
            fill(target)
            print(json.dumps(asdict(run_engine(BenchEngine.DIRECT, target, workload, chosen.seconds))))
        return 0
    machine = describe_machine()
    figures = measure(chosen.directory, chosen.rounds, chosen.seconds, chosen.before)
    if chosen.json is not None:
        report = {"machine": machine, "block_nbytes": _BLOCK_NBYTES, "depth": _DEPTH, "figures": figures}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
