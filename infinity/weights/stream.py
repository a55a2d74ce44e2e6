"""Streaming weights from files into shards: piece by piece, each byte read once and written once.

Memory is two pieces that are written behind each other, and one for the bytes of a file of another dtype; never a whole
tensor. A rank reads only what lies in its own shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.placing import piece_nbytes, write_in_pieces
from infinity.runtime import Runtime
from infinity.territory import Territory
from infinity.weights.match import Match, places_of
from storage.pool import HostPool, Lease

_WIDEST = 8  # bytes of an element in a file
_U8 = torch.uint8


def is_streamed(match: Match | None, group: FlatGroup) -> bool:
    """Whether files hold every parameter of a group."""
    return match is not None and all(slot.name in match.parts for slot in group.layout.slots)


def stream_nbytes(groups: Sequence[FlatGroup], piece_nbytes: int) -> int:
    """Host bytes that streaming these groups holds at most beside the shards placed in host memory.

    Args:
        piece_nbytes: of the pieces in which shards are written; see placing.py.
    """
    sizes = ((_piece_numel(g, piece_nbytes), 2 * g.shard_dtype.itemsize + _WIDEST) for g in groups)
    return max((numel * nbytes for numel, nbytes in sizes), default=0)


def scratch_nbytes(groups: Sequence[FlatGroup], piece_nbytes: int) -> int:
    """Host bytes that `read_into` holds at most; as `stream_nbytes`."""
    return max((_piece_numel(g, piece_nbytes) * _WIDEST for g in groups), default=0)


def _piece_numel(group: FlatGroup, piece_nbytes: int) -> int:
    """Elements of a piece; of the narrowest ones that are stored it has `piece_nbytes`."""
    return min(piece_nbytes // 2, group.param_span.numel)


def stream_into_memory(runtime: Runtime, match: Match, group: FlatGroup, shard: torch.Tensor) -> None:
    """Fill a shard that is in host memory for good (1-D, stored dtype)."""
    numel = _piece_numel(group, piece_nbytes(runtime))
    with _lease(runtime.pool, group, numel * _WIDEST) as lease:
        scratch = torch.frombuffer(lease.memory, dtype=_U8)
        for start in range(0, group.param_span.numel, numel):
            _fill(match, group, start, shard[start : start + numel], scratch)


def stream_into_store(runtime: Runtime, match: Match, group: FlatGroup) -> None:
    """Write a shard to the swap files; a piece is written while the next one is read."""
    numel = _piece_numel(group, piece_nbytes(runtime))
    with _lease(runtime.pool, group, numel * _WIDEST) as lease:
        scratch = torch.frombuffer(lease.memory, dtype=_U8)
        write_in_pieces(runtime, group, numel, lambda start, into: _fill(match, group, start, into, scratch))


def read_into(runtime: Runtime, match: Match, group: FlatGroup, parameters: Sequence[torch.Tensor]) -> None:
    """Fill those of a group's parameters that files hold, in the memory that the model gave them."""
    found = [(slot, p) for slot, p in zip(group.layout.slots, parameters, strict=True) if slot.name in match.parts]
    if not found:
        return
    numel = _piece_numel(group, piece_nbytes(runtime))
    with _lease(runtime.pool, group, numel * _WIDEST) as lease, torch.no_grad():
        scratch = torch.frombuffer(lease.memory, dtype=_U8)
        for slot, parameter in found:
            whole = parameter.detach()
            flat = whole.view(-1) if whole.is_contiguous() else torch.empty(slot.numel, dtype=whole.dtype)
            for start in range(0, slot.numel, numel):
                match.read(slot.name, start, flat[start : start + numel], scratch, whole.dtype)
            if not whole.is_contiguous():
                whole.copy_(flat.view(slot.shape))


def read_buffers(model: nn.Module, match: Match) -> None:
    """Fill the persistent buffers that files hold; those on `meta` get memory."""
    done: dict[int, torch.Tensor] = {}
    for name, place in places_of(model).items():
        *path, attribute = name.split(".")
        module = model.get_submodule(".".join(path))
        buffer = module._buffers.get(attribute)
        if buffer is None or name not in match.parts:
            continue
        values = torch.empty(place.shape, dtype=buffer.dtype)
        scratch = torch.empty(values.numel() * _WIDEST, dtype=_U8)
        match.read(name, 0, values.view(-1), scratch, buffer.dtype)
        if not buffer.is_meta:
            with torch.no_grad():
                buffer.copy_(values)
            continue
        done[id(buffer)] = values
    for module in Territory(model).modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in done:
                module._buffers[attribute] = done[id(buffer)]


def _lease(pool: HostPool, group: FlatGroup, nbytes: int) -> Lease:
    return pool.lease(nbytes, f"weights of {group.key}")


def _fill(match: Match, group: FlatGroup, start: int, into: torch.Tensor, scratch: torch.Tensor) -> int:
    """Elements of this rank's shard from `start` on; what lies between parameters is zero. How many are not."""
    into.zero_()
    first = group.param_span.start + start
    span = FlatSpan(first, first + into.numel())
    for piece in group.layout.pieces_in(span):
        slot = group.layout.slots[piece.slot]
        match.read(
            slot.name, first + piece.start - slot.offset, into[piece.start : piece.stop], scratch, group.source_dtype
        )
    return group.layout.payload_in(span)
