"""The same training in plain PyTorch, in a process of its own, so that its peak memory is its own.

    python -m infinity.cli.plain_run SPEC RESULT

SPEC is a JSON file with the training; RESULT is written as JSON. Not meant to be called by people; `infinity train
--baseline` does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from infinity.cli.hashing import hash_parameters
from infinity.cli.loop import BETAS, WEIGHT_DECAY, accumulate_gradients, batches_of, load_training_text
from infinity.cli.memory import map_large_blocks, peak_rss_bytes
from infinity.cli.records import PlainRun
from infinity.cli.settings import Training
from infinity.models.gpt import GptShape, build_plain

EXIT_INTERRUPTED = 130


def train_plain(training: Training) -> PlainRun:
    """Train with `torch.optim.AdamW(fused=True)`; everything lies in memory."""
    batches = batches_of(training, load_training_text(training))
    device = torch.device("cuda" if training.uses_cuda else "cpu")
    model = build_plain(training.shape, recompute=training.recompute, seed=training.seed).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    run = PlainRun([], [], [], 0)
    for step in range(training.steps):
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
    spec, result = Path(sys.argv[1]), Path(sys.argv[2])
    given = json.loads(spec.read_text())
    map_large_blocks()
    torch.set_num_threads(given["threads"])
    try:
        run = train_plain(training_from_json(given["training"]))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    result.write_text(json.dumps(asdict(run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
