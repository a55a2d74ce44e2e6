"""A file of `torch.save` with tensors, memory-mapped, so that only what is read is in memory."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import damaged
from infinity.errors import CheckpointError

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_NOT_LAID_OUT = (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


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
    with reading(path):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads the structure of a file of `torch.save`; its errors say what is wrong with the file.

    Raises:
        CheckpointError: as `TorchFile`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise damaged(path, "the file is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, numbers, text and containers of them, and is not loaded: that would run "
            f"code from the file ({_first_line(error)}). Save the state_dict() alone"
        ) from error
    except Exception as error:  # of damaged bytes the unpickler makes whatever there is
        if "mmap can only be used" in str(error):
            raise CheckpointError(
                f"{path} is in torch's format from before version 1.6, which can only be loaded whole; write it anew "
                "with torch.save(torch.load(path, weights_only=True), path)"
            ) from error
        raise damaged(path, _first_line(error)) from error


@contextmanager
def understanding(path: Path, what: str) -> Iterator[None]:
    """A block that takes apart what a file holds, of which nothing is known before.

    Raises:
        CheckpointError: something is missing in it, or is of another kind than it should be.
    """
    try:
        yield
    except _NOT_LAID_OUT as error:
        how = f"{type(error).__name__}: {_first_line(error)}"
        raise damaged(path, f"it is not laid out as {what} is ({how})") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def flat_part(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Elements of a tensor counted in row order, 1-D; of one that is not contiguous only the rows around are copied."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)[start : start + numel]
    inner = tensor[0].numel()
    first, last = start // inner, -(-(start + numel) // inner)
    if last - first == 1:
        return flat_part(tensor[first], start - first * inner, numel)
    rows = tensor[first:last].reshape(-1)
    return rows[start - first * inner : start - first * inner + numel]


def state_dict_of(path: Path, content: Any) -> dict[str, torch.Tensor]:
    """The tensors by name in what `torch.save` wrote.

    Raises:
        CheckpointError: there are none, or one has no elements that lie in the file one after another.
    """
    if isinstance(content, Mapping):
        for candidate in (content, *(content.get(key) for key in _WRAPPERS)):
            if isinstance(candidate, Mapping) and any(isinstance(v, torch.Tensor) for v in candidate.values()):
                found = {str(name): t.detach() for name, t in candidate.items() if isinstance(t, torch.Tensor)}
                for name, tensor in found.items():
                    _refuse_odd(path, name, tensor)
                return found
    held = ", ".join(map(repr, list(content)[:5])) if isinstance(content, Mapping) else f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} holds no state dict but {held}; tensors by name are needed, alone or under {' or '.join(_WRAPPERS)}"
    )


def _refuse_odd(path: Path, name: str, tensor: torch.Tensor) -> None:
    kind = None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"a {type(tensor).__name__}"
    elif tensor.is_meta:
        kind = "on the meta device, without values"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"{'quantised' if tensor.is_quantized else tensor.layout}"
    if kind is not None:
        raise CheckpointError(f"{path}: {name!r} is {kind}; save plain tensors with their values")


def precision_of(tensors: Iterable[torch.Tensor]) -> str:
    """In which a run computed, told by its parameters: "bf16" or "fp16" if most of their elements are, else "fp32"."""
    numel: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        numel[tensor.dtype] += tensor.numel()
    most = max(numel, key=lambda dtype: numel[dtype], default=torch.float32)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(most, "fp32")
