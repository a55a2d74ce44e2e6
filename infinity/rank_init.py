"""The same start on all ranks: the values of the first rank's model, as `DistributedDataParallel` does it.

Every rank builds the model, possibly with other random numbers. The first rank's values count: it sends every other
rank that one's shard, and all buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import nn

from infinity.errors import RankError
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.lockstep import Lockstep, Want
from infinity.territory import Territory
from storage.pool import HostPool


def check_same_model(lockstep: Lockstep, model: nn.Module, groups: Sequence[FlatGroup]) -> None:
    """All ranks hold models with the same parameters and buffers.

    Raises:
        RankError: they do not; it names the first difference.
    """
    mine = "\n".join([*_described(groups), *(f"buffer {n}: {_kind(b)}" for n, b in Territory(model).named_buffers())])
    digest = int.from_bytes(blake2b(mine.encode(), digest_size=7).digest())
    if len({brought[0] for brought in lockstep.meet(Want.SETUP, digest)}) == 1:
        return
    texts = lockstep.exchange_text(mine)
    first = texts[0].splitlines()
    for rank, text in zip(lockstep.collectives.ranks.members, texts, strict=True):
        theirs = text.splitlines()
        for number in range(max(len(first), len(theirs))):
            here, there = (lines[number] if number < len(lines) else "nothing" for lines in (first, theirs))
            if here != there:
                raise RankError(
                    f"the ranks hold different models: where rank {lockstep.collectives.ranks.members[0]} has {here}, "
                    f"rank {rank} has {there}. Build the same model, with the same settings, on every rank"
                )


def _described(groups: Sequence[FlatGroup]) -> list[str]:
    return [
        f"parameter {slot.name}: {tuple(slot.shape)}, stored as {group.shard_dtype}, "
        f"{'trains' if group.trainable else 'frozen'}, unit {group.key}"
        for group in groups
        for slot in group.layout.slots
    ]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def copy_span(group: FlatGroup, sources: Sequence[torch.Tensor], span: FlatSpan, target: torch.Tensor) -> None:
    """Fill `target` (1-D, stored dtype) with a span of a group's flat buffer, made of the parameters' values."""
    target.zero_()
    with torch.no_grad():
        for piece in group.layout.pieces_in(span):
            slot = group.layout.slots[piece.slot]
            first = span.start + piece.start - slot.offset
            values = sources[piece.slot].detach().reshape(-1)[first : first + piece.stop - piece.start]
            target[piece.start : piece.stop].copy_(values)


def share_shard(
    lockstep: Lockstep, pool: HostPool, group: FlatGroup, sources: Sequence[torch.Tensor], shard: torch.Tensor
) -> None:
    """Fill `shard` with this rank's shard of the first rank's values.

    Args:
        sources: this rank's values of the group's parameters.
    """
    lockstep.agree(Want.SETUP, "the groups that are initialised", group.index)
    ranks = lockstep.collectives.ranks
    if ranks.member != 0:
        lockstep.collectives.scatter(shard, None)
        return
    copy_span(group, sources, group.param_span, shard)
    with pool.lease(group.shard_nbytes, f"{group.key} for other ranks") as lease:
        theirs = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.param_span.numel)

        def make(member: int) -> torch.Tensor:
            span = group.span_of(member % ranks.shards) if group.is_gathered_from_ranks else group.layout.whole
            copy_span(group, sources, span, theirs)
            return theirs

        lockstep.collectives.scatter(shard, make)


def share_buffers(lockstep: Lockstep, model: nn.Module) -> None:
    """Give the model's buffers the first rank's values."""
    lockstep.meet(Want.SETUP)
    is_first = lockstep.collectives.ranks.member == 0
    for _, buffer in Territory(model).named_buffers():
        if buffer.numel():
            values = buffer.detach().cpu().contiguous()
            lockstep.collectives.scatter(values, (lambda _, v=values: v) if is_first else None)  # type: ignore[misc]
            with torch.no_grad():
                buffer.copy_(values)
