"""The window: host memory for copies of shards. Reads into it, evicts from it, and tells when a copy has changed.

Which shard is read when is decided by `infinity.readahead`; here is only how. Used on the I/O loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from infinity.errors import PlacementError
from infinity.host_block import HostBlock
from infinity.residency import CopyState, HostCopy
from infinity.shard_io import ShardIo
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Priority, Ticket, TrafficTag


class Window:
    """Moves host copies in and out.

    Args:
        store: where shards are read from; None when every shard is placed in host memory.
        pool: host memory for the copies.
        budget: how many bytes of copies may be held.
        copies: one per group, by group index.
    """

    def __init__(
        self, *, store: ShardIo | None, pool: HostPool, budget: TierBudget, copies: Sequence[HostCopy]
    ) -> None:
        self._store = store
        self._pool = pool
        self._budget = budget
        self._copies = copies
        self._changed = asyncio.Event()

    def try_read(self, copy: HostCopy, priority: Priority, tag: TrafficTag) -> bool:
        """Start to read a shard that is absent. False when there is no room for it.

        Raises:
            PlacementError: it does not lie in a swap file.
        """
        if self._store is None:
            raise PlacementError(f"{copy.group.key} is in host memory and cannot be read: {copy.describe()}")
        group = copy.group
        reservation = self._budget.try_reserve(group.shard_nbytes, group.key)
        if reservation is None:
            return False
        with ExitStack() as undo:
            block = HostBlock.take(self._pool, reservation, group.key)
            undo.callback(block.release)
            ticket = self._store.submit_read(
                group.key, block.memory, priority=priority, tag=tag, payload_nbytes=group.shard_payload_nbytes
            )
            undo.pop_all()
        copy.begin_read(block, ticket)
        loop = asyncio.get_running_loop()
        ticket.add_done_callback(lambda _: call_on_loop(loop, self._read_over, copy, ticket))
        return True

    def _read_over(self, copy: HostCopy, ticket: Ticket) -> None:
        if copy.ticket is ticket:
            self.settle(copy)
        self.wake()

    def settle(self, copy: HostCopy) -> None:
        """Bring the state of a finished read up to date; the training thread may be faster than the callback."""
        if copy.state is not CopyState.READING or not copy.ticket.done:
            return
        if copy.ticket.exception is None:
            copy.landed()
        else:
            copy.fail()  # whoever needs the shard reads it again, and is told if that fails too
            copy.free_failed()

    def renew(self, copy: HostCopy, shared: HostBlock) -> None:
        """Give a copy memory of its own, if it still has what it shares with the device."""
        if copy.block is not shared:
            return
        try:
            shared.renew(self._pool)
        except BaseException:
            copy.drop()  # it can be read again
            raise

    async def drop(self, copy: HostCopy) -> None:
        """Drop a copy of what lies in the swap file, when what is under way with it is over."""
        while copy.state is not CopyState.ABSENT:
            is_moving = copy.state in (CopyState.READING, CopyState.UPDATING, CopyState.WRITING)
            if is_moving or not copy.drop():
                await self.wait_change()
            copy.awaits_update = False

    async def make_room(self, wanted: HostCopy, distance: Mapping[int, int]) -> None:
        """Evict the clean copy that is needed last, or wait until something in flight has settled.

        What awaits its update goes last: its bytes would have to be read again for that. And an access that came as
        predicted evicts nothing while something in flight will make room: what a step reads is planned.

        Args:
            distance: by group, after how many accesses it is expected to be used; those not in it are not.

        Raises:
            PlacementError: the window cannot hold the shard although nothing else is left to evict.
        """
        is_as_planned = distance.get(wanted.group.index) == 0
        held = [c for c in self._copies if not c.pinned and c.block is not None and c is not wanted]
        held = [c for c in held if c.state is not CopyState.FAILED]
        idle = [c for c in held if c.state is CopyState.CLEAN and not c.is_claimed and c.update.done]
        victims = [] if is_as_planned else [c for c in idle if not c.awaits_update]
        if not victims and len(idle) == len(held):
            victims = idle
        victims.sort(key=lambda c: distance.get(c.group.index, sys.maxsize), reverse=True)
        for victim in victims:
            if victim.drop():
                return
        if not held:
            for copy in self._copies:
                copy.raise_lost_update()  # its bytes stay in memory and fill the window
            raise PlacementError(
                f"the read-ahead window of {self._budget.limit_nbytes} bytes cannot hold {wanted.group.key} "
                f"({wanted.group.shard_nbytes} bytes); held: {self._budget.holders()}"
            )
        await self.wait_change()

    async def wait_change(self) -> None:
        """Until some copy has changed its state."""
        self._changed.clear()
        await self._changed.wait()

    def wake(self) -> None:
        """A copy has changed its state."""
        self._changed.set()


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Run `function` on the loop soon; nothing happens when the loop is already closed."""
    with suppress(RuntimeError):  # what a closed loop raises; it may be closed at any moment
        loop.call_soon_threadsafe(function, *args)
