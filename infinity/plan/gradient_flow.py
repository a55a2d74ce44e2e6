"""Gradients of a simulated rank: from the device to the host, to the drives where they do not fit, and to an update."""

from __future__ import annotations

from infinity.config import Schedule
from infinity.gradient_parts import parts_of
from infinity.gradient_spill import read_back_early
from infinity.gradient_ways import GradientWay, GradientWays
from infinity.gradients import GroupGradient, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.observe.stalls import StallCause
from infinity.optim.group_update import GroupUpdate
from infinity.optim.hyper import AdamWHyper
from infinity.plan.device_memory import DeviceMemory
from infinity.plan.machinery import Machinery
from infinity.plan.passage_flow import PassageFlow
from infinity.plan.scenario import Scenario
from infinity.plan.thread_time import ThreadTime
from storage.types import Priority, Ticket, TrafficTag

_HYPER = AdamWHyper(1e-3, 0.9, 0.999, 1e-8, 0.0)


class GradientFlow:
    """What the gradient sink of an engine does, as coroutines of the training thread. `step` counts optimizer steps."""

    def __init__(
        self, scenario: Scenario, machinery: Machinery, device: DeviceMemory, passage: PassageFlow, time: ThreadTime
    ) -> None:
        self._scenario = scenario
        self._ways = GradientWays.under(scenario.placement)
        self._passage = passage
        self._machinery = machinery
        self._device = device
        self._time = time
        self._gradients: dict[int, GroupGradient] = {}
        self._spills: list[Ticket] = []
        self._updates: list[GroupUpdate] = []
        self.step = 0

    async def expect(self, group: FlatGroup) -> None:
        """A backward is about to make this gradient."""
        if group.index not in self._device.gradients:
            self._device.gradients[group.index] = await self._device.allocate(group, gradient_key(group))
        gradient = self._gradients.get(group.index)
        if gradient is not None and group.index not in self._ways.chunked:
            read_back_early(gradient, self._machinery.transit, self._machinery.pool, self.step)

    async def harvest(self, group: FlatGroup) -> None:
        """A backward has made it."""
        gradient = self._gradients.get(group.index)
        # Not measured: what a run that clips, or looks for overflows, does instead is not planned.
        way = self._ways.of(group.index, gradient, is_whole=True, is_final=True, is_measured=False)
        if way is GradientWay.IN_CHUNKS:
            await self._take_down_in_chunks(group)
        elif way is GradientWay.IN_PARTS:
            await self._take_down_in_parts(group)
        else:
            await self._take_down_whole(group)

    async def _take_down_whole(self, group: FlatGroup) -> None:
        machinery, gradient = self._machinery, await self._open(group)
        fence = machinery.completed
        if self._scenario.speeds.is_async:
            fence = machinery.download(group)
            gradient.fences.append(fence)
        else:
            await self._time.spend(machinery.gradient_copy_s(group), "download")
        self._device.retire(group.index, fence)
        gradient.present[:] = [True] * len(gradient.present)
        if group.index in self._ways.lasting:
            gradient.is_spilled = False
        elif group.index in self._ways.spilled:
            with self._time.stalled(StallCause.LINK):
                await fence
            self._spill(gradient)
        elif self._scenario.is_overlapped:
            self._update(group)

    def _update(self, group: FlatGroup) -> None:
        """Start the update of a group, or leave it for the next forward."""
        update, pipeline = self._make_update(group), self._machinery.pipeline
        if group.index in self._scenario.placement.updated_in_forward:
            pipeline.defer([update])
        else:
            pipeline.submit([update])

    def spill_kept(self) -> None:
        """A forward begins after another backward: gradients that waited for a step make room."""
        for index in sorted(self._ways.lasting & self._gradients.keys()):
            self._spill(self._gradients[index])

    async def _take_down_in_parts(self, group: FlatGroup) -> None:
        machinery, key = self._machinery, gradient_key(group)
        is_async, bytes_per_s = self._scenario.speeds.is_async, self._scenario.speeds.d2h_bytes_per_s
        gradient = self._gradients[group.index] = GroupGradient(group, machinery.store)
        fence = machinery.reduce(group) if is_async else machinery.completed
        is_awaited = False
        for chunk, nbytes in parts_of(group, machinery.chunk_numel):
            reservation = machinery.gradients.request(nbytes, key)
            if not (reservation.done or is_awaited):
                is_awaited = True
                machinery.pipeline.hasten()
            await self._time.wait(reservation, StallCause.GRADIENT_SPACE)
            gradient.parts[chunk.start] = HostBlock.take(machinery.pool, reservation, key)
            if is_async:
                fence = machinery.d2h.copy(group.key, nbytes, not_before_s=fence.ready_s)
            else:
                await self._time.spend(nbytes / bytes_per_s, "download")
        if is_awaited:
            machinery.pipeline.relax()
        gradient.fences.append(fence)
        self._device.retire(group.index, fence)
        gradient.present[:] = [True] * len(gradient.present)
        self._update(group)

    async def _take_down_in_chunks(self, group: FlatGroup) -> None:
        gradient = self._gradients.setdefault(group.index, GroupGradient(group, self._machinery.store))
        if self._scenario.speeds.is_async:
            with self._time.stalled(StallCause.LINK):
                await self._machinery.reduce(group)
        self._spills += await self._passage.take_down(gradient, self.step)
        self._device.retire(group.index, self._machinery.completed)
        gradient.present[:] = [True] * len(gradient.present)
        if self._scenario.is_overlapped:
            self._update(group)

    async def _open(self, group: FlatGroup) -> GroupGradient:
        """The group's gradient with host memory for it."""
        machinery, nbytes = self._machinery, gradient_nbytes(group)
        gradient = self._gradients.get(group.index)
        if gradient is None:
            gradient = self._gradients[group.index] = GroupGradient(group, machinery.store)
        if gradient.block is None:
            is_spilled = group.index in self._ways.spilled
            budget = machinery.transit if is_spilled else machinery.gradients
            reservation = budget.request(nbytes, gradient_key(group))
            is_awaited = not is_spilled and not reservation.done
            if is_awaited:
                machinery.pipeline.hasten()
            await self._time.wait(reservation, StallCause.GRADIENT_SPACE)
            if is_awaited:
                machinery.pipeline.relax()
            gradient.block = HostBlock.take(machinery.pool, reservation, gradient_key(group))
            if gradient.is_spilled:
                gradient.submit_read_back(self.step, Priority.DEMAND)
        await self._time.wait(gradient.arrival, StallCause.GRADIENT_READ)
        return gradient

    def _spill(self, gradient: GroupGradient) -> None:
        block, gradient.block = gradient.block, None
        if block is None:
            return
        key = gradient_key(gradient.group)
        ticket = self._machinery.store.submit_write(key, block.memory, tag=TrafficTag("grad", self.step))
        gradient.is_spilled = True
        gradient.fences.clear()
        ticket.add_done_callback(lambda _: block.release())
        self._spills.append(ticket)

    def _make_update(self, group: FlatGroup) -> GroupUpdate:
        machinery = self._machinery
        slots = len(group.layout.slots)
        state, copy = machinery.states[group.index], machinery.copies[group.index]
        gradient = self._gradients.pop(group.index)
        update = GroupUpdate.make(state, copy, gradient, [_HYPER] * slots, [None] * slots, self.step)
        update.copy.update = update.computed
        self._updates.append(update)
        return update

    async def optimizer_step(self) -> None:
        """Hand all gradients to updates and wait for those that `step()` waits for."""
        machinery = self._machinery
        left = self._scenario.placement.updated_in_forward
        later = [update for update in self._updates if update.state.group.index in left]
        if not self._scenario.is_overlapped:
            for ticket in self._spills:
                await self._time.wait(ticket, StallCause.NVME_WRITE)
            self._spills.clear()
            updates = [self._make_update(self._scenario.groups[index]) for index in sorted(self._gradients)]
            later = [update for update in updates if self._is_deferred(update)]
            machinery.pipeline.submit([update for update in updates if update not in later])
            machinery.pipeline.defer(later)
        self.step += 1
        machinery.read_ahead.step_submitted(self.step)
        for update in self._updates:
            if update not in later:
                await self._time.wait(update.computed, StallCause.OPTIMIZER)
        self._updates = [update for update in self._updates if not update.written.done]

    def _is_deferred(self, update: GroupUpdate) -> bool:
        is_resident = update.state.group.index in self._machinery.resident
        return self._scenario.placement.schedule is Schedule.DEFERRED and not is_resident
