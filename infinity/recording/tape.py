"""The record of a construction without memory: every operation that gave a storage values or drew random numbers.

[Note: regions]
Arguments are kept as regions of storages: dtype, shape, strides and offset. So operations that only make views need no
record, and whoever repeats an operation needs memory for the storages alone. A storage is known by its `Block`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash


@dataclass(eq=False, slots=True)
class Block:
    """One storage that had no memory.

    Attributes:
        nbytes: its size; the largest, where it grew.
        is_foreign: made outside the recording, so that what it held is unknown.
        is_outdated: changed in another recording than the one in which it was made.
        versions: counters of changes of the parameters that were of it when the recording ended.
        real: the storage, if it had memory: random numbers drawn there are replaced by those in the order recorded.
    """

    nbytes: int
    is_foreign: bool = False
    is_outdated: bool = False
    real: weakref.ref[torch.UntypedStorage] | None = None
    versions: set[int] = field(default_factory=set)


class Region(NamedTuple):
    """A tensor of a recorded storage. Strides and offset in elements."""

    block: Block
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def start(self) -> int:
        """The first byte of the storage that belongs to it."""
        return self.offset * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind the last one."""
        if not self.numel:
            return self.start
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether all bytes between its first and its last belong to it."""
        return self.stop - self.start == self.numel * self.dtype.itemsize

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in memory: 1-D bytes that stand for the storage."""
        if not self.numel:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        flat = memory[: memory.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


def region_of(tensor: torch.Tensor, block: Block) -> Region:
    """Where a tensor lies in its storage."""
    return Region(block, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


class Constant(NamedTuple):
    """A tensor with values that was an argument.

    Attributes:
        digest: of its values when it was recorded; None for a copy. A counter of changes would not tell those made
            through `.data` or through a numpy array of the same memory.
    """

    value: torch.Tensor
    digest: int | None = None

    @property
    def is_changed(self) -> bool:
        """Whether it has other values than when it was recorded."""
        return self.digest is not None and digest_of(self.value) != self.digest


def digest_of(values: torch.Tensor) -> int:
    """xxh3 of the elements of a strided tensor, in their order."""
    plain = values.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return xxhash.xxh3_64_intdigest(plain.view(-1).view(torch.uint8).numpy().data)


@dataclass(eq=False, slots=True)
class Operation:
    """One call.

    Attributes:
        args, kwargs: with `Region` and `Constant` for tensors, and the CPU for the meta device.
        reads: whose values it needs.
        writes: what it changes or makes.
        overwrites: nothing that `writes` held is left, and it is not read.
        made: the last of `writes`, which are returned instead of written: the tensors among what it returns that are
            not arguments, in order.
        track: whose random numbers it draws.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    overwrites: bool = False
    made: tuple[Region, ...] = ()
    track: Track | None = None


@dataclass(eq=False, slots=True)
class Track:
    """One random number generator in a recording.

    Attributes:
        generator: the default one, or one that was passed.
        start: its state when the recording began, or when it was first used.
        left: its state when the recording ended.
    """

    generator: torch.Generator
    start: torch.Tensor
    left: torch.Tensor


@dataclass(eq=False, slots=True)
class Reseeded:
    """A generator's state was set.

    Attributes:
        after: the drawing after which it had been in the state that it was given back; None: the start.
        state: another state; None where it was one that it had been in.
    """

    track: Track
    after: Operation | None = None
    state: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class Tape:
    """Operations and changes of generators, in order.

    Attributes:
        real: blocks that had memory and random numbers in it.
    """

    entries: list[Operation | Reseeded] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)
    real: list[Block] = field(default_factory=list)


class Origin(NamedTuple):
    """Where a storage without memory gets its values."""

    tape: Tape
    block: Block
