"""The state of the random number generators of torch, Python and numpy, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of every generator that a training loop commonly draws from."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": _to_text(torch.get_rng_state()),
        "cuda": [_to_text(state) for state in torch.cuda.get_rng_state_all()] if uses_cuda else [],
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set the generators. Those of CUDA only if as many devices are there as were saved."""
    torch.set_rng_state(_from_text(state["torch"]))
    if state["cuda"] and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_from_text(text) for text in state["cuda"]])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
