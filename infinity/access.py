"""Holding parameters gathered for the user, and writing back what was edited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.gather import UserHold
from infinity.groups import FlatGroup
from infinity.observe.stalls import StallCause
from infinity.order import Phase
from infinity.runtime import Runtime
from storage.types import Priority, TrafficTag


class ParameterAccess:
    """Gathers on behalf of the user and writes edits back."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @contextmanager
    def hold(self, groups: list[FlatGroup]) -> Iterator[None]:
        """Hold groups gathered for the length of a block."""
        gatherer = self._runtime.gatherer
        hold = UserHold()
        held: list[FlatGroup] = []
        try:
            for group in groups:
                gatherer.gather(group, hold, Phase.FORWARD)
                held.append(group)
            yield
            for group in held:
                if gatherer.edited(group):
                    self.write_back(group)
                    gatherer.accept_edits(group)
        finally:
            for group in held:
                gatherer.release(group, hold)

    def write_back(self, group: FlatGroup) -> None:
        """Make the present values of a gathered group its stored ones."""
        runtime = self._runtime
        copy = runtime.copies[group.index]
        runtime.stalls.wait(copy.update, StallCause.OPTIMIZER)
        with runtime.pool.lease(group.shard_nbytes, f"edit of {group.key}") as lease:
            new = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.layout.numel)
            with torch.no_grad():
                new.copy_(group.flat.detach())
            changed = self._replace(group, new, lease.memory)
            if changed is not None and group.shard_dtype is torch.bfloat16 and group.trainable:
                self._clear_low_halves(group, changed)

    def _replace(self, group: FlatGroup, new: torch.Tensor, memory: memoryview) -> torch.Tensor | None:
        """Put the new shard in place; which elements differ from the old one, where the master has low halves."""
        runtime = self._runtime
        copy = runtime.copies[group.index]
        needs_difference = group.trainable and group.shard_dtype is torch.bfloat16
        runtime.gatherer.claim(group)
        try:
            changed = (copy.tensor.view(torch.int16) != new.view(torch.int16)) if needs_difference else None
            copy.tensor.copy_(new)
            if not copy.pinned and runtime.store is not None:
                ticket = runtime.store.submit_write(group.key, memory, tag=self._tag("param"))
                runtime.stalls.wait(ticket, StallCause.NVME_WRITE)
        finally:
            runtime.gatherer.unclaim(group)
        return changed

    def _clear_low_halves(self, group: FlatGroup, changed: torch.Tensor) -> None:
        """An edited element's master is its bf16 value: the low half of the split master becomes zero."""
        runtime = self._runtime
        for record in runtime.states[group.index].records:
            chunk = record.chunk
            part = changed[chunk.start : chunk.stop]
            if not record.is_initialised or not bool(part.any()):
                continue
            if record.lease is not None:
                record.views(record.lease.memory)[0].masked_fill_(part, 0)
                continue
            if runtime.store is None:
                continue
            with runtime.pool.lease(record.nbytes, f"edit of {record.key}") as lease:
                read = runtime.store.submit_read(
                    record.key, lease.memory, priority=Priority.DEMAND, tag=self._tag("state")
                )
                runtime.stalls.wait(read, StallCause.NVME_READ)
                record.views(lease.memory)[0].masked_fill_(part, 0)
                write = runtime.store.submit_write(record.key, lease.memory, tag=self._tag("state"))
                runtime.stalls.wait(write, StallCause.NVME_WRITE)

    def _tag(self, kind: str) -> TrafficTag:
        return TrafficTag(f"{kind}_edit", self._runtime.step)
