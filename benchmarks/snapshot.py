"""How long a checkpoint holds training up: `engine.save(wait=False)` beside a save that is waited for.

    python benchmarks/snapshot.py [--parameters 400M] [--steps 3] [--directory DIR] [--save-to DIR] [--json FILE]

A GPT of the given size trains with everything in swap files but what the host budget keeps. After some steps a
checkpoint is asked for and training goes on. Told are: how long `save` took, and what of that was waiting for the
writes of the step before it (which a step would wait for later, or not at all); how long steps took before and after
it, until the checkpoint was complete and steps were usual again; when it was complete; how the bytes were copied. Then
the same with `wait=True`. Both checkpoints are verified.

`lost_s` is what the checkpoint cost training altogether: the call, and what the steps after it took beyond the usual
one (the median of those before).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.bench.arguments import at_least, made_folder, numel, result_file
from infinity.bench.machine import describe_machine
from infinity.checkpoint.reader import CheckpointReader
from infinity.models.gpt import Gpt, GptShape, init_weights
from storage.filesystems import find_file_system

_USUAL = 1.05  # of the longest step before: such a step is usual again
_USUAL_STEPS = 3
_MOST_STEPS = 30


def shape_for(parameters: float, hidden: int, seq: int) -> GptShape:
    """A GPT of about that many parameters."""
    return GptShape(max(round(parameters / (12 * hidden * hidden)), 1), hidden, hidden // 64, seq)


class Training:
    """A run that tells the seconds of its steps."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.shape = shape_for(options.parameters, options.hidden, options.seq)
        with infinity.empty_init():
            model = Gpt(self.shape, recompute=True)
        config = infinity.Config(
            precision="bf16",
            device={"kind": "cpu", "budget": options.device_budget},
            host={"budget": options.host_budget},
            nvme={"paths": [folder], "calibrate": "off"},
            schedule=options.schedule,
        )
        self.model = model
        self.engine = infinity.offload(model, config, init_fn=init_weights)
        self.optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        self.ids = torch.randint(0, 256, (1, options.seq), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        started_s = time.perf_counter()
        self.model(self.ids, self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started_s

    def save(self, path: Path, *, wait: bool) -> dict[str, float]:
        """Ask for a checkpoint; how long the call took, and what of it was work and waiting for writes of before."""
        seconds = self.engine._runtime.stalls.seconds
        before = dict(seconds)
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self.engine.save(path, wait=wait)
        call_s, call_cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        landing_s = sum(seconds[cause] - before[cause] for cause in seconds if cause.value != "save")
        return {"call_s": call_s, "call_cpu_s": call_cpu_s, "landing_s": landing_s, "stall_s": call_s - landing_s}


def behind(run: Training, path: Path, steps: int) -> dict[str, Any]:
    """Steps, a save behind training, and steps until it is complete and some in a row have been usual again."""
    quiet = [run.step() for _ in range(steps)]
    usual_s, longest_s = statistics.median(quiet), max(quiet)
    asked_s = time.perf_counter()
    found: dict[str, Any] = run.save(path, wait=False)
    (save,) = run.engine._runtime.saver._saves or [None]
    after: list[float] = []
    complete_after_s, writing = 0.0, 0
    while len(after) < _MOST_STEPS:
        is_over = save is None or save.ticket.done
        if is_over and not complete_after_s:
            complete_after_s, writing = time.perf_counter() - asked_s, len(after)
        usual = [step_s <= _USUAL * longest_s for step_s in after[-_USUAL_STEPS:]]
        if is_over and len(usual) == _USUAL_STEPS and all(usual):
            break
        after.append(run.step())
    run.engine.wait_saved()
    if save is not None:
        found["copied_bytes"] = {str(method): nbytes for method, nbytes in save.copier.nbytes.items()}
        found["preserved_bytes"] = save.preserved_nbytes
        found["read_back_bytes"] = save.read_back_nbytes
    return found | {
        "complete_after_s": complete_after_s or time.perf_counter() - asked_s,
        "steps_before_s": quiet,
        "steps_after_s": after,
        "steps_while_writing": writing or len(after),
        "step_before_s": usual_s,
        "lost_s": found["call_s"] + sum(step_s - usual_s for step_s in after),
    }


def verified(path: Path) -> dict[str, Any]:
    with CheckpointReader(path) as checkpoint:
        tensors_nbytes = checkpoint.verify()
    return {
        "verified_bytes": tensors_nbytes,
        "folder_bytes": sum(file.stat().st_size for file in path.iterdir()),
        "step": checkpoint.index.step,
    }


def measure(options: argparse.Namespace, folder: Path, target: Path) -> dict[str, Any]:
    run = Training(options, folder)
    with run.engine:
        first = [run.step(), run.step()]  # the first reads no moments, the second learns the order
        found: dict[str, Any] = {
            "parameters": run.shape.parameters,
            "swap_bytes": run.engine.plan.placement.nvme_nbytes,
            "first_steps_s": first,
            "behind": behind(run, target / "behind", options.steps) | verified(target / "behind"),
        }
        shutil.rmtree(target / "behind")
        found["waited_for"] = run.save(target / "now", wait=True) | verified(target / "now")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=numel, default="400M")
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--steps", type=at_least(1), default=3, help="before the checkpoint")
    parser.add_argument("--schedule", default="overlapped")
    parser.add_argument("--device-budget", default="512MiB")
    parser.add_argument("--host-budget", default="1GiB")
    parser.add_argument("--directory", type=made_folder, help="where swap files go; default: a temporary folder")
    parser.add_argument("--save-to", type=made_folder, help="where checkpoints go; default: beside the swap files")
    parser.add_argument("--json", type=result_file)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        tempfile.TemporaryDirectory(dir=options.save_to or options.directory) as target,
    ):
        found = {"file_system": find_file_system(Path(target)).name} | measure(options, Path(folder), Path(target))
    hidden = ("json", "directory", "save_to")
    settings = {name: str(value) for name, value in vars(options).items() if name not in hidden}
    report = {"machine": describe_machine(), "torch": str(torch.__version__), "settings": settings, "found": found}
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
