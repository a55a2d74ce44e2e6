"""Flat layout, pure arithmetic: a group of parameters laid out in one flat buffer, and that buffer cut into chunks.

Parameters become *slots* of a flat buffer. Slots start at multiples of `SLOT_ALIGN_NUMEL` elements, because the fused
AdamW kernel gives the same bits for a part of a tensor as for the whole only when the cut is at such a multiple. The
flat length is padded once to `SHARD_ALIGN_NUMEL` elements per rank, so that every shard, and every chunk cut from it,
is a whole number of 4 KiB pages in any dtype and can be read and written with O_DIRECT.

Several ranks share a flat buffer in equal spans, one after another in the order of the ranks. Which shard kinds a rank
holds only its own span of, and which whole, is what the stages differ in (`Sharding`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.align import align_up

SLOT_ALIGN_NUMEL = 64
SHARD_ALIGN_NUMEL = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat buffer (offsets and sizes in elements)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """The element of the flat buffer behind its last one."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """The part of one slot that lies in a chunk, never empty; `start` and `stop` are elements within the chunk."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """Elements `start` to `stop` of a flat buffer: what one rank holds of it."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements `start` to `stop` of a flat buffer: what the optimizer reads, updates and writes at a time."""

    index: int
    start: int
    stop: int
    pieces: tuple[ChunkPiece, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    @property
    def payload_numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def span(self) -> FlatSpan:
        """Where it lies in the flat buffer."""
        return FlatSpan(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How `size` ranks share every flat buffer, seen from one of them; one rank holds everything.

    Stage 1 shards the optimizer's state, stage 2 the gradients too, stage 3 the parameters too.
    """

    rank: int = 0
    size: int = 1
    stage: int = 3

    def span_of(self, rank: int, numel: int) -> FlatSpan:
        """The span of `rank` in a flat buffer of `numel` elements, which is a multiple of `size` pages."""
        share = numel // self.size
        return FlatSpan(rank * share, (rank + 1) * share)

    def state_span(self, numel: int) -> FlatSpan:
        """What this rank updates and holds the optimizer's state of."""
        return self.span_of(self.rank, numel)

    def grad_span(self, numel: int) -> FlatSpan:
        """What this rank holds of the gradient."""
        return self.span_of(self.rank, numel) if self.stage >= 2 else FlatSpan(0, numel)

    def param_span(self, numel: int) -> FlatSpan:
        """What this rank holds of the parameters."""
        return self.span_of(self.rank, numel) if self.stage >= 3 else FlatSpan(0, numel)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Slots of one flat buffer. `numel` includes padding, `payload_numel` counts parameters only."""

    slots: tuple[Slot, ...]
    numel: int

    @classmethod
    def pack(cls, named_shapes: Iterable[tuple[str, Sequence[int]]], world_size: int = 1) -> FlatLayout:
        """Lay parameters out one after another.

        Args:
            named_shapes: name and shape of every parameter, in order.
            world_size: number of ranks that share the buffer; each gets an equal, page-aligned span.
        """
        offset = 0
        slots = []
        for name, shape in named_shapes:
            numel = math.prod(shape)
            slots.append(Slot(name, tuple(shape), offset, numel))
            offset = align_up(offset + numel, SLOT_ALIGN_NUMEL)
        return cls(tuple(slots), align_up(max(offset, 1), SHARD_ALIGN_NUMEL * world_size))

    @property
    def payload_numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def whole(self) -> FlatSpan:
        """The span of the whole buffer."""
        return FlatSpan(0, self.numel)

    def pieces_in(self, span: FlatSpan) -> tuple[ChunkPiece, ...]:
        """The parts of slots that lie in a span; none is empty, and they count from the span's start."""
        return tuple(
            ChunkPiece(number, max(slot.offset, span.start) - span.start, min(slot.stop, span.stop) - span.start)
            for number, slot in enumerate(self.slots)
            if slot.numel and slot.offset < span.stop and slot.stop > span.start
        )

    def payload_in(self, span: FlatSpan) -> int:
        """How many elements of a span belong to parameters."""
        return sum(piece.stop - piece.start for piece in self.pieces_in(span))

    def cut(self, chunk_numel: int, span: FlatSpan | None = None) -> tuple[Chunk, ...]:
        """Cut a span (default: all) into chunks of at most `chunk_numel` elements (multiple of `SHARD_ALIGN_NUMEL`)."""
        if chunk_numel <= 0 or chunk_numel % SHARD_ALIGN_NUMEL:
            raise ValueError(f"chunk_numel is {chunk_numel}; it must be a positive multiple of {SHARD_ALIGN_NUMEL}")
        span = span or self.whole
        chunks = []
        for index, start in enumerate(range(span.start, span.stop, chunk_numel)):
            stop = min(start + chunk_numel, span.stop)
            chunks.append(Chunk(index, start, stop, self.pieces_in(FlatSpan(start, stop))))
        return tuple(chunks)
