"""One optimizer update of one group, and the chunks in which it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.gradients import GroupGradient
from infinity.optim.hyper import Hyper, Piece
from infinity.optim.records import GroupState, Record
from infinity.residency import HostCopy
from infinity.shard_io import ShardIo
from storage.checksums import Digests
from storage.pool import Lease
from storage.types import Ticket, TrafficTag


@dataclass(frozen=True, slots=True)
class ScaledPieces:
    """Pieces of one chunk whose gradients are multiplied by the same clip coefficient (None: by none)."""

    grad_scale: torch.Tensor | None
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """What a chunk's update has changed of a stored key: bytes from `offset` on. `digests` are theirs, if known."""

    key: str
    kind: str
    memory: memoryview
    offset: int
    payload_nbytes: int
    digests: Digests | None = None

    def submit(self, store: ShardIo, step: int) -> Ticket:
        """Have it written."""
        return store.submit_write(
            self.key,
            self.memory,
            offset=self.offset,
            tag=TrafficTag(self.kind, step),
            payload_nbytes=self.payload_nbytes,
            digests=self.digests,
        )


@dataclass(slots=True, eq=False)
class GroupUpdate:
    """One optimizer update of one group.

    Attributes:
        gradient: the group's gradient; released when every chunk has used it.
        hypers: per slot, the hyperparameters; None leaves the slot untouched (no gradient, or not optimized).
        steps: per slot, the 1-based number of this update.
        grad_scales: per slot, the clip coefficient, a 0-dim fp32 tensor, or None.
        computed: completes when the new values are final in memory.
        written: completes when the swap file holds them.
        is_forced: it was deferred and ran before a forward used the group; the read of the shard belongs to no step.
        is_taken: the pipeline knows of it, and will complete its tickets.
        waits: it is deferred and has not started; written by the I/O loop.
        turn: its number among those that have started, by which kernels go; written by the I/O loop.
    """

    state: GroupState
    copy: HostCopy
    gradient: GroupGradient
    hypers: Sequence[Hyper | None]
    steps: Sequence[int]
    grad_scales: Sequence[torch.Tensor | None]
    step: int
    computed: Ticket
    written: Ticket
    is_forced: bool = False
    is_taken: bool = False
    waits: bool = False
    turn: int = 0

    @classmethod
    def make(
        cls,
        state: GroupState,
        copy: HostCopy,
        gradient: GroupGradient,
        hypers: Sequence[Hyper | None],
        grad_scales: Sequence[torch.Tensor | None],
        step: int,
    ) -> GroupUpdate:
        """The next update of a group, which counts from now on."""
        for slot, hyper in enumerate(hypers):
            state.steps[slot] += hyper is not None
        return cls(
            state=state,
            copy=copy,
            gradient=gradient,
            hypers=hypers,
            steps=tuple(state.steps),
            grad_scales=grad_scales,
            step=step,
            computed=Ticket(f"update of {state.group.key}"),
            written=Ticket(f"write-back of {state.group.key}"),
        )

    def pieces(self, record: Record) -> list[ScaledPieces]:
        """What the kernel works on in one chunk; empty when no slot of it is updated."""
        found: dict[int, ScaledPieces] = {}
        for part in record.chunk.pieces:
            hyper = self.hypers[part.slot]
            if hyper is not None:
                scale = self.grad_scales[part.slot]
                scaled = found.setdefault(id(scale), ScaledPieces(scale, []))
                first = record.chunk.start + part.start - self.state.group.layout.slots[part.slot].offset
                seed = self.state.seeds[part.slot]
                scaled.pieces.append(Piece(part.start, part.stop, self.steps[part.slot], hyper, first, seed))
        return list(found.values())

    def param_write(self, place: slice, payload_numel: int, passing: memoryview | None = None) -> ChunkWrite:
        """The write of a span of the shard, from the memory that it passes through, or else from the host copy."""
        size, key = self.state.group.shard_dtype.itemsize, self.state.group.key
        start, stop = place.start * size, place.stop * size
        memory = self.copy.memory[start:stop] if passing is None else passing
        return ChunkWrite(key, "param", memory, start, payload_numel * size)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """A record to update, with the pieces of it that have gradients."""

    record: Record
    parts: Sequence[ScaledPieces]


class CountDown:
    """Calls `then` when `one_done` has been called as often as there are runs."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._then = then
        if count == 0:
            then()

    def one_done(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._then()


class ChunkBuffers:
    """One chunk's transit buffer: what of record, parameters and gradient is not in host memory already."""

    def __init__(self, update: GroupUpdate, record: Record, copy: HostCopy | None) -> None:
        numel = record.chunk.numel
        self.has_record = record.lease is None and record.nbytes > 0
        self.has_param = copy is None
        self.has_grad = update.gradient.is_spilled
        self._record_nbytes = record.nbytes if self.has_record else 0
        self._param_nbytes = numel * update.state.group.shard_dtype.itemsize if self.has_param else 0
        self._grad_nbytes = numel * torch.float32.itemsize if self.has_grad else 0
        self.nbytes = self._record_nbytes + self._param_nbytes + self._grad_nbytes
        self.lease: Lease | None = None

    def _part(self, start: int, nbytes: int) -> memoryview:
        if self.lease is None:
            return memoryview(bytearray())
        return self.lease.memory[start : start + nbytes]

    @property
    def record(self) -> memoryview:
        return self._part(0, self._record_nbytes)

    @property
    def param(self) -> memoryview:
        return self._part(self._record_nbytes, self._param_nbytes)

    @property
    def grad(self) -> memoryview:
        return self._part(self._record_nbytes + self._param_nbytes, self._grad_nbytes)
