"""Infinity beside DeepSpeed ZeRO-Infinity and plain PyTorch in memory: the same model, batches, precision and disk.

    python -m benchmarks.peer_deepspeed --driver train_deepspeed.py --python .venv-ds/bin/python --directory DIR
        [--size 110m | 396m] [--rounds 3] [--steps 5] [--host-budget 256MiB --device-budget 192MiB]
        [--ladder 480MiB,640MiB,...] [--activations recompute] [--json FILE]

DeepSpeed runs in its own virtual environment, under a driver that takes --mode, --swap, --hidden, ... and prints one
JSON object. Parameters and optimizer state are on NVMe on both sides. Within a round everything runs once, in turn, in
a process of its own: DeepSpeed with and without its pipelined optimizer swap, infinity with moments in fp32, bf16 and
int8 (the latter two rounded at random, the same in every run), and without checksums of what it stores, which DeepSpeed
has not; and plain PyTorch. Figures are medians over rounds, with
the range; a run's figure is the median of its steps but the first. Speed is compared with the faster of DeepSpeed's
settings, peak memory with that one and with the one that takes least. `--ladder` adds runs of infinity with moments in
fp32 and these host budgets. `--activations recompute` lets infinity compute its units again in backward instead of
keeping what they compute: while drives are the bound that takes less memory and no time. `--json` holds what has been
measured by then.
The losses of all steps are kept; how far each side's are from plain PyTorch's is the largest difference of any step.

`--compute native` computes in bf16 on both sides, `fp32` from bf16 weights in fp32; the engine decides by what the CPU
multiplies fast, so `auto` asks it. The peak of resident memory is that of the training steps, without initialisation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import infinity
from benchmarks.peer_model import PeerGpt, PeerShape, batches, first_values
from infinity.bench.arguments import at_least, made_folder, result_file
from infinity.bench.machine import describe_machine
from infinity.cli.memory import peak_rss_bytes
from infinity.devices.cpu import has_fast_bf16
from infinity.replacing import replaced_file

SIZES = {
    "tiny": PeerShape(hidden=256, layers=4, heads=4, vocab=2048, seq=64),
    "110m": PeerShape(hidden=768, layers=12, heads=12),
    "396m": PeerShape(hidden=1280, layers=18, heads=20),
}
# Without "--prefetch 0" DeepSpeed 0.19.8 assigns a swap buffer twice at these sizes, and ends with an AssertionError.
_TUNED = ("--block-size", "8388608", "--queue-depth", "32", "--threads", "4", "--prefetch", "0")
_PLAIN = "torch in memory"
_LOW_MEMORY = {"MALLOC_CONF": "dirty_decay_ms:1000,muzzy_decay_ms:0"}


def process_io() -> tuple[int, int]:
    """Bytes that this process has read from and written to drives."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counted["read_bytes"]), int(counted["write_bytes"])


def train_ours(options: argparse.Namespace, shape: PeerShape, folder: Path) -> dict[str, Any]:
    """One run through an engine, in this process."""
    with infinity.empty_init():
        model = PeerGpt(shape)
    config = infinity.Config(
        precision="bf16",
        state_format=options.state_format,
        schedule="overlapped",
        device={"kind": "cpu", "budget": options.device_budget},
        host={"budget": options.host_budget},
        nvme={"paths": [folder], "checksum": options.checksum},
        activations={"policy": options.activations},
    )
    seconds, losses, moved = [], [], []
    with infinity.offload(model, config, init_fn=first_values(model, shape.layers)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        source = batches(shape)
        for _ in range(options.steps):
            before, started_s = process_io(), time.perf_counter()
            loss = model(*next(source))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started_s)
            moved.append([after - was for after, was in zip(process_io(), before, strict=True)])
        parameters = engine.plan.parameters
    return {
        "params": parameters,
        "step_s": seconds,
        "loss": losses,
        "step_io_read_write": moved,
        "train_peak_rss": peak_rss_bytes(),
    }


def run_child(command: Sequence[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """The JSON object that a command prints last; what it says besides goes to `log`."""
    with log.open("a") as errors:
        done = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}; the end of {log}:\n{log.read_text()[-2000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def cases(options: argparse.Namespace, shape: PeerShape, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every side of the comparison, by name."""
    log = folder / "peers.log"
    sizes = [f"--{name}={value}" for name, value in dataclasses.asdict(shape).items()]
    driver = [
        str(options.python),
        str(options.driver),
        *sizes,
        f"--steps={options.steps}",
        f"--compute={options.compute}",
    ]

    def deepspeed(*arguments: str, **environment: str) -> dict[str, Any]:
        swap = Path(tempfile.mkdtemp(dir=folder, prefix="deepspeed-"))
        try:
            command = [*driver, "--mode", "z3-nvme", "--swap", str(swap), *_TUNED, *arguments]
            return run_child(command, {"MASTER_PORT": str(options.port), **environment}, log)
        finally:
            shutil.rmtree(swap, ignore_errors=True)

    def ours(state_format: str, host_budget: str = options.host_budget, checksum: str = "xxh3") -> dict[str, Any]:
        given = {"size": options.size, "steps": options.steps, "directory": folder, "state-format": state_format}
        given |= {"checksum": checksum}
        given |= {"host-budget": host_budget, "device-budget": options.device_budget}
        given |= {"activations": options.activations}
        command = [sys.executable, "-m", "benchmarks.peer_deepspeed", "--ours"]
        command += [f"--{name}={value}" for name, value in given.items()]
        return run_child(command, {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}, log)

    found = {
        "infinity": partial(ours, "fp32"),
        "infinity without checksums": partial(ours, "fp32", checksum="none"),
        "infinity bf16 moments": partial(ours, "bf16"),
        "infinity int8 moments": partial(ours, "int8"),
        **{f"infinity {budget}": partial(ours, "fp32", budget) for budget in options.ladder},
        "deepspeed": partial(deepspeed),
        "deepspeed pipelined": partial(deepspeed, "--pipeline"),
        _PLAIN: lambda: run_child([*driver, "--mode", "torch"], {}, log),
    }
    if options.jemalloc is not None:
        low = partial(deepspeed, "--reduce-bucket", "2e7", LD_PRELOAD=str(options.jemalloc), **_LOW_MEMORY)
        found["deepspeed, least memory"] = low
    chosen = options.only.split(",") if options.only else list(found)
    if unknown := [name for name in chosen if name not in found]:
        raise SystemExit(f"--only: there is no {unknown[0]!r}; allowed: {', '.join(found)}")
    return {name: found[name] for name in chosen}


def figures_of(report: dict[str, Any], tokens: int) -> dict[str, float]:
    """What one run showed; steady steps are all but the first."""
    step_s = statistics.median(report["step_s"][1:])
    moved = [sum(pair) for pair in report["step_io_read_write"][1:]]
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "peak_rss_bytes": report["train_peak_rss"],
        "disk_bytes_per_parameter": statistics.median(moved) / report["params"],
        "last_loss": report["loss"][-1],
    }


def compare(options: argparse.Namespace, folder: Path, note: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All rounds, and how the sides compare. `note` gets what has been found after every run."""
    shape = SIZES[options.size]
    rounds: dict[str, list[dict[str, float]]] = {}
    losses: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    for number in range(options.rounds):
        for name, case in cases(options, shape, folder).items():
            report = case()
            figures = figures_of(report, shape.batch * shape.seq)
            rounds.setdefault(name, []).append(figures)
            losses[name] = report["loss"]
            print(f"round {number + 1}: {name}: { {k: round(v, 4) for k, v in figures.items()} }", flush=True)
            found = summary(rounds, losses)
            note(found)
    return found


def summary(rounds: dict[str, list[dict[str, float]]], losses: dict[str, list[float]]) -> dict[str, Any]:
    """Median and range of every side's figures, and how the sides compare."""
    sides = {
        name: {
            figure: {
                "median": statistics.median(each[figure] for each in runs),
                "min": min(each[figure] for each in runs),
                "max": max(each[figure] for each in runs),
            }
            for figure in runs[0]
        }
        for name, runs in rounds.items()
    }
    medians = {name: {f: v["median"] for f, v in s.items()} for name, s in sides.items()}
    return {"sides": sides, "losses": losses, "compared": ratios(medians), "loss_differences": differences(losses)}


def ratios(sides: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """By side of ours: over DeepSpeed's fastest setting and its smallest, and over plain PyTorch in memory."""
    peers = [figures for name, figures in sides.items() if name.startswith("deepspeed")]
    fastest = max(peers, key=lambda figures: figures["tokens_per_s"], default=None)
    smallest = min(peers, key=lambda figures: figures["peak_rss_bytes"], default=None)
    others = {"deepspeed": fastest, "smallest_deepspeed": smallest, "in_memory": sides.get(_PLAIN)}
    return {
        name: {
            f"{figure}_over_{other}": figures[figure] / theirs[figure]
            for other, theirs in others.items()
            if theirs is not None
            for figure in ("tokens_per_s", "peak_rss_bytes")
        }
        for name, figures in sides.items()
        if name.startswith("infinity")
    }


def differences(losses: dict[str, list[float]]) -> dict[str, float]:
    """By side, how far its losses are from plain PyTorch's in the step where they are farthest."""
    plain = losses.get(_PLAIN)
    if plain is None:
        return {}
    return {
        name: max(abs(one - other) for one, other in zip(found, plain, strict=True))
        for name, found in losses.items()
        if name != _PLAIN
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", type=Path, help="the program that trains with DeepSpeed")
    parser.add_argument("--python", type=Path, help="the interpreter of DeepSpeed's virtual environment")
    parser.add_argument("--directory", type=made_folder, help="where swap files go; default: a temporary folder")
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--steps", type=at_least(2), default=5)
    parser.add_argument("--compute", choices=["auto", "fp32", "native"], default="auto")
    parser.add_argument("--host-budget", default="256MiB", help="of infinity")
    parser.add_argument("--device-budget", default="192MiB", help="of infinity")
    parser.add_argument("--ladder", type=lambda text: text.split(","), default=[], help="more host budgets of infinity")
    parser.add_argument("--activations", choices=["none", "recompute"], default="none", help="of infinity")
    parser.add_argument("--state-format", default="fp32", help="with --ours")
    parser.add_argument("--checksum", choices=["xxh3", "none"], default="xxh3", help="with --ours")
    parser.add_argument("--only", help="names of sides, with commas between them")
    parser.add_argument(
        "--jemalloc", type=Path, help="libjemalloc.so.2, to measure DeepSpeed with the least memory too"
    )
    parser.add_argument("--port", type=int, default=29555, help="for DeepSpeed's process group")
    parser.add_argument("--ours", action="store_true", help="one run of infinity in this process")
    parser.add_argument("--json", type=result_file)
    options = parser.parse_args(arguments)
    if options.compute == "auto":
        options.compute = "native" if has_fast_bf16() else "fp32"
    if not options.ours and (options.driver is None or options.python is None):
        parser.error("--driver and --python say how DeepSpeed is run")
    return options


def report_of(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with what it depends on."""
    names = ("size", "rounds", "steps", "compute", "host_budget", "device_budget", "activations")
    settings = {name: str(getattr(options, name)) for name in names}
    return {"machine": describe_machine(), "torch": str(torch.__version__), "settings": settings, "found": found}


def main() -> None:
    options = parse()

    def note(found: dict[str, Any]) -> None:
        if options.json is not None:
            with replaced_file(options.json) as file:
                file.write(json.dumps(report_of(options, found), indent=2) + "\n")

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        if options.ours:
            print(json.dumps(train_ours(options, SIZES[options.size], Path(folder))))
            return
        found = compare(options, Path(folder), note)
    print(json.dumps(report_of(options, found), indent=2))


if __name__ == "__main__":
    main()
