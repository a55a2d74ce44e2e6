"""Weights from files on several ranks; runs in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from tests.parity.loops import gathered_parameters
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Net, build

TIGHT = {"host": {"budget": "400KiB"}, "device": {"kind": "cpu", "budget": "2MiB"}}


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(37)


def load_weights(
    folder: Path, weights: Path, cases: list[dict[str, Any]]
) -> list[tuple[dict[str, Tensor], int, tuple[str, ...]]]:
    """For every case what was loaded, bytes read, and what was missing. Every rank begins with other values."""
    rank, _ = rank_and_size()
    found = []
    for case in cases:
        settings = TIGHT | {"stage": case["stage"]}
        torch.manual_seed(100 + rank)
        if case["is_built"]:
            model: nn.Module = build(Buffered, seed=rank)
        else:
            with infinity.empty_init():
                model = Buffered()
        config = make_config(folder / "swap", settings)
        with infinity.offload(model, config, weights=weights / case["file"], strict=case["strict"]) as engine:
            assert engine.loaded_weights is not None
            state = gathered_parameters(model) | {n: b.clone() for n, b in model.named_buffers()}
            found.append((state, engine.loaded_weights.read_nbytes, engine.loaded_weights.missing_keys))
    return found
