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
    model: nn.Module, batches: Batches, step: int, accumulate: int, device: torch.device, *, slices: int = 1
) -> float:
    """Forward and backward of every batch of a step; returns their mean loss. Ranks take turns in the batches.

    Args:
        slices: in so many parts a batch goes through the model, one after the other, and their gradients are added up:
            what an engine with `micro_batches` does by itself.
    """
    total, job = 0.0, this_job()
    for micro in range(accumulate):
        inputs, targets = batches.at((step * accumulate + micro) * job.size + job.rank)
        parts = zip(inputs.tensor_split(slices), targets.tensor_split(slices), strict=True)
        for part_inputs, part_targets in parts:
            if len(part_inputs):
                share = len(part_inputs) / len(inputs)
                loss = model(part_inputs.to(device), part_targets.to(device))
                (loss * share / accumulate).backward()
                total += loss.item() * share
    return total / accumulate
