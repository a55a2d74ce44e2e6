"""What a step costs: beside plain PyTorch in memory, as the model grows, and on one to three throttled drives.

    python benchmarks/step_time.py plain  [--rounds 3] [--layers 12 --hidden 768 --batch 4,16 --recompute]
    python benchmarks/step_time.py growth [--rounds 2] [--parameters 50M,100M,200M,400M,1B]
    python benchmarks/step_time.py drives [--rounds 3] [--read-mb 200 --write-mb 130]

What is compared takes turns within every round, so a machine that gets slower is slower for all of it. Figures are
medians over rounds, with the range. Everything is on NVMe but what the host budget holds. Each takes five to eight
minutes on two quiet cores with a drive of 3 GB/s; after every case it says how much is left, and `--json` holds what
has been measured by then.

`plain` runs `infinity train --baseline`: the same loop through the engine and in plain PyTorch, each in a process of
its own, per batch size. `growth` keeps the budgets and lets the number of layers grow; it fits a line to the seconds of
a step and gives R², and the spread of host memory beyond the interpreter. `drives` runs the same model on one, two and
three directories whose speed is limited to the same rate each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import infinity
from infinity.bench.arguments import at_least, made_folder, numel, result_file, several
from infinity.bench.machine import describe_machine
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.replacing import replaced_file
from storage.backends.base import Backend
from storage.backends.throttled import Throttle, ThrottledBackend


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and range of one figure over rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


Found = dict[str, Any]
Note = Callable[[Found], None]  # takes what has been found so far


def in_turns(rounds: int, cases: dict[str, Callable[[], dict[str, float]]], note: Note) -> Found:
    """Run every case once per round, in order; figures of each by name. `note` gets them after every case."""
    values: dict[str, dict[str, list[float]]] = {}
    found: Found = {}
    started_s, n_cases = time.perf_counter(), rounds * len(cases)
    for number, (name, case) in enumerate(list(cases.items()) * rounds, 1):
        for figure, value in case().items():
            values.setdefault(name, {}).setdefault(figure, []).append(value)
        latest = {figure: round(every[-1], 4) for figure, every in values[name].items()}
        elapsed_s = time.perf_counter() - started_s
        left = f"{elapsed_s:.0f} s, about {elapsed_s / number * (n_cases - number):.0f} s left"
        print(f"{number} of {n_cases} ({left}): {name}: {latest}", flush=True)
        found = {one: {f: summary(v) for f, v in figures.items()} for one, figures in values.items()}
        note(found)
    return found


def train(folder: Path, *arguments: object) -> dict[str, Any]:
    """The report of `infinity train` in a process of its own."""
    target = folder / "report.json"
    command = [sys.executable, "-m", "infinity", "train", "--nvme", str(folder), "--json", str(target)]
    subprocess.run([*command, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads(target.read_text())
    return report


def steady_s(step_seconds: Sequence[float]) -> float:
    """Seconds of a step without the first two."""
    return statistics.median(step_seconds[2:] or step_seconds)


def plain(options: argparse.Namespace, folder: Path, note: Note) -> Found:
    """Tokens per second and memory beside plain PyTorch, by batch size."""

    def case(batch: int) -> dict[str, float]:
        recompute = ["--recompute"] if options.recompute else ["--no-recompute"]
        shape = ("--layers", options.layers, "--hidden", options.hidden, "--batch", batch, *recompute)
        report = train(folder, *shape, "--steps", options.steps, "--precision", options.precision, "--baseline")
        ours, theirs = steady_s(report["step_seconds"]), steady_s(report["baseline"]["step_seconds"])
        return {
            "step_s": ours,
            "plain_step_s": theirs,
            "speed_beside_plain": theirs / ours,
            "peak_rss_bytes": report["peak_rss_bytes"],
            "plain_peak_rss_bytes": report["baseline"]["peak_rss_bytes"],
            "losses_equal": float(report["baseline"]["losses_equal"]),
        }

    return in_turns(options.rounds, {f"batch {batch}": partial(case, batch) for batch in options.batch}, note)


def layers_for(parameters: float, hidden: int) -> int:
    """Blocks of 12 x hidden² parameters that make a model of this size."""
    return max(round(parameters / (12 * hidden * hidden)), 1)


def growth(options: argparse.Namespace, folder: Path, note: Note) -> Found:
    """Seconds and host memory at fixed budgets, against parameters."""
    def case(layers: int) -> dict[str, float]:
        shape = ("--layers", layers, "--hidden", options.hidden, "--seq", 128, "--batch", 1, "--recompute")
        budgets = ("--device-budget", options.device_budget, "--host-budget", options.host_budget)
        report = train(folder, *shape, *budgets, "--steps", options.steps)
        return {
            "parameters": report["model"]["parameters"],
            "step_s": steady_s(report["step_seconds"]),
            "peak_rss_bytes": report["peak_rss_bytes"],
            "host_peak_bytes": report["peaks"]["host"],
        }

    sizes = {f"{size / 1e6:.0f} M": layers_for(size, options.hidden) for size in options.parameters}
    cases = {name: partial(case, layers) for name, layers in sizes.items()}
    return with_line(in_turns(options.rounds, cases, lambda found: note(with_line(found))))


def with_line(sizes: Found) -> Found:
    """Figures by size, and how straight a line seconds and memory make against parameters."""
    parameters = np.array([figures["parameters"]["median"] for figures in sizes.values()])
    seconds = np.array([figures["step_s"]["median"] for figures in sizes.values()])
    memory = [figures["peak_rss_bytes"]["median"] for figures in sizes.values()]
    r_squared = 1.0  # of one or two points
    if len(sizes) > 2:
        fitted = np.polyval(np.polyfit(parameters, seconds, 1), parameters)
        r_squared = 1 - float(np.sum((seconds - fitted) ** 2)) / float(np.sum((seconds - seconds.mean()) ** 2))
    line = {"r_squared": r_squared, "peak_rss_largest_over_smallest": max(memory) / min(memory)}
    return {"sizes": sizes, "line": line}


def drives(options: argparse.Namespace, folder: Path, note: Note) -> Found:
    """Seconds of a step on one, two and three drives of the same limited speed."""
    throttle = Throttle(read_nbytes_per_s=options.read_mb * 1e6, write_nbytes_per_s=options.write_mb * 1e6)

    def wrap(backend: Backend) -> Backend:
        return ThrottledBackend(backend, throttle)

    def case(count: int) -> dict[str, float]:
        paths = [folder / f"drive{number}" for number in range(count)]
        for path in paths:
            path.mkdir(exist_ok=True)
        with infinity.empty_init():
            model = Gpt(GptShape(options.layers, options.hidden, options.hidden // 64, 64))
        config = infinity.Config(
            precision=options.precision,
            device={"kind": "cpu", "budget": options.device_budget},
            host={"budget": options.host_budget},
            nvme={"paths": paths, "calibrate": "off"},
            schedule="overlapped",
        )
        times = []
        with infinity.offload(model, config, init_fn=init_weights, wrap_backend=wrap) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
            ids = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
            for _ in range(options.steps):
                started_s = time.perf_counter()
                model(ids, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.perf_counter() - started_s)
            traffic = engine.traffic.per_step[-1]
        read_s = traffic["nvme_read_bytes"] / throttle.read_nbytes_per_s
        bound_s = max(read_s, traffic["nvme_write_bytes"] / throttle.write_nbytes_per_s) / count
        if not bound_s:
            raise SystemExit(f"host memory of {options.host_budget} holds all of the model: lower --host-budget")
        step_s = steady_s(times)
        return {"step_s": step_s, "bound_s": bound_s, "step_over_bound": step_s / bound_s}

    return in_turns(options.rounds, {f"{count} drives": partial(case, count) for count in (1, 2, 3)}, note)


def report_of(options: argparse.Namespace, found: Found) -> dict[str, Any]:
    """What was found, with what it depends on."""
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("json", "directory")}
    return {"machine": describe_machine(), "torch": str(torch.__version__), "settings": settings, "found": found}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(_MEASURED))
    parser.add_argument("--directory", type=made_folder, help="where swap files go; default: a temporary folder")
    parser.add_argument("--rounds", type=at_least(1), help="default: 3, growth 2")
    parser.add_argument("--steps", type=at_least(1), default=6, help="of one run; the first two do not count")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--batch", type=several(at_least(1)), default="4,16", help="plain: batch sizes")
    parser.add_argument("--recompute", action="store_true", help="plain: recompute activations, in both")
    parser.add_argument("--parameters", type=several(numel), default="50M,100M,200M,400M,1B", help="growth: sizes")
    parser.add_argument("--device-budget", default="128MiB", help="growth, drives")
    parser.add_argument("--host-budget", default="192MiB", help="growth, drives")
    parser.add_argument("--read-mb", type=float, default=200, help="drives: MB/s of one drive")
    parser.add_argument("--write-mb", type=float, default=130, help="drives: MB/s of one drive")
    parser.add_argument("--json", type=result_file)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.what == "growth" else 3)
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases in turns; the report, which `--json` holds after every case."""

    def note(found: Found) -> None:
        if options.json is not None:
            with replaced_file(options.json) as file:
                file.write(json.dumps(report_of(options, found), indent=2) + "\n")

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        return report_of(options, _MEASURED[options.what](options, Path(folder), note))


_MEASURED = {"plain": plain, "growth": growth, "drives": drives}


def main() -> None:
    options = parse()
    report = measure(options)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
