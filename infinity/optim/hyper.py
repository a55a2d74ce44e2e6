"""What one optimizer update is made of: hyperparameters, pieces of a chunk, parts of the state record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from storage.align import PAGE_NBYTES, align_up

CUT_NUMEL = 64
"""Slots start, and chunks are cut, at multiples of this many elements.

[Note: cuts at 64] Vectorised kernels treat the last few elements of a span with scalar code that may round differently.
With every cut on a multiple of all vector widths, the tail of a parameter is the same elements however it is cut.
"""


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one parameter group, named as in torch's optimizer."""

    lr: float


@dataclass(frozen=True, slots=True)
class SgdHyper(Hyper):
    """Of `torch.optim.SGD`."""

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class LionHyper(Hyper):
    """Of Lion."""

    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class AdamWHyper(Hyper):
    """Of `torch.optim.AdamW` and `torch.optim.Adam`."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class StateField:
    """One part of the optimizer's state record: an element of `dtype` for every `block_numel` of the parameter.

    `block_numel` divides `CUT_NUMEL`, so no element belongs to two parameters.
    """

    name: str
    dtype: torch.dtype
    block_numel: int = 1

    def numel(self, param_numel: int) -> int:
        """How many elements the field has for a span of the parameters that starts on the grid of its blocks."""
        return -(-param_numel // self.block_numel)

    def stored_nbytes(self, param_numel: int) -> int:
        """Bytes of the field in a record: whole pages, so that it can be read and written by itself."""
        return align_up(self.numel(param_numel) * self.dtype.itemsize, PAGE_NBYTES)


def stored_nbytes(fields: Sequence[StateField], param_numel: int) -> int:
    """Bytes of a record of state for a chunk of this many elements."""
    return sum(field.stored_nbytes(param_numel) for field in fields)


def payload_nbytes(fields: Sequence[StateField], param_numel: int) -> int:
    """The same without padding, for the parameters of one span."""
    return sum(field.numel(param_numel) * field.dtype.itemsize for field in fields)


def most_nbytes_per_element(fields: Sequence[StateField]) -> int:
    """Bytes of state per element in the smallest record: what no record exceeds, for sizes that must suffice."""
    return -(-stored_nbytes(fields, PAGE_NBYTES) // PAGE_NBYTES)  # a chunk has multiples of that many elements


@dataclass(frozen=True, slots=True)
class Piece:
    """The span [start, stop) of a chunk, in elements, that belongs to one parameter.

    `start` is a multiple of `CUT_NUMEL`, and so is `stop` unless the parameter ends there. `step` is the 1-based number
    of this update of the parameter. A kernel that rounds at random draws from `first`, the number of the span's first
    element in its parameter, and `seed`, which tells parameters apart: see [Note: stochastic rounding] in moments.py.
    """

    start: int
    stop: int
    step: int
    hyper: Hyper
    first: int = 0
    seed: int = 0


class Kernel(Protocol):
    """The arithmetic of one precision. Releases the GIL, keeps no state of its own, bits independent of the cuts."""

    @property
    def param_dtype(self) -> torch.dtype:
        """The dtype of the stored parameter shard: fp32, bf16 (the high half of the split master) or fp16."""

    @property
    def fields(self) -> tuple[StateField, ...]:
        """The parts of the state record, in order: what completes the master, then the moments."""

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the optimizer's own fields; `decode` gives them in fp32."""

    @property
    def completes_master(self) -> bool:
        """Whether the record begins with a part of the fp32 master: the parameter shard alone is not all of it."""

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """A moment in fp32; `state` has the fields of a record, or of a span of it, by name."""

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """Make fp32 `values` the moment, rounded to nearest where it is stored in less; exact for what was decoded."""

    def warm_up(self) -> None:
        """Compile or load what the first update would otherwise wait for."""

    def begin(self, param: Tensor, state: Sequence[Tensor]) -> None:
        """Fill the state of parameters that were never updated; `param` is of `param_dtype`."""

    def edited(self, param: Tensor, state: Sequence[Tensor], changed: Tensor) -> None:
        """Parameters were changed from outside where `changed` (bool) says: their master is the new value."""

    def update(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], grad_scale: Tensor | None
    ) -> None:
        """One optimizer update of the pieces of a chunk, in place.

        All tensors are 1-D, contiguous, on the CPU and equally long: `param` of `param_dtype`, `grad` fp32, `state` as
        in `fields`. Elements outside the pieces are left alone. `grad_scale` (0-dim fp32) multiplies the gradient, with
        the bits of `grad.mul_(grad_scale)`; `grad` may hold the product afterwards. Raises ValueError for operands that
        do not fit together.
        """


def check_update(
    param: Tensor,
    grad: Tensor,
    state: Sequence[Tensor],
    pieces: Sequence[Piece],
    *,
    param_dtype: torch.dtype,
    fields: Sequence[StateField],
) -> None:
    """Refuse operands a kernel would silently misread; kernels write through raw pointers. Raises ValueError."""
    if len(state) != len(fields):
        raise ValueError(f"state has {len(state)} parts, the kernel needs {[field.name for field in fields]}")
    wanted = [("param", param, param_dtype), ("grad", grad, torch.float32)]
    wanted += [(field.name, part, field.dtype) for field, part in zip(fields, state, strict=True)]
    numels = [param.numel()] * 2 + [field.numel(param.numel()) for field in fields]
    for (name, tensor, dtype), numel in zip(wanted, numels, strict=True):
        if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name}: a contiguous 1-D {dtype} tensor on the CPU is needed, got {found}")
        if tensor.numel() != numel:
            needed = "" if numel == param.numel() else f", which needs {numel}"
            raise ValueError(f"{name} has {tensor.numel()} elements, param has {param.numel()}{needed}")
    end = 0
    for piece in pieces:
        if piece.start < end or piece.start > piece.stop or piece.stop > param.numel():
            raise ValueError(f"{piece} overlaps the one before it or leaves the chunk of {param.numel()} elements")
        if piece.start % CUT_NUMEL:
            raise ValueError(f"{piece} starts off the grid of {CUT_NUMEL} elements")
        if piece.step < 1:
            raise ValueError(f"{piece}: updates are counted from 1")
        end = piece.stop
