"""Batches: which samples a step trains on depends on the seed and the step number alone, so a run can be resumed."""

from __future__ import annotations

import numpy as np
import torch

from infinity.data.text import Text


class Batches:
    """Draws samples of `seq` bytes at random places of a text.

    Args:
        text: at least `seq + 1` bytes.
        batch, seq: shape of a batch.
        seed: the same seed gives the same batches in every process.
    """

    def __init__(self, text: Text, *, batch: int, seq: int, seed: int) -> None:
        self._tokens = text.tokens
        self._batch = batch
        self._seq = seq
        self._seed = seed

    def at(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch `number` (from 0, counting micro-batches): inputs and targets, int64 [batch, seq]."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, number]))
        starts = generator.integers(0, len(self._tokens) - self._seq, size=self._batch)
        samples = self._tokens[starts[:, None] + np.arange(self._seq + 1)].astype(np.int64)
        tokens = torch.from_numpy(samples)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
