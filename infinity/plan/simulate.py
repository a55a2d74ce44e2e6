"""One rank of a training run on virtual time: the engine's own scheduler and update pipeline, nothing else real.

`ReadAhead`, `UpdatePipeline`, residency, budgets and placement are those of the engine. What is written here is the
training thread around them - gather, compute, harvest, in the order in which the hooks of a model do it - with seconds
in place of work.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from infinity.config import Schedule
from infinity.errors import InfinityError
from infinity.gradients import GroupGradient, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup, Unit
from infinity.observe.stalls import StallCause
from infinity.optim.hyper import AdamWHyper
from infinity.optim.pipeline import GroupUpdate
from infinity.order import Access, Mode, Phase
from infinity.plan.drives import Moved
from infinity.plan.machinery import Machinery
from infinity.plan.scenario import Scenario
from infinity.plan.timeline import Span
from infinity.plan.virtual import PlanLoop, VirtualFence
from infinity.residency import CopyState
from storage.budget import Reservation
from storage.types import Op, Priority, Ticket, TrafficTag

_HYPER = AdamWHyper(1e-3, 0.9, 0.999, 1e-8, 0.0)
_STEPS = 4  # the first ones fill what a step finds; the last one is the answer


@dataclass(slots=True)
class Simulated:
    """What a run on virtual time gave.

    Attributes:
        step_s: seconds of a step once every step is like the one before.
        steps_s: when each step ended; the last one is followed by what was still being written until `end_s`.
        stalls_s: seconds of the last step in which the training thread waited, by cause.
        compute_s: seconds of the last step in which it computed.
        busy_s: seconds of the last step in which a resource worked.
        read_nbytes, write_nbytes: bytes on all drives of this rank, of the last step; `traffic` by kind.
        peaks: most bytes held of every budget.
        spans: everything on the timeline of the last step, when it was asked for.
    """

    step_s: float
    steps_s: list[float]
    end_s: float
    stalls_s: dict[str, float]
    compute_s: float
    busy_s: dict[str, float]
    read_nbytes: int
    write_nbytes: int
    traffic: dict[str, int]
    peaks: dict[str, int]
    spans: list[Span] = field(default_factory=list)
    transfers: list[Moved] = field(default_factory=list)  # of all steps, as they ended


def simulate(
    scenario: Scenario, *, steps: int = _STEPS, is_last: bool = False, keep_spans: bool = False
) -> Simulated:
    """Run a few steps on virtual time. The same scenario always gives the same numbers.

    Args:
        is_last: nothing is read ahead for a step after these.

    Raises:
        InfinityError: the engine itself would fail here.
    """
    with asyncio.Runner(loop_factory=PlanLoop) as runner:
        return runner.run(_run(scenario, steps, is_last=is_last, keep_spans=keep_spans))


async def _run(scenario: Scenario, steps: int, *, is_last: bool, keep_spans: bool) -> Simulated:
    thread = TrainingThread(scenario)
    ends = [0.0]
    for number in range(steps):
        thread.begin_step()
        await thread.step(is_last=is_last and number == steps - 1)
        ends.append(asyncio.get_running_loop().time())
    result = thread.result(ends)
    await thread.machinery.settle()
    result.end_s = asyncio.get_running_loop().time()
    machinery = thread.machinery
    last = steps - 1
    result.read_nbytes = machinery.store.nbytes(Op.READ, last)
    result.write_nbytes = machinery.store.nbytes(Op.WRITE, last)
    result.traffic = {
        f"{op.value}/{kind}": nbytes for (op, kind, step), nbytes in machinery.store.traffic.items() if step == last
    }
    result.transfers = machinery.store.log
    if keep_spans:
        result.spans = thread.spans_since(ends[-2])
    thread.machinery.close()
    return result


class TrainingThread:
    """What the hooks do in an engine, as coroutines."""

    def __init__(self, scenario: Scenario) -> None:
        self.machinery = Machinery(scenario)
        self._scenario = scenario
        self._streamed = scenario.streamed
        self._resident = [unit for unit in scenario.units if unit.resident]
        self._gradients: dict[int, GroupGradient] = {}
        self._device_blocks: dict[int, Reservation] = {}  # of gathered groups
        self._gradient_blocks: dict[int, Reservation] = {}
        self._ahead: dict[int, tuple[VirtualFence, Reservation]] = {}
        self._retiring: deque[tuple[VirtualFence, Reservation]] = deque()
        self._spills: list[Ticket] = []
        self._updates: list[GroupUpdate] = []
        self._step = 0
        self._spans: list[Span] = []
        self._stalls: dict[str, float] = defaultdict(float)
        self._compute_s = 0.0
        self._busy_before: dict[str, float] = {}

    # One step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Count from here."""
        self._stalls.clear()
        self._compute_s = 0.0
        self._busy_before = self.machinery.busy_s()

    async def step(self, *, is_last: bool) -> None:
        """Forward and backward of every micro-batch, and the optimizer step."""
        for _ in range(self._scenario.micro_batches):
            self._begin()
            for unit in self._streamed:
                await self._use(unit, Phase.FORWARD)
            await self._use_resident(Phase.FORWARD)
            await self._use_resident(Phase.BACKWARD)
            for unit in reversed(self._streamed):
                await self._backward(unit)
            for group in self._harvested_last():
                await self._harvest(group)
        if is_last:
            self.machinery.read_ahead.stop()
        await self._optimizer_step()

    def _harvested_last(self) -> Iterator[FlatGroup]:
        """Groups whose gradient is complete only at the end of backward."""
        for group in self._scenario.groups:
            is_resident = any(self._scenario.units[index].resident for index in group.units)
            if group.trainable and (is_resident or len(group.units) > 1):
                yield group

    async def _optimizer_step(self) -> None:
        machinery = self.machinery
        later: list[GroupUpdate] = []
        if not self._scenario.is_overlapped:
            for ticket in self._spills:
                await self._wait(ticket, StallCause.NVME_WRITE)
            self._spills.clear()
            updates = [self._make_update(self._scenario.groups[index]) for index in sorted(self._gradients)]
            later = [update for update in updates if self._is_deferred(update)]
            machinery.pipeline.submit([update for update in updates if update not in later])
            machinery.pipeline.defer(later)
        self._step += 1
        machinery.read_ahead.step_submitted(self._step)
        for update in self._updates:
            if update not in later:
                await self._wait(update.computed, StallCause.OPTIMIZER)
        self._updates = [update for update in self._updates if not update.written.done]
        for unit in self._resident:
            await self._pass(sum(self.machinery.copy_s(g) for g in unit.groups), "refresh resident parameters")

    def _is_deferred(self, update: GroupUpdate) -> bool:
        return self._scenario.placement.schedule is Schedule.DEFERRED and not self._is_resident(update.state.group)

    def _begin(self) -> None:
        order = self.machinery.order
        order.begin(Mode.TRAIN)
        self.machinery.read_ahead.begin(Mode.TRAIN, *order.upcoming())

    # Units -----------------------------------------------------------------------------------------------------

    async def _use_resident(self, phase: Phase) -> None:
        for unit in self._resident:
            await self._compute(unit, phase)

    async def _backward(self, unit: Unit) -> None:
        await self._gather(unit, Phase.BACKWARD)
        for group in unit.groups:
            if group.trainable:
                await self._expect(group)
        await self._compute(unit, Phase.BACKWARD)
        for group in unit.groups:
            if group.trainable and len(group.units) == 1:
                await self._harvest(group)
        self._release(unit)

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
        if self._scenario.speeds.is_async:
            self._upload_ahead()
        for fence in fences:
            with self._stalled(StallCause.LINK):
                await fence

    async def _gather_group(self, group: FlatGroup, phase: Phase) -> VirtualFence:
        machinery = self.machinery
        await self._pass(self._scenario.speeds.dispatch_s, "engine")
        if group.index in self._ahead:
            fence, block = self._ahead.pop(group.index)
            self._device_blocks[group.index] = block
            return fence
        copy = machinery.copies[group.index]
        machinery.read_ahead.want(group.index)
        await self._wait(copy.update, StallCause.OPTIMIZER)
        if not copy.claim():
            with self._stalled(StallCause.NVME_READ):
                await machinery.read_ahead.demand(group.index)
        if copy.state is CopyState.READING:
            await self._wait(copy.ticket, StallCause.NVME_READ)
        self._device_blocks[group.index] = await self._allocate(group, group.key)
        return await self._upload(group, phase)

    async def _upload(self, group: FlatGroup, phase: Phase) -> VirtualFence:
        machinery = self.machinery
        if self._scenario.speeds.is_async:
            fence = machinery.upload(group)
            machinery.read_ahead.consumed(group.index, phase, fence)
        else:
            await self._pass(machinery.copy_s(group), "upload")
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
            if self._is_resident(group) or group.index in self._ahead or group.index in self._device_blocks:
                continue
            if not copy.ticket.done or copy.state is CopyState.READING or not copy.update.done:
                continue
            block = machinery.device.try_reserve(group.flat_nbytes, group.key)
            if block is None:
                continue
            if not copy.claim():
                block.release()
                continue
            fence = machinery.upload(group)
            machinery.read_ahead.consumed(group.index, access.phase, fence)
            self._ahead[group.index] = (fence, block)

    async def _compute(self, unit: Unit, phase: Phase) -> None:
        seconds = self._scenario.times[unit.index].of(phase) if unit.index in self._scenario.times else 0.0
        self._compute_s += seconds
        await self._pass(seconds, f"{phase.value} {unit.name}", lane="compute")

    def _release(self, unit: Unit) -> None:
        for group in unit.groups:
            block = self._device_blocks.pop(group.index, None)
            if block is not None:
                block.release()

    def _is_resident(self, group: FlatGroup) -> bool:
        return group.index in self.machinery.resident

    # Device memory ---------------------------------------------------------------------------------------------

    async def _allocate(self, group: FlatGroup, owner: str) -> Reservation:
        """Device memory. Gradients on their way down give theirs back first, then what is ahead."""
        device = self.machinery.device
        while True:
            while self._retiring and self._retiring[0][0].done:
                self._retiring.popleft()[1].release()
            if (block := device.try_reserve(group.flat_nbytes, owner)) is not None:
                return block
            if self._retiring:
                with self._stalled(StallCause.LINK):
                    await self._retiring[0][0]
            elif self._ahead:
                _, (fence, ahead) = self._ahead.popitem()
                await fence
                ahead.release()
            else:
                raise InfinityError(f"{owner} needs {group.flat_nbytes} bytes of the device: {device.holders()}")

    # Gradients and updates -------------------------------------------------------------------------------------

    async def _expect(self, group: FlatGroup) -> None:
        if group.index not in self._gradient_blocks:
            self._gradient_blocks[group.index] = await self._allocate(group, gradient_key(group))
        gradient = self._gradients.get(group.index)
        transit, nbytes = self.machinery.transit, gradient_nbytes(group)
        is_away = gradient is not None and gradient.is_spilled and gradient.lease is None
        if gradient is not None and is_away and transit.free_nbytes >= 2 * nbytes:
            gradient.reservation = transit.try_reserve(nbytes, gradient_key(group))
            if gradient.reservation is not None:
                gradient.lease = self.machinery.pool.lease(nbytes, gradient_key(group))
                gradient.submit_read_back(self._step, Priority.READ_AHEAD)

    async def _harvest(self, group: FlatGroup) -> None:
        machinery = self.machinery
        await self._pass(self._scenario.speeds.dispatch_s, "engine")
        gradient = await self._open(group)
        fence = machinery.completed
        if self._scenario.speeds.is_async:
            fence = machinery.download(group)
            gradient.fences.append(fence)
        else:
            await self._pass(machinery.gradient_copy_s(group), "download")
        block = self._gradient_blocks.pop(group.index, None)
        if block is not None:
            self._retiring.append((fence, block))
        gradient.present[:] = [True] * len(gradient.present)
        if group.index in self._scenario.placement.spilled_gradients:
            with self._stalled(StallCause.LINK):
                await fence
            self._spill(gradient)
        elif self._scenario.is_overlapped:
            self.machinery.pipeline.submit([self._make_update(group)])

    async def _open(self, group: FlatGroup) -> GroupGradient:
        """The group's gradient with host memory for it."""
        machinery, nbytes = self.machinery, gradient_nbytes(group)
        gradient = self._gradients.get(group.index)
        if gradient is None:
            gradient = self._gradients[group.index] = GroupGradient(group, machinery.store)
        if gradient.lease is None:
            is_spilled = group.index in self._scenario.placement.spilled_gradients
            budget = machinery.transit if is_spilled else machinery.gradients
            gradient.reservation = budget.request(nbytes, gradient_key(group))
            await self._wait(gradient.reservation, StallCause.GRADIENT_SPACE)
            gradient.lease = machinery.pool.lease(nbytes, gradient_key(group))
            if gradient.is_spilled:
                gradient.submit_read_back(self._step, Priority.DEMAND)
        await self._wait(gradient.arrival, StallCause.GRADIENT_READ)
        return gradient

    def _spill(self, gradient: GroupGradient) -> None:
        lease, reservation = gradient.lease, gradient.reservation
        if lease is None:
            return
        key = gradient_key(gradient.group)
        ticket = self.machinery.store.submit_write(key, lease.memory, tag=TrafficTag("grad", self._step))
        gradient.lease = gradient.reservation = None
        gradient.is_spilled = True
        gradient.fences.clear()

        def landed(_: Ticket) -> None:
            lease.release()
            if reservation is not None:
                reservation.release()

        ticket.add_done_callback(landed)
        self._spills.append(ticket)

    def _make_update(self, group: FlatGroup) -> GroupUpdate:
        machinery = self.machinery
        slots = len(group.layout.slots)
        update = GroupUpdate(
            state=machinery.states[group.index],
            copy=machinery.copies[group.index],
            gradient=self._gradients.pop(group.index),
            hypers=[_HYPER] * slots,
            steps=[self._step + 1] * slots,
            grad_scales=[None] * slots,
            step=self._step,
            computed=Ticket(f"update of {group.key}"),
            written=Ticket(f"write-back of {group.key}"),
        )
        update.copy.update = update.computed
        self._updates.append(update)
        return update

    # Time ------------------------------------------------------------------------------------------------------

    async def _wait(self, ticket: Ticket, cause: StallCause) -> None:
        if ticket.done:
            ticket.result()
            return
        with self._stalled(cause):
            await ticket

    @contextmanager
    def _stalled(self, cause: StallCause) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        yield
        if loop.time() > start_s:
            self._stalls[cause.value] += loop.time() - start_s
            self._spans.append(Span("stall", cause.value, start_s, loop.time()))

    async def _pass(self, seconds: float, name: str, lane: str = "engine") -> None:
        """The training thread is busy for so long."""
        if seconds > 0:
            start_s = asyncio.get_running_loop().time()
            await asyncio.sleep(seconds)
            self._spans.append(Span(lane, name, start_s, start_s + seconds))

    # Result ----------------------------------------------------------------------------------------------------

    def result(self, ends: list[float]) -> Simulated:
        """What the last step gave; `ends` are the ends of all steps, after a zero."""
        machinery = self.machinery
        busy = machinery.busy_s()
        return Simulated(
            step_s=ends[-1] - ends[-2],
            steps_s=ends[1:],
            end_s=ends[-1],
            stalls_s=dict(sorted(self._stalls.items())),
            compute_s=self._compute_s,
            busy_s={name: seconds - self._busy_before.get(name, 0.0) for name, seconds in busy.items()},
            read_nbytes=0,
            write_nbytes=0,
            traffic={},
            peaks={budget.name: budget.peak_nbytes for budget in machinery.budgets},
        )

    def spans_since(self, start_s: float) -> list[Span]:
        """Everything on the timeline that had not ended at `start_s`, in order of time."""
        spans = [span for span in (*self._spans, *self.machinery.spans()) if span.end_s > start_s]
        return sorted(spans, key=lambda span: (span.start_s, span.lane, span.name))

