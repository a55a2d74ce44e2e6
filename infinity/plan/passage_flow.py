"""What passes host memory in chunks, of a simulated rank: `infinity.passage` and `infinity.chunked_gradients`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from infinity.chunk_order import spread_over_drives
from infinity.gradients import GRAD_DTYPE, GroupGradient, gradient_key
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk, FlatSpan
from infinity.observe.stalls import StallCause
from infinity.passage import reads_and_uses, release_after
from infinity.plan.machinery import Machinery
from infinity.plan.scenario import Scenario
from infinity.plan.thread_time import ThreadTime
from infinity.plan.virtual import Link
from storage.budget import TierBudget
from storage.types import Priority, Ticket, TrafficTag


class PassageFlow:
    """Moves chunks, as coroutines of the training thread."""

    def __init__(self, scenario: Scenario, machinery: Machinery, time: ThreadTime) -> None:
        self._scenario = scenario
        self._machinery = machinery
        self._time = time
        self._numel, self._transit_numel = scenario.placement.passage_numel, scenario.transit_numel

    async def fill(self, group: FlatGroup, step: int) -> None:
        """Bring a shard to the device."""
        size, room = group.shard_dtype.itemsize, self._machinery.passage
        reading: deque[tuple[HostBlock, Ticket, int]] = deque()
        for chunk in reads_and_uses(self._chunks(group, group.param_span, self._numel), size, room):
            if chunk is None:
                await self._upload_first(group, reading)
                continue
            nbytes = chunk.numel * size
            buffer = await self._take(room, nbytes)
            ticket = self._machinery.store.submit_read(
                group.key,
                buffer.memory,
                offset=group.in_shard(chunk).start * size,
                priority=Priority.DEMAND,
                tag=TrafficTag("param", step),
            )
            reading.append((buffer, ticket, nbytes))

    async def _upload_first(self, group: FlatGroup, reading: deque[tuple[HostBlock, Ticket, int]]) -> None:
        buffer, ticket, nbytes = reading.popleft()
        await self._time.wait(ticket, StallCause.NVME_READ)
        await self._copy(self._machinery.h2d, group.key, nbytes, self._scenario.speeds.h2d_bytes_per_s, "upload")
        buffer.release()

    async def take_down(self, gradient: GroupGradient, step: int) -> list[Ticket]:
        """Bring a gradient to the swap file; what is there is added to. The writes under way."""
        group, is_there = gradient.group, gradient.is_spilled
        is_chunked = group.index in self._scenario.placement.chunked
        passage, transit = self._machinery.passage, self._machinery.transit
        room, numel = (passage, self._numel) if is_chunked else (transit, self._transit_numel)
        writes = []
        for chunk in self._chunks(group, group.grad_span, numel):
            nbytes = chunk.numel * GRAD_DTYPE.itemsize
            buffer = await self._take(room, nbytes)
            if is_there:
                read = gradient.submit_read(chunk, buffer.memory, step, Priority.DEMAND)
                await self._time.wait(read, StallCause.GRADIENT_READ)
            speed = self._scenario.speeds.d2h_bytes_per_s
            await self._copy(self._machinery.d2h, group.key, nbytes, speed, "download")
            written = self._machinery.store.submit_write(
                gradient_key(group),
                buffer.memory,
                offset=group.in_grad(chunk).start * GRAD_DTYPE.itemsize,
                tag=TrafficTag("grad", step),
            )
            release_after(buffer, written)
            writes.append(written)
        gradient.is_spilled = True
        return writes

    def _chunks(self, group: FlatGroup, span: FlatSpan, numel: int) -> Sequence[Chunk]:
        return spread_over_drives(group.layout.cut(numel, span), self._machinery.store.n_drives)

    async def _take(self, room: TierBudget, nbytes: int) -> HostBlock:
        reservation = room.request(nbytes, "chunk in transit")
        await self._time.wait(reservation, StallCause.NVME_WRITE)
        return HostBlock.take(self._machinery.pool, reservation, "chunk in transit")

    async def _copy(self, link: Link, key: str, nbytes: int, bytes_per_s: float, name: str) -> None:
        if self._scenario.speeds.is_async:
            with self._time.stalled(StallCause.LINK):
                await link.copy(key, nbytes)
        else:
            await self._time.spend(nbytes / bytes_per_s, name)
