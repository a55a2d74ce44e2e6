"""The training thread of a simulated rank: what the hooks do in an engine, as coroutines."""

from __future__ import annotations

from collections.abc import Iterator

from infinity.groups import FlatGroup, Unit
from infinity.observe.stalls import StallCause
from infinity.order import Access, Mode, Phase
from infinity.plan.device_memory import DeviceMemory
from infinity.plan.gradient_flow import GradientFlow
from infinity.plan.machinery import Machinery
from infinity.plan.passage_flow import PassageFlow
from infinity.plan.scenario import Scenario
from infinity.plan.thread_time import ThreadTime
from infinity.plan.timeline import Span
from infinity.plan.virtual import VirtualFence
from infinity.residency import CopyState


class TrainingThread:
    """Gather, compute, harvest, in the order in which the hooks of a model do it. `time` is what that took."""

    def __init__(self, scenario: Scenario) -> None:
        self.machinery = Machinery(scenario)
        self.time = ThreadTime(
            self.machinery.worker.spans, self.machinery.transferred_s, self.machinery.speeds.contention.kernel
        )
        self._scenario = scenario
        self._streamed = scenario.streamed
        self._resident = [unit for unit in scenario.units if unit.resident]
        self._device = DeviceMemory(self.machinery.device, self.time)
        self._passage = PassageFlow(scenario, self.machinery, self.time)
        self._gradients = GradientFlow(scenario, self.machinery, self._device, self._passage, self.time)
        self._busy_before: dict[str, list[float]] = {}

    # One step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Count from here."""
        self.time.begin_step()
        self._busy_before = self.machinery.busy_s()

    async def rest_of_step(self, *, is_last: bool) -> None:
        """The backward of the first micro-batch, forward and backward of the others, and the optimizer step."""
        await self._whole_backward()
        for _ in range(self._scenario.micro_batches - 1):
            await self.forward()
            await self._whole_backward()
        if is_last:
            self.machinery.read_ahead.stop()
        await self._optimizer_step()

    async def forward(self) -> None:
        """The forward of a micro-batch: of the first one, by its end what the step before left is used up."""
        order = self.machinery.order
        order.begin(Mode.TRAIN)
        self.machinery.read_ahead.begin(Mode.TRAIN, *order.upcoming())
        self._gradients.spill_kept()
        for unit in self._streamed:
            await self._use(unit, Phase.FORWARD)
        await self._use_resident(Phase.FORWARD)

    async def _whole_backward(self) -> None:
        await self._use_resident(Phase.BACKWARD)
        for unit in reversed(self._streamed):
            await self._backward(unit)
        for group in self._harvested_last():
            await self._gradients.harvest(group)

    def _harvested_last(self) -> Iterator[FlatGroup]:
        """Groups whose gradient is complete only at the end of backward."""
        for group in self._scenario.groups:
            is_resident = any(self._scenario.units[index].resident for index in group.units)
            if group.trainable and (is_resident or len(group.units) > 1):
                yield group

    async def _optimizer_step(self) -> None:
        await self._gradients.optimizer_step()
        for unit in self._resident:
            await self.time.spend(sum(self.machinery.copy_s(g) for g in unit.groups), "refresh resident parameters")

    # Units -----------------------------------------------------------------------------------------------------

    async def _use_resident(self, phase: Phase) -> None:
        for unit in self._resident:
            await self._compute(unit, phase)

    async def _backward(self, unit: Unit) -> None:
        await self._gather(unit, Phase.BACKWARD)
        await self._compute(unit, Phase.BACKWARD)
        self._release(unit)
        for group in unit.groups:
            if group.trainable and len(group.units) == 1:
                await self._gradients.harvest(group)

    async def _use(self, unit: Unit, phase: Phase) -> None:
        await self._gather(unit, phase)
        await self._compute(unit, phase)
        self._release(unit)

    async def _gather(self, unit: Unit, phase: Phase) -> None:
        machinery = self.machinery
        fences = []
        for group in unit.groups:
            if not self._is_resident(group):
                fences.append(await self._gather_group(group, phase))
        machinery.order.record(Access(phase, unit.index))
        machinery.read_ahead.moved(machinery.order.mode, *machinery.order.upcoming())
        if phase is Phase.BACKWARD:
            for group in unit.groups:
                if group.trainable:
                    await self._gradients.expect(group)
        if self._scenario.speeds.is_async:
            self._upload_ahead()
        for fence in fences:
            with self.time.stalled(StallCause.LINK):
                await fence

    async def _gather_group(self, group: FlatGroup, phase: Phase) -> VirtualFence:
        machinery = self.machinery
        if group.index in self._device.ahead:
            fence, block = self._device.ahead.pop(group.index)
            self._device.gathered[group.index] = block
            return fence
        copy = machinery.copies[group.index]
        machinery.read_ahead.want(group.index)
        await self.time.wait(copy.update, StallCause.OPTIMIZER)
        if copy.is_chunked:
            self._device.gathered[group.index] = await self._device.allocate(group, group.key)
            await self._passage.fill(group, machinery.read_ahead.step)
            filled = machinery.completed
            return machinery.gather(group, filled) if self._scenario.speeds.is_async else filled
        if not copy.claim():
            with self.time.stalled(StallCause.NVME_READ):
                await machinery.read_ahead.demand(group.index)
        if copy.state is CopyState.READING:
            await self.time.wait(copy.ticket, StallCause.NVME_READ)
        self._device.gathered[group.index] = await self._device.allocate(group, group.key)
        return await self._upload(group, phase)

    async def _upload(self, group: FlatGroup, phase: Phase) -> VirtualFence:
        machinery = self.machinery
        if self._scenario.speeds.is_async:
            fence = machinery.upload(group)
            machinery.read_ahead.consumed(group.index, phase, fence)
        else:
            if not machinery.copies[group.index].is_shareable:
                await self.time.spend(machinery.copy_s(group), "upload")
            fence = machinery.completed
            machinery.read_ahead.consumed(group.index, phase)
        return fence

    def _upload_ahead(self) -> None:
        """Start the upload of the next unit if its copy is there and the device has room."""
        machinery = self.machinery
        trace, position = machinery.order.upcoming()
        if position >= len(trace):
            return
        access = trace[position]
        for group in self._scenario.units[access.unit].groups:
            copy = machinery.copies[group.index]
            if self._is_resident(group) or group.index in self._device.ahead or group.index in self._device.gathered:
                continue
            if not copy.ticket.done or copy.state is CopyState.READING or not copy.update.done:
                continue
            block = self._device.try_reserve(group)
            if block is None:
                continue
            if not copy.claim():
                block.release()
                continue
            fence = machinery.upload(group)
            machinery.read_ahead.consumed(group.index, access.phase, fence)
            self._device.ahead[group.index] = (fence, block)

    async def _compute(self, unit: Unit, phase: Phase) -> None:
        seconds = self._scenario.times[unit.index].of(phase) if unit.index in self._scenario.times else 0.0
        await self.time.compute(seconds, f"{phase.value} {unit.name}")

    def _release(self, unit: Unit) -> None:
        for group in unit.groups:
            self._device.release(group.index)

    def _is_resident(self, group: FlatGroup) -> bool:
        return group.index in self.machinery.resident

    # Looking ---------------------------------------------------------------------------------------------------

    def busy_s(self) -> dict[str, float]:
        """Seconds of this step in which each resource worked; of several drives the one that worked longest."""
        busy = {}
        for name, each in self.machinery.busy_s().items():
            before = self._busy_before[name]
            busy[name] = max((now_s - then_s for now_s, then_s in zip(each, before, strict=True)), default=0.0)
        return busy

    def spans_since(self, start_s: float) -> list[Span]:
        """Everything on the timeline that had not ended at `start_s`, each lane in order."""
        return [*(span for span in self.time.spans if span.end_s > start_s), *self.machinery.spans(start_s)]
