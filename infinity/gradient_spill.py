"""Gradients that wait in the swap file: written when they have to leave host memory, read back to be added to.

Which ones do is planned, with space in the swap files for them. Under `overlapped` none is planned, because a gradient
is used up as soon as it is complete; those that turn out to be complete only at the end of backward (their parameters
were used outside their modules, or their modules several times) go there when host memory is needed for the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.gradient_ways import GradientWays
from infinity.gradients import GRAD_DTYPE, GroupGradient, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk
from infinity.observe.stalls import StallCause, StallClock
from infinity.shard_io import ShardIo
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Priority, Ticket, TrafficTag

MakeRoom = Callable[[FlatGroup], None]


def read_back_early(gradient: GroupGradient, transit: TierBudget, pool: HostPool, step: int) -> None:
    """Start to read back a gradient that is about to be added to, if there is room. Never waits.

    Room for one more is left, so that a gradient that arrives first never waits for this one to be used.
    """
    key, nbytes = gradient_key(gradient.group), gradient_nbytes(gradient.group)
    is_away = gradient.is_spilled and gradient.block is None
    if is_away and transit.free_nbytes >= 2 * nbytes and (reservation := transit.try_reserve(nbytes, key)) is not None:
        gradient.block = HostBlock.take(pool, reservation, key)
        gradient.submit_read_back(step, Priority.READ_AHEAD)


class GradientSpill:
    """Writes gradients to the swap file. Used by the training thread.

    Args:
        store: None when nothing lies in swap files.
        ways: which gradients go where.
        make_room: makes space in the swap files for a gradient that was not planned to need any.
    """

    def __init__(self, store: ShardIo | None, stalls: StallClock, ways: GradientWays, make_room: MakeRoom) -> None:
        self.store = store
        self.ways = ways
        self._stalls = stalls
        self._with_room = set(ways.spilled)
        self._make_room = make_room
        self._writes: list[Ticket] = []

    def is_planned(self, group: FlatGroup) -> bool:
        """Whether the gradient of a group waits in the swap file by plan."""
        return group.index in self.ways.spilled

    def is_lasting(self, group: FlatGroup) -> bool:
        """Whether it stays in host memory from the last backward to the update, though others wait there."""
        return group.index in self.ways.lasting

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way, which gives memory back at its end."""
        return any(not ticket.done for ticket in self._writes)

    def write(self, gradient: GroupGradient, step: int) -> None:
        """Submit the write of a whole gradient, which leaves host memory when it has landed.

        Raises:
            SwapFullError: there is no space for it.
        """
        store, group, block = self.store, gradient.group, gradient.block
        if store is None or block is None:
            raise RuntimeError(f"the gradient of {group.key} is not in host memory, or there are no swap files")
        if group.index not in self._with_room:
            with self._stalls.reporting():
                self._make_room(group)
            self._with_room.add(group.index)
        written = store.submit_write(
            gradient_key(group),
            block.memory,
            tag=TrafficTag("grad", step),
            payload_nbytes=group.layout.payload_in(group.grad_span) * GRAD_DTYPE.itemsize,
        )
        self._watch(written, block)
        gradient.block = None
        gradient.is_spilled = True

    def write_chunk(self, gradient: GroupGradient, chunk: Chunk, block: HostBlock, step: int) -> None:
        """Submit the write of one chunk of a gradient, which leaves host memory when it has landed."""
        store, group = self.store, gradient.group
        if store is None:
            raise RuntimeError(f"the gradient of {group.key} is chunked, but there are no swap files")
        size = GRAD_DTYPE.itemsize
        written = store.submit_write(
            gradient_key(group),
            block.memory,
            offset=group.in_grad(chunk).start * size,
            tag=TrafficTag("grad", step),
            payload_nbytes=chunk.payload_numel * size,
        )
        self._watch(written, block)
        gradient.is_spilled = True

    def _watch(self, written: Ticket, block: HostBlock) -> None:
        """Keep a write in mind, and give its memory back when it is over."""
        # Whoever waits for memory looks whether a write is under way. One whose bytes have landed still is, until it
        # has given its memory back.
        landed = Ticket(written.label)

        def land(_: Ticket) -> None:
            block.release()
            landed.complete(written.exception)

        written.add_done_callback(land)  # first: Ctrl-C must not leave a ticket that nobody completes
        self._writes = [*(ticket for ticket in self._writes if not ticket.done or ticket.exception), landed]

    def check(self) -> None:
        """Wait for the writes, and raise what went wrong."""
        try:
            for ticket in self._writes:
                self._stalls.wait(ticket, StallCause.NVME_WRITE)
        finally:
            self._forget_ended()

    def settle(self) -> None:
        """Wait for the writes, and forget what went wrong: nobody needs what was written."""
        try:
            for ticket in self._writes:
                self._stalls.settle(ticket, StallCause.NVME_WRITE)
        finally:
            self._forget_ended()

    def _forget_ended(self) -> None:
        self._writes = [ticket for ticket in self._writes if not ticket.done]
