"""The async read-ahead scheduler: keeps host copies of the parameter shards ahead of the training thread.

Driven by the predicted order of accesses. From the position of the training thread it walks forward and submits reads
in order while the window budget allows, never past a shard whose update is pending, and never past the end of a
training iteration until the optimizer step of that iteration has been submitted (what lies beyond may still change).
An access that was not predicted costs one demand read, which overtakes everything and may evict the copy that is
needed last.

[Note: what is kept]
The last shards of a forward are the first of the backward, and the first shards of a forward are the last that a
backward updates. Copies marked `keep_at_turn` stay in memory from forward to backward, those marked
`keep_at_boundary` from the update to the next forward. Which ones is fixed by the placement, not by what happens to
be in memory, so the bytes read in a step are a closed form. A group that several units share is kept only after its
last use of a pass: between two uses it would hold memory that the placement has given to others.

[Note: deferred updates]
Under the deferred schedule an update waits here until its group comes up in the order of accesses. Then the shard is
read into the window once, updated there, and used from there while it is written behind: the read of the forward serves
the update too. Once all updates of a step are there, they start in that order as far as the window has room; then those
whose copies are in the window already, so an update that waits holds no window memory, and nothing that holds window
memory waits for room. A copy that the device still reads from the backward keeps its place in the order: what comes
after it waits for as long, or it would find the optimizer's worker busy with all of that.

Everything here runs on one asyncio loop, whose time it uses; nothing blocks and nothing touches autograd.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from infinity.course import Course
from infinity.devices.base import Fence
from infinity.host_block import HostBlock
from infinity.link import LinkPatience
from infinity.order import Access, Mode, Phase
from infinity.residency import CopyState, HostCopy
from infinity.shard_io import ShardIo
from infinity.window import Window
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Priority, Ticket, TrafficTag


class DeferredUpdate(Protocol):
    """An update of one group that waits for the group to be used."""

    def start(self, *, is_forced: bool) -> None:
        """Run it. `is_forced`: not for a forward that comes, so the read of the shard belongs to no step."""

    def fail(self, error: BaseException) -> None:
        """It cannot run; what waits for it is told."""


class ReadAhead:
    """Decides which shard is read when. Single writer of every `HostCopy` outside an update.

    Args:
        store: where shards are read from; None when every shard is placed in host memory.
        pool: host memory for the copies.
        window: how many bytes of copies may be held.
        copies: one per group, by group index.
        groups_of_unit: for every unit, the indices of the groups it gathers.
        uses: how often a forward, or a backward, gathers each group; by group index.
        updated_after_backward: indices of groups whose update follows at once and wants the copy (`overlapped`).
        link: how long a copy to the device may take.
        on_failure: told about a copy to the device that is stuck or has failed.
    """

    def __init__(
        self,
        *,
        store: ShardIo | None,
        pool: HostPool,
        window: TierBudget,
        copies: Sequence[HostCopy],
        groups_of_unit: Sequence[Sequence[int]],
        uses: Mapping[int, int],
        updated_after_backward: Collection[int],
        link: LinkPatience,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._window = Window(store=store, pool=pool, budget=window, copies=copies)
        self._copies = copies
        self._groups_of_unit = groups_of_unit
        self._uses = uses
        self._used: Counter[tuple[int, Phase]] = Counter()  # by group and phase, in the iteration under way
        self._updated_after_backward = updated_after_backward
        self._link = link
        self._on_failure = on_failure
        self._course = Course(self._passes_window)
        self._deferred: dict[int, DeferredUpdate] = {}  # by group, in the order of their submission
        self._read_by_device: Counter[int] = Counter()  # by group, copies under way whose claim ends with them
        self._consumed_here: set[int] = set()  # groups of the access at the position that need no read any more
        self._held_wait = False  # whether deferred updates of copies in the window still wait for their turn
        self._stopped = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.step = 0
        self.counts: Counter[str] = Counter()  # reads by how they came about: "ahead", "demand"

    # Messages from the training thread -------------------------------------------------------------------------

    def begin(self, mode: Mode, trace: tuple[Access, ...], position: int) -> None:
        """An outermost forward starts."""
        self._course.barrier_open = False
        self._used.clear()
        self._drop_strays()
        self.moved(mode, trace, position)

    def moved(self, mode: Mode, trace: tuple[Access, ...], position: int) -> None:
        """The training thread is at `trace[position]`; everything before it has been consumed or is in use."""
        self._course.move(mode, trace, position)
        self._consumed_here.clear()
        self.advance()

    def consumed(self, index: int, phase: Phase, fence: Fence | None = None) -> None:
        """The training thread has submitted the copy to the device; its claim ends once `fence` has passed."""
        self._consumed_here.add(index)  # now, and not when the copy is over: the training thread may be further then
        if fence is not None and not fence.done:
            self._read_by_device[index] += 1
            self._keep(asyncio.create_task(self._consumed_after(index, phase, fence)))
        else:
            self._use_over(index, phase)

    def _use_over(self, index: int, phase: Phase) -> None:
        """The device has the bytes: end the claim, and keep or drop the copy."""
        copy = self._copies[index]
        copy.unclaim()
        self._used[index, phase] += 1
        self._window.settle(copy)
        copy.free_failed()
        if not copy.pinned and copy.state is CopyState.CLEAN:
            if self._is_kept(copy, phase):
                copy.awaits_update = phase is Phase.BACKWARD and copy.group.trainable
            else:
                copy.drop()
        elif copy.state is CopyState.WRITING and not self._is_kept(copy, phase):
            copy.is_used_up = True
        if not self._held_wait:
            self._update_if_held(index)
        self._window.wake()
        self.advance()

    async def end_claims(self) -> None:
        """The training thread uses no copy any more; see `infinity.claims.Claims.end_all`."""
        for index, copy in enumerate(self._copies):
            if copy.is_claimed and not self._read_by_device[index]:
                self._use_over(index, Phase.FORWARD)

    def step_submitted(self, step: int) -> None:
        """Every update of the step is under way or deferred: reads may go on into the next iteration, which is `step`.

        What is used first is updated first, whether its copy is here already or not.
        """
        self.step = step
        self._course.barrier_open = self._held_wait = True
        self.advance()

    def defer(self, index: int, update: DeferredUpdate) -> None:
        """An update waits until its group is used, or until `force`; see [Note: deferred updates].

        Those of a step are followed by `step_submitted`.
        """
        self._deferred[index] = update

    def want(self, index: int) -> None:
        """The training thread waits for the update of a group, which goes first if it is deferred."""
        if index in self._deferred:
            self._keep(asyncio.create_task(self._update_wanted(index)))

    def force(self) -> None:
        """Run every update that is deferred, for whoever needs the state as of the last step."""
        waiting, self._deferred = self._deferred, {}
        for update in waiting.values():
            update.start(is_forced=True)

    def give_up(self, error: BaseException) -> None:
        """Fail every update that is deferred: the engine has closed."""
        waiting, self._deferred = self._deferred, {}
        for update in waiting.values():
            update.fail(error)

    async def demand(self, index: int) -> None:
        """Make sure that the shard is here or on its way, and claim it for the training thread.

        Raises:
            PlacementError: the window cannot hold the shard although nothing else is left to evict.
        """
        copy = self._copies[index]
        while not copy.claim():
            if not copy.update.done:
                self.want(index)
                await copy.update
            elif copy.lost_update is not None:
                copy.raise_lost_update()
            elif copy.state is CopyState.WRITING or copy.is_claimed:
                await self._window.wait_change()
            elif copy.state is CopyState.FAILED:
                copy.drop()  # a read failed before; this one is another try
            elif not self._try_read(copy, Priority.DEMAND):
                await self._make_room(copy)

    async def forget(self) -> None:
        """Drop every copy of what lies in the swap file, and read nothing until the next forward begins.

        For whoever writes new shards past this scheduler; nobody may be using a copy.
        """
        self._course.leave()
        for copy in self._copies:
            if not copy.pinned:
                await self._window.drop(copy)

    async def renew(self, index: int, shared: HostBlock) -> None:
        """Give a copy other memory than `shared`, which a device that computes in host memory goes on to use."""
        self._window.renew(self._copies[index], shared)

    async def forget_edited(self, index: int, shared: HostBlock) -> None:
        """Drop a copy whose bytes were changed on the device, with which it shared them."""
        copy = self._copies[index]
        if copy.block is shared:
            await self._window.drop(copy)

    def read_kept(self, step: int) -> None:
        """Read what is kept from one step to the next (a message), as traffic of `step`, after `forget`."""
        step, self.step = self.step, step
        for copy in self._copies:
            if copy.keep_at_boundary and copy.state is CopyState.ABSENT:
                self._try_read(copy, Priority.READ_AHEAD)
        self.step = step

    # Policy ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Submit reads for what comes next, in order, as far as the window allows."""
        if self._stopped:
            return
        is_held_up = self._advance_in_order()
        if self._held_wait and not is_held_up:
            self._update_held()

    def _advance_in_order(self) -> bool:
        """Whether a deferred update has stopped it because its copy is claimed, which ends by itself."""
        used: dict[int, Phase] = {}  # by group: the phase of its use before
        for distance, access in self._course.upcoming() if self._deferred else self._course.upcoming_reads():
            for index in self._groups_of_unit[access.unit]:
                copy = self._copies[index]
                if index in self._deferred and not self._try_update(index, Priority.READ_AHEAD):
                    return copy.is_claimed
                if copy.pinned or copy.is_chunked or (distance == 0 and index in self._consumed_here):
                    continue
                before = used.get(index, self._course.phase if copy.is_claimed else None)
                used[index] = access.phase
                if self._will_be_there(copy, access.phase, before):
                    continue
                # In order, or not at all: what is read past a gap would have to be evicted to close it.
                is_readable = copy.state is CopyState.ABSENT and copy.is_settled and before is None
                if not is_readable or not self._try_read(copy, Priority.READ_AHEAD):
                    return False
        return False

    def _will_be_there(self, copy: HostCopy, phase: Phase, before: Phase | None) -> bool:
        """Whether a coming access finds the copy that is there now, after a use in phase `before` (None: unused)."""
        is_updated_ahead = copy.is_updated_ahead and copy.lost_update is None
        if not copy.is_settled and not is_updated_ahead:
            return False
        if before is not None:
            return copy.keep_at_turn and before is Phase.FORWARD and phase is Phase.BACKWARD
        if copy.state is CopyState.WRITING:
            return copy.stays_when_written
        return copy.state in (CopyState.READING, CopyState.CLEAN, CopyState.UPDATING)

    def stop(self) -> None:
        """Submit no more reads: the engine is closing or its iteration was reset."""
        self._stopped = True

    async def settle_update(self, copy: HostCopy) -> None:
        """An update has been written; a copy that is there becomes UPDATING again, for other ranks' parts of it."""
        while copy.state in (CopyState.UPDATING, CopyState.WRITING):
            await self._window.wait_change()
        copy.raise_lost_update()
        if copy.state is CopyState.CLEAN and not copy.update.done:  # else the step has been given up meanwhile
            copy.begin_update(copy.update)

    def exchange_lost(self, copy: HostCopy, ticket: Ticket, error: BaseException) -> None:
        """The other ranks' parts will not come, for which a copy may have become UPDATING with `ticket` (a message)."""
        if copy.state is CopyState.UPDATING and copy.ticket is ticket:
            copy.fail()
        copy.lost_update = copy.lost_update or error
        self._window.wake()

    def exchanged(self, copy: HostCopy) -> None:
        """The other ranks' parts are there and written (a message)."""
        copy.updated(Ticket.completed(copy.group.key))
        self.updated(copy)

    def updated(self, copy: HostCopy) -> None:
        """An update is over. If its bytes are in the swap file, keep the copy or give its memory back."""
        if copy.state is CopyState.WRITING:
            if copy.stays_when_written:
                copy.written()
            else:
                copy.drop()
        self._window.wake()
        self.advance()

    def _update_held(self) -> None:
        """Deferred updates of copies in the window wait for their turn no longer."""
        self._held_wait = False
        for index in list(self._deferred):
            self._update_if_held(index)

    def _update_if_held(self, index: int) -> None:
        """A deferred update whose copy is in the window starts at once, and one that no read into it can serve."""
        copy = self._copies[index]
        is_held = not copy.pinned and copy.state in (CopyState.READING, CopyState.CLEAN, CopyState.WRITING)
        if (is_held or copy.is_chunked) and index in self._deferred:
            self._try_update(index, Priority.READ_AHEAD)

    def _try_update(self, index: int, priority: Priority) -> bool:
        """Start a deferred update on the copy in the window, which is read if need be. False when it has to wait."""
        copy = self._copies[index]
        if not copy.is_chunked:
            if copy.is_claimed or (copy.state is CopyState.WRITING and not copy.stays_when_written):
                return False  # it is about to be dropped, or it may be
            if copy.state is CopyState.FAILED and copy.lost_update is None:
                copy.drop()
            if copy.state is CopyState.ABSENT and not self._try_read(copy, priority):
                return False
            copy.is_updated_ahead = True
        self._deferred.pop(index).start(is_forced=False)
        return True

    async def _update_wanted(self, index: int) -> None:
        copy = self._copies[index]
        try:
            while index in self._deferred and not self._try_update(index, Priority.DEMAND):
                if copy.state is CopyState.ABSENT:
                    await self._make_room(copy)
                else:
                    await self._window.wait_change()
        except Exception as error:
            if (update := self._deferred.pop(index, None)) is not None:
                update.fail(error)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Tasks that nobody else holds would be collected while they run."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _consumed_after(self, index: int, phase: Phase, fence: Fence) -> None:
        """The claim ends with the copy to the device. One that is stuck may still read the memory, which stays."""
        try:
            await self._link.until_over(fence, f"the copy of {self._copies[index].group.key} to the device")
        except Exception as error:
            self._fail(error)
            if not fence.done:
                return
        self._read_by_device[index] -= 1
        self._use_over(index, phase)

    def _fail(self, error: BaseException) -> None:
        if self._on_failure is not None:
            self._on_failure(error)

    def _is_kept(self, copy: HostCopy, phase: Phase) -> bool:
        if self._course.mode is not Mode.TRAIN:
            return copy.keep_at_boundary
        uses = self._uses[copy.group.index]
        if self._used[copy.group.index, phase] < uses:
            return False
        if phase is Phase.FORWARD:
            return copy.keep_at_turn
        # What several units share is updated after the backward of all, not at once.
        return copy.keep_at_boundary or (copy.group.index in self._updated_after_backward and uses == 1)

    def _passes_window(self, unit: int) -> bool:
        """Whether a unit has a shard that is read into the window; decided by the placement."""
        copies = [self._copies[index] for index in self._groups_of_unit[unit]]
        return not all(copy.pinned or copy.is_chunked for copy in copies)

    def _try_read(self, copy: HostCopy, priority: Priority) -> bool:
        kind = "param" if self._course.mode is Mode.TRAIN else "param_eval"
        if not self._window.try_read(copy, priority, TrafficTag(kind, self.step)):
            return False
        self.counts["demand" if priority is Priority.DEMAND else "ahead"] += 1
        return True

    async def _make_room(self, wanted: HostCopy) -> None:
        if self._held_wait:
            self._update_held()  # they hold what is waited for
        distance: dict[int, int] = {}
        for number, access in self._course.upcoming():
            for index in self._groups_of_unit[access.unit]:
                distance.setdefault(index, number)
        await self._window.make_room(wanted, distance)

    def _drop_strays(self) -> None:
        """Copies kept for an update that never came (no gradient reached the shard) have no further use."""
        for copy in self._copies:
            if copy.awaits_update and copy.update.done and copy.state is CopyState.CLEAN:
                copy.awaits_update = False
                if not copy.keep_at_boundary:
                    copy.drop()

    async def wait_change(self) -> None:
        """Until some copy has changed its state."""
        await self._window.wait_change()
