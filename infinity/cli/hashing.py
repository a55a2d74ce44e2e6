"""Hashes of parameters by name: how two processes find out whether they ended with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import xxhash
from torch import nn

_PIECE_NBYTES = 4 << 20
Gathered = Callable[[nn.Module], AbstractContextManager[None]]


def hash_parameters(model: nn.Module, gathered: Gathered | None = None) -> dict[str, str]:
    """xxh3-128 of every parameter's bytes.

    Args:
        gathered: makes the parameters of a part present, for an offloaded model; one part at a time.
    """
    hashes: dict[str, str] = {}
    for prefix, part in _parts(model):
        with nullcontext() if gathered is None else gathered(part):
            for name, parameter in part.named_parameters(prefix=prefix):
                hashes[name] = hash_tensor(parameter)
    return hashes


def hash_tensor(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes, in pieces. A piece is copied: numpy must not hold on to an offloaded parameter."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    state = xxhash.xxh3_128()
    for piece in torch.split(flat, _PIECE_NBYTES):
        state.update(piece.to("cpu", copy=True).numpy().data)
    return str(state.hexdigest())


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that together hold every parameter once: the items of module lists, and whole children elsewhere."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield from _parts(child, path)
        else:
            yield path, child
