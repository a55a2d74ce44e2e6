"""The same training in plain PyTorch, in a process of its own, so that its peak memory is its own.

    python -m infinity.cli.plain_run < SPEC > RESULT

SPEC is JSON with the training, RESULT what came of it, so nothing of it is on a disk; whatever else is printed goes to
standard error. Not meant to be called by people; `infinity train --baseline` does. It ends when its parent has.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from infinity.cli.hashing import hash_parameters
from infinity.cli.loop import BETAS, WEIGHT_DECAY, accumulate_gradients, batches_of, load_training_text
from infinity.cli.memory import map_large_blocks, peak_rss_bytes
from infinity.cli.records import PlainRun
from infinity.cli.settings import Training
from infinity.models.gpt import GptShape, build_plain

EXIT_INTERRUPTED = 130


class AbandonedError(Exception):
    """Nobody waits for the result any more."""


def train_plain(training: Training, check: Callable[[], object] = lambda: None) -> PlainRun:
    """Train with `torch.optim.AdamW(fused=True)`; everything lies in memory. `check` is called before each step."""
    batches = batches_of(training, load_training_text(training))
    device = torch.device("cuda" if training.uses_cuda else "cpu")
    model = build_plain(training.shape, recompute=training.recompute, seed=training.seed).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    run = PlainRun([], [], [], 0)
    for step in range(training.steps):
        check()
        started_s = time.perf_counter()
        loss = accumulate_gradients(model, batches, step, training.accumulate, device, slices=training.micro_batches)
        run.losses.append(loss)
        norm = None
        if training.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip).item()
        run.grad_norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        run.step_seconds.append(time.perf_counter() - started_s)
    run.peak_rss_bytes = peak_rss_bytes()
    run.hashes = hash_parameters(model)
    return run


def training_from_json(fields: dict[str, Any]) -> Training:
    """The inverse of `dataclasses.asdict`."""
    return Training(**fields | {"shape": GptShape(**fields["shape"]), "data": tuple(fields["data"])})


def main() -> int:
    given = json.loads(sys.stdin.read())

    def check() -> None:
        if os.getppid() != given["parent"]:  # it was killed, and has left this process to another one
            raise AbandonedError

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as result:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if torch.get_num_threads() != given["threads"]:  # asked for the same, MKL adds up in another order from then on
            torch.set_num_threads(given["threads"])
        try:
            training = training_from_json(given["training"])
            map_large_blocks(training)
            run = train_plain(training, check)
        except (KeyboardInterrupt, AbandonedError):
            return EXIT_INTERRUPTED
        json.dump(asdict(run), result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
