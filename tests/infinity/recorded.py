"""Models under `empty_init`, and how their values differ from those of ordinary construction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import infinity
from tests.parity.loops import gathered_parameters


def empty(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """The model without memory."""
    torch.manual_seed(seed)
    with infinity.empty_init():
        return make()


def different(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of parameters and buffers of an offloaded model that are not those of `plain`, bit for bit."""
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    got = gathered_parameters(model) | dict(model.named_buffers())
    assert got.keys() == wanted.keys()
    return [n for n, v in got.items() if v.dtype != wanted[n].dtype or not torch.equal(v, wanted[n])]
