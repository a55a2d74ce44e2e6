"""The training loop that the offloaded run and the plain baseline share, so that they differ in nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from infinity.cli.ranks import this_job
from infinity.cli.settings import Training
from infinity.data.batches import Batches
from infinity.data.text import Text, load_text

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def load_training_text(training: Training) -> Text:
    """The text of a run; raises ConfigError when there is not enough of it."""
    return load_text([Path(path) for path in training.data], shortest_nbytes=training.shape.seq + 1)


def batches_of(training: Training, text: Text) -> Batches:
    return Batches(text, batch=training.batch, seq=training.shape.seq, seed=training.seed)


def accumulate_gradients(
    model: nn.Module, batches: Batches, step: int, accumulate: int, device: torch.device
) -> float:
    """Forward and backward of every micro-batch of a step; returns their mean loss. Ranks take turns in the batches."""
    total, job = 0.0, this_job()
    for micro in range(accumulate):
        inputs, targets = batches.at((step * accumulate + micro) * job.size + job.rank)
        loss = model(inputs.to(device), targets.to(device))
        (loss / accumulate).backward()
        total += loss.item()
    return total / accumulate
