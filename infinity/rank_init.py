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
from storage.closing import Closing
from storage.pool import HostPool, Lease


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


class SharedValues(Closing):
    """This rank's shard of the first rank's values, a piece at a time; a context manager.

    Every rank asks for the same pieces in the same order, whether it keeps them in host memory or writes them to its
    drives: those of the rank whose pieces are the shortest. The first rank sends each of the others its own.

    Args:
        sources: this rank's values of the group's parameters.
        numel: elements of the pieces that this rank would take.

    Attributes:
        numel: elements of the pieces that all take; the last one may be shorter.

    Raises:
        RankError: another rank initialises another group, or has failed.
    """

    def __init__(
        self, lockstep: Lockstep, pool: HostPool, group: FlatGroup, sources: Sequence[torch.Tensor], numel: int
    ) -> None:
        brought = lockstep.agree(Want.SETUP, "the groups that are initialised", group.index, brings=[numel])
        self.numel = min(theirs[0] for theirs in brought)
        self._collectives = lockstep.collectives
        self._group = group
        self._sources = sources
        self._lease: Lease | None = None
        if self._collectives.ranks.member == 0:
            nbytes = self.numel * group.shard_dtype.itemsize
            self._lease = pool.lease(nbytes, f"{group.key} for other ranks")

    def fill(self, start: int, into: torch.Tensor) -> int:
        """The elements of this rank's shard from `start` on; how many of them belong to parameters."""
        group, lease = self._group, self._lease
        first = group.param_span.start + start
        mine = FlatSpan(first, first + into.numel())
        if lease is None:
            self._collectives.scatter(into, None)
        else:
            theirs = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=into.numel())

            def make(member: int) -> torch.Tensor:
                begin = self._span_of(member).start + start
                copy_span(group, self._sources, FlatSpan(begin, begin + theirs.numel()), theirs)
                return theirs

            copy_span(group, self._sources, mine, into)
            self._collectives.scatter(into, make)
        return group.layout.payload_in(mine)

    def _span_of(self, member: int) -> FlatSpan:
        """What a member holds of the parameters."""
        if not self._group.is_gathered_from_ranks:
            return self._group.layout.whole
        return self._group.span_of(member % self._collectives.ranks.shards)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


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
