"""Chunk by chunk through host memory: what is too large to lie there whole, on its way between swap file and device.

[Note: chunked groups]
A group is *chunked* where the host budget cannot hold its shard or its gradient beside the rest of a step. Its shard is
never read ahead: a gather reads chunks into a few buffers, and each goes to the device as soon as it is there. Its
gradient leaves the device the same way and waits in the swap file; the update reads both with the state, as it does
where no host copy is present. So no part of the host budget depends on the size of a group. Which groups are chunked is
planned, the largest first, and only as many as the budget asks for.

Used by the training thread; transfers complete on other threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

import torch

from infinity.chunk_order import spread_over_drives
from infinity.devices.base import Device, DeviceBlock
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk
from infinity.observe.stalls import StallCause, StallClock
from infinity.order import Mode
from infinity.shard_io import ShardIo
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Priority, Ticket, TrafficTag

DEPTH = 2  # buffers of the widest dtype: one is being read or written while another one is copied
TRANSIT_NUMEL = 1 << 19  # of a chunk of a gradient that goes to the swap file though host memory could hold it whole


def release_after(block: HostBlock, transfer: Ticket) -> None:
    """Give memory back once nothing reads or fills it any more, however that ends."""
    transfer.add_done_callback(lambda _: block.release())


def reads_and_uses(chunks: Iterable[Chunk], itemsize: int, budget: TierBudget) -> Iterator[Chunk | None]:
    """What is to be done next: read a chunk, or (None) use the first of those that are being read.

    As many are read beside the one that is used as there is room for.
    """
    n_reading = 0
    for chunk in chunks:
        while n_reading and budget.free_nbytes < chunk.numel * itemsize:
            yield None  # rather than wait for what is being written
            n_reading -= 1
        yield chunk
        n_reading += 1
    yield from repeat(None, n_reading)


class Passage:
    """The buffers, and the way of a shard through them.

    Args:
        store: None when nothing lies in swap files; then there are no chunked groups either.
        budget: bytes of the buffers together; at least one chunk of the widest dtype.
        chunk_numel: elements that move at a time.

    Attributes:
        mode: of the forward under way; reads of an evaluation are counted apart.
        step: that the transfers belong to.
    """

    def __init__(
        self,
        *,
        store: ShardIo | None,
        pool: HostPool,
        budget: TierBudget,
        chunk_numel: int,
        device: Device,
        stalls: StallClock,
    ) -> None:
        self._store = store
        self._pool = pool
        self._budget = budget
        self._device = device
        self._stalls = stalls
        self.chunk_numel = chunk_numel
        self.mode = Mode.TRAIN
        self.step = 0

    @property
    def n_drives(self) -> int:
        """Over which what passes is spread."""
        return self._store.n_drives if self._store is not None else 1

    def fill(self, group: FlatGroup, block: DeviceBlock, own: torch.Tensor, *, offset_nbytes: int) -> None:
        """Bring this rank's shard to the device; returns when all of it is there.

        Args:
            own: where it goes, 1-D, in the compute dtype.
            offset_nbytes: of `own` in the block.

        Raises:
            IoTimeoutError, ReadError: the shard could not be read.
        """
        size = group.compute_dtype.itemsize

        def upload(chunk: Chunk, values: torch.Tensor) -> None:
            place = group.in_shard(chunk)
            at_nbytes = offset_nbytes + place.start * size
            fence = self._device.upload(block, values, own[place], group.key, offset_nbytes=at_nbytes)
            self._stalls.wait_fence(fence, group.key)

        def read(chunk: Chunk, memory: memoryview) -> Ticket:
            return self._read(group, chunk, memory)

        chunks = spread_over_drives(group.layout.cut(self.chunk_numel, group.param_span), self.n_drives)
        self.read_each(chunks, group.shard_dtype, read, upload, StallCause.NVME_READ)

    def _read(self, group: FlatGroup, chunk: Chunk, memory: memoryview) -> Ticket:
        if self._store is None:
            raise RuntimeError(f"{group.key} is chunked, but there are no swap files")
        size = group.shard_dtype.itemsize
        return self._store.submit_read(
            group.key,
            memory,
            offset=group.in_shard(chunk).start * size,
            priority=Priority.DEMAND,
            tag=TrafficTag("param" if self.mode is Mode.TRAIN else "param_eval", self.step),
            payload_nbytes=chunk.payload_numel * size,
        )

    def read_each(
        self,
        chunks: Iterable[Chunk],
        dtype: torch.dtype,
        read: Callable[[Chunk, memoryview], Ticket],
        use: Callable[[Chunk, torch.Tensor], None],
        cause: StallCause,
    ) -> None:
        """Read chunks one after another, as many beside the one that is used as there is room for.

        Args:
            read: submits the read of a chunk into memory.
            use: given every chunk with its values (1-D, of `dtype`), which are gone when it returns.
        """
        size, reading = dtype.itemsize, deque[tuple[Chunk, HostBlock, Ticket]]()

        def use_first() -> None:
            chunk, buffer, ticket = reading[0]
            self._stalls.wait(ticket, cause)
            use(chunk, torch.frombuffer(buffer.memory, dtype=dtype, count=chunk.numel))
            reading.popleft()
            buffer.release()

        try:
            for chunk in reads_and_uses(chunks, size, self._budget):
                if chunk is None:
                    use_first()
                    continue
                buffer = self.take(chunk.numel * size, "chunk in transit")
                reading.append((chunk, buffer, Ticket.completed()))
                reading[-1] = (chunk, buffer, read(chunk, buffer.memory))
        finally:
            for _, buffer, ticket in reading:
                release_after(buffer, ticket)

    def take(self, nbytes: int, owner: str) -> HostBlock:
        """Memory for one chunk, waiting for one that is being written."""
        reservation = self._budget.request(nbytes, owner)
        try:
            self._stalls.wait(reservation, StallCause.NVME_WRITE)
        except BaseException:
            reservation.release()
            raise
        return HostBlock.take(self._pool, reservation, owner)
