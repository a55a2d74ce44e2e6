"""A file of `torch.save` with tensors, memory-mapped, so that only what is read is in memory."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import damaged
from infinity.errors import CheckpointError

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class TorchFile:
    """The tensors of a state dict in a file, which may lie under one of the usual keys beside other things.

    Raises:
        CheckpointError: the file is missing, damaged, of the format before torch 1.6, holds objects that only running
            code could restore, or holds no state dict.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tensors: dict[str, torch.Tensor] = state_dict_of(path, load_torch_file(path))

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D, CPU, contiguous, of the tensor's dtype) from element `start` on."""
        with torch.no_grad():
            into.copy_(flat_part(self.tensors[name], start, into.numel()))

    def close(self) -> None:
        """The mapping goes with the last tensor."""
        self.tensors = {}


def load_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, its tensors memory-mapped on the CPU.

    Raises:
        CheckpointError: as `TorchFile`.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise damaged(path, "the file is missing") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, numbers, text and containers of them, and is not loaded: that would run "
            f"code from the file ({str(error).splitlines()[0]}). Save the state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        if "mmap can only be used" in str(error):
            raise CheckpointError(
                f"{path} is in torch's format from before version 1.6, which can only be loaded whole; write it anew "
                "with torch.save(torch.load(path, weights_only=True), path)"
            ) from error
        raise damaged(path, str(error).splitlines()[0]) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def flat_part(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Elements of a tensor counted in row order, 1-D; of one that is not contiguous only the rows around are copied."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[start : start + numel]
    inner = tensor[0].numel()
    first = start // inner
    rows = tensor[first : -(-(start + numel) // inner)].reshape(-1)
    return rows[start - first * inner : start - first * inner + numel]


def state_dict_of(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The tensors by name in what `torch.save` wrote.

    Raises:
        CheckpointError: there are none.
    """
    if isinstance(content, Mapping):
        for candidate in (content, *(content.get(key) for key in _WRAPPERS)):
            if isinstance(candidate, Mapping) and any(isinstance(v, torch.Tensor) for v in candidate.values()):
                return {str(name): t.detach() for name, t in candidate.items() if isinstance(t, torch.Tensor)}
    held = ", ".join(map(repr, list(content)[:5])) if isinstance(content, Mapping) else f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} holds no state dict but {held}; tensors by name are needed, alone or under {' or '.join(_WRAPPERS)}"
    )
