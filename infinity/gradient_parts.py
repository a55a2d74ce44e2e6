"""Gradients that come to host memory part by part, into what the updates before them give back.

[Note: gradients in parts]
Under `overlapped` an update begins as soon as its gradient is complete, and host memory mostly has room for little more
than one. A whole gradient would wait there until the update before it has used the last of its own: link and optimizer
would work by turns, and backward wait for both. So it lies in as many parts as its update has chunks; a part goes back
as soon as its kernel is over, and the next gradient comes down into what is free.

Only what the training thread takes down waits for memory, so the parts that are free always belong to one gradient,
whose turn it is; and updates that are under way need none of them. So one that holds a part of its memory cannot keep
the rest from coming. What is not used up at once lies there whole, for it may be added to, looked at, or spilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from infinity.devices.base import Fence
from infinity.gradients import GRAD_DTYPE, GroupGradient, gradient_key
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk, ChunkPiece
from storage.budget import Reservation
from storage.pool import HostPool

CopyPart = Callable[[Chunk, torch.Tensor], Iterable[Fence]]  # starts the copies of a chunk of a gradient into memory


def parts_of(group: FlatGroup, chunk_numel: int) -> Iterator[tuple[Chunk, int]]:
    """The parts in which a gradient comes, with their bytes: the chunks of its update."""
    for chunk in group.layout.cut(chunk_numel, group.state_span):
        yield chunk, chunk.numel * GRAD_DTYPE.itemsize


def take_parts(
    gradient: GroupGradient, chunk_numel: int, pool: HostPool, reserve: Callable[[int], Reservation], copy: CopyPart
) -> None:
    """Bring a gradient to host memory.

    Args:
        reserve: waits for memory; what it gives has been granted.
    """
    key = gradient_key(gradient.group)
    for chunk, nbytes in parts_of(gradient.group, chunk_numel):
        gradient.parts[chunk.start] = HostBlock.take(pool, reserve(nbytes), key)
        for fence in copy(chunk, gradient.values(chunk)):
            gradient.fences.append(fence)  # one by one: what fails then is not to leave any behind


def on_both_sides(
    group: FlatGroup, chunk: Chunk, piece: ChunkPiece, grad: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A piece of a chunk of a gradient on the device and in host memory, and the bytes of the flat gradient before it.

    Args:
        grad: the gradient of the piece's slot on the device, 1-D.
        values: the chunk in host memory.
    """
    first = first_in_slot(group, chunk, piece)
    before = group.layout.slots[piece.slot].offset + first
    numel = piece.stop - piece.start
    return grad[first : first + numel], values[piece.start : piece.stop], before * group.compute_dtype.itemsize


def first_in_slot(group: FlatGroup, chunk: Chunk, piece: ChunkPiece) -> int:
    """Which element of its slot a piece begins with."""
    return chunk.start + piece.start - group.layout.slots[piece.slot].offset
