"""The gradient of one group on its way from the device to its update, in host memory or in the swap file."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.devices.base import Fence
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk
from infinity.shard_io import ShardIo
from storage.types import Priority, Ticket, TrafficTag

GRAD_DTYPE = torch.float32
ReadPart = Callable[[int, torch.Tensor], object]  # fills a 1-D tensor with a gradient's elements from the given one on


def gradient_nbytes(group: FlatGroup) -> int:
    """Bytes of a group's gradient in host memory or in the swap file."""
    return group.grad_span.numel * GRAD_DTYPE.itemsize


def gradient_key(group: FlatGroup) -> str:
    return f"{group.key}/grad"


@torch.no_grad()
def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """0-dim, on the device of `values`; NaN if there is one. No copy, and nothing waits."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, float("inf")) if values.numel() else torch.zeros(())
    return norm


def parts_of(value: torch.Tensor) -> ReadPart:
    """The elements of a tensor of any shape, on any device."""
    flat = value.reshape(-1)
    return lambda start, into: into.copy_(flat[start : start + into.numel()])


class GroupGradient:
    """The gradient of one group, as far as it has arrived.

    `present[slot]` tells whether the slot has a gradient; the memory of other slots is undefined.
    """

    def __init__(self, group: FlatGroup, store: ShardIo | None) -> None:
        self.group = group
        self.present = [False] * len(group.layout.slots)
        self.norms: dict[int, torch.Tensor] = {}
        self.peaks: dict[int, list[torch.Tensor]] = {}  # by slot, the largest magnitude of every part, NaN if any is
        self.fences: list[Fence] = []
        self.is_spilled = False
        self.is_filled = False  # with several ranks: whether the span holds something to add to
        self.block: HostBlock | None = None  # None while it is in the swap file, or nothing has arrived
        self.parts: dict[int, HostBlock] = {}  # in place of the block, by where a chunk of the optimizer begins
        self.arrival = Ticket.completed(group.key)  # completes when what was spilled is back in memory
        self._store = store

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's span of the flat fp32 gradient, in host memory."""
        if self.block is None:
            raise RuntimeError(f"the gradient of {self.group.key} is not in host memory")
        return torch.frombuffer(self.block.memory, dtype=GRAD_DTYPE, count=self.group.grad_span.numel)

    def values(self, chunk: Chunk) -> torch.Tensor:
        """What the optimizer needs for one of its chunks, in host memory."""
        part = self.parts.get(chunk.start)
        if part is None:
            return self.tensor[self.group.in_grad(chunk)]
        return torch.frombuffer(part.memory, dtype=GRAD_DTYPE, count=chunk.numel)

    def release_part(self, chunk: Chunk) -> None:
        """The optimizer has used a chunk; the memory of a gradient that is there in parts goes back. Idempotent."""
        part = self.parts.pop(chunk.start, None)
        if part is not None:
            part.release()

    def slot_view(self, slot: int) -> torch.Tensor:
        """The part of one parameter's gradient that lies in the span, flat; all of it with one rank."""
        place, span = self.group.layout.slots[slot], self.group.grad_span
        start = min(max(place.offset, span.start), span.stop)
        return self.tensor[start - span.start : max(min(place.stop, span.stop), start) - span.start]

    def first_in_slot(self, slot: int) -> int:
        """Which element of its parameter a `slot_view` begins with."""
        return max(self.group.grad_span.start - self.group.layout.slots[slot].offset, 0)

    def submit_read(
        self, chunk: Chunk, memory: memoryview, step: int, priority: Priority = Priority.READ_AHEAD
    ) -> Ticket:
        """Read one chunk of a spilled gradient."""
        return self._read(memory, self.group.in_grad(chunk).start, chunk.payload_numel, step, priority)

    def submit_read_back(self, step: int, priority: Priority) -> Ticket:
        """Read the whole spilled gradient into its block."""
        if self.block is None:
            raise RuntimeError(f"no host memory to read the gradient of {self.group.key} into")
        payload_numel = self.group.layout.payload_in(self.group.grad_span)
        self.arrival = self._read(self.block.memory, 0, payload_numel, step, priority)
        return self.arrival

    def _read(self, memory: memoryview, start: int, payload_numel: int, step: int, priority: Priority) -> Ticket:
        if self._store is None:
            raise RuntimeError(f"the gradient of {self.group.key} was spilled without a store")
        size = GRAD_DTYPE.itemsize
        return self._store.submit_read(
            gradient_key(self.group),
            memory,
            offset=start * size,
            priority=priority,
            tag=TrafficTag("grad", step),
            payload_nbytes=payload_numel * size,
        )

    def release(self) -> None:
        """Give the host memory back. Idempotent."""
        if self.block is not None:
            self.block.release()
            self.block = None
        for start in list(self.parts):
            self.parts.pop(start).release()
