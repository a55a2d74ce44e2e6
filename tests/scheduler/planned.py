"""A training thread of coroutines that runs what the placement manager decided, in no more memory than it divided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from infinity.config import Schedule
from infinity.demand import Request
from infinity.gradients import GroupGradient, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup, Unit
from infinity.host_block import HostBlock
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.link import LinkPatience
from infinity.optim.group_update import GroupUpdate
from infinity.optim.hyper import AdamWHyper, Piece, StateField
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import Access, AccessOrder, Mode, Phase
from infinity.placement import Placement, make_placement
from infinity.readahead import ReadAhead
from infinity.residency import CopyState, HostCopy
from infinity.testing import FakeGpu, FakeRegion, SimulatedStore
from infinity.units import Owned
from storage.budget import TierBudget
from storage.errors import IoError, ReadError
from storage.pool import HostPool
from storage.types import Op, Ticket, TrafficTag

HYPER = AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.0)
FIELDS = (StateField("sum", torch.float32),)
PLENTY = 1 << 40
_TRIES = 20


class AddingKernel:
    """Adds the gradient to the parameter and to its state, so that both always tell what has been applied."""

    param_dtype = torch.float32
    fields = FIELDS
    moments = tuple(field.name for field in FIELDS)

    def warm_up(self) -> None:
        """Nothing to compile."""

    def begin(self, param: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        for tensor in state:
            tensor.zero_()

    def edited(self, param: torch.Tensor, state: Sequence[torch.Tensor], changed: torch.Tensor) -> None:
        """Nothing completes the parameter."""

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        grad_scale: torch.Tensor | None,
    ) -> None:
        for piece in pieces:
            span = slice(piece.start, piece.stop)
            assert torch.equal(param[span], state[0][span]), "parameters and state of different updates"
            param[span] += grad[span]
            state[0][span] += grad[span]


@dataclass(frozen=True)
class UnitShape:
    """A unit: its groups in alignment units (negative: frozen), and what it borrows of the units before it."""

    pages: tuple[int, ...]
    borrowed: tuple[int, ...] = ()
    resident: bool = False


def build(shapes: Sequence[UnitShape]) -> tuple[list[Unit], list[FlatGroup]]:
    """The units and their groups; `borrowed` counts groups of the whole model."""
    groups: list[FlatGroup] = []
    units: list[Unit] = []
    for index, shape in enumerate(shapes):
        mine = [groups[number] for number in shape.borrowed]
        for pages in shape.pages:
            weight = nn.Parameter(torch.empty(abs(pages) * SHARD_ALIGN_NUMEL, device="meta"), requires_grad=pages > 0)
            key = f"unit{index}.group{len(groups)}"
            group = FlatGroup(
                len(groups), key, [Owned(key, weight)], shard_dtype=torch.float32, compute_dtype=torch.float32
            )
            groups.append(group)
            mine.append(group)
        for group in mine:
            group.units.add(index)
        units.append(Unit(index, f"unit{index}", nn.Module(), tuple(mine), shape.resident))
    return units, groups


def plan(
    shapes: Sequence[UnitShape], schedule: Schedule, spare_nbytes: int, *, in_chunks: bool = False
) -> tuple[Request, Placement]:
    """A placement with the smallest host budget that holds every group whole, and `spare_nbytes` more.

    Args:
        in_chunks: with the smallest host budget that works, and so much more.
    """
    units, groups = build(shapes)

    def request(host_budget_nbytes: int) -> Request:
        return Request(
            units=units,
            groups=groups,
            fields=FIELDS,
            schedule=schedule,
            schedule_reason="test",
            host_budget_nbytes=host_budget_nbytes,
            device_budget_nbytes=PLENTY,
            nvme_budget_nbytes=None,
            chunk_nbytes=None,
            staging_nbytes=0,
        )

    plenty = make_placement(request(PLENTY))
    smallest = plenty.host_minimum_nbytes if in_chunks else plenty.host_whole_nbytes
    return (chosen := request(smallest + spare_nbytes)), make_placement(chosen)


class PlannedRun:
    """Await `train` and `evaluate`; every use checks the bytes on the device."""

    def __init__(
        self,
        path: Path,
        request: Request,
        placement: Placement,
        store: SimulatedStore,
        compute_s: Callable[[Access], float] = lambda access: 1.0,
    ) -> None:
        self.placement, self.store, self._compute_s = placement, store, compute_s
        self.units, self.groups = request.units, request.groups
        self._stack = ExitStack()
        self.pool = HostPool(placement.host_budget_nbytes)
        self.window = TierBudget("window", placement.window_nbytes)
        self._held = TierBudget("gradients", placement.gradients_nbytes)
        self._transit = TierBudget("transit", placement.transit_nbytes)
        self._pipeline_budget = TierBudget("pipeline", placement.pipeline_nbytes)
        self.gpu = self._stack.enter_context(
            FakeGpu(path / "device", placement.device_minimum_nbytes, h2d_bytes_per_s=1e12)
        )
        self._make_shards()
        self.order = AccessOrder([unit.index for unit in self.units if not unit.resident])
        self.read_ahead = ReadAhead(
            link=LinkPatience(60.0),
            store=store,
            pool=self.pool,
            window=self.window,
            copies=self.copies,
            groups_of_unit=[[group.index for group in unit.groups] for unit in self.units],
            uses=placement.uses,
            updated_after_backward=placement.updated_after_backward(self.groups),
        )
        self.failures: list[BaseException] = []
        self.pipeline = UpdatePipeline(
            link=LinkPatience(60.0),
            store=store,
            pool=self.pool,
            budget=self._pipeline_budget,
            kernel=AddingKernel(),
            worker=self._stack.enter_context(ThreadPoolExecutor(1)),
            read_ahead=self.read_ahead,
            on_failure=self.failures.append,
        )
        self.expected = [0] * len(self.groups)  # the value of every parameter
        self._arrived = [0] * len(self.groups)  # gradients since the last step
        self._gradients: dict[int, GroupGradient] = {}
        self._spills: list[Ticket] = []
        self._updates: list[GroupUpdate] = []
        self._is_last = True  # no other backward comes before the step
        self.step = 0
        self.read_errors = 0

    def _make_shards(self) -> None:
        placement = self.placement
        self.copies = [HostCopy(group, pinned=group.index in placement.pinned_params) for group in self.groups]
        self.states: dict[int, GroupState] = {}
        for group, copy in zip(self.groups, self.copies, strict=True):
            copy.keep_at_turn = group.index in placement.keep_at_turn
            copy.keep_at_boundary = group.index in placement.keep_at_boundary
            if copy.pinned:
                lease = self.pool.lease(group.shard_nbytes, group.key)
                lease.memory[:] = bytes(group.shard_nbytes)
                copy.begin_read(HostBlock(lease), Ticket.completed())
                copy.landed()
            else:
                self.store.create(group.key, group.shard_nbytes)
            if group.trainable:
                self.states[group.index] = GroupState.build(group, placement.chunk_numel, FIELDS)
                for record in self.states[group.index].records:
                    if placement.pins_state(group.index, record.chunk.index):
                        record.lease = self.pool.lease(record.nbytes, record.key)
                    else:
                        self.store.create(record.key, record.nbytes)
                self.store.create(gradient_key(group), gradient_nbytes(group))

    # Iterations ------------------------------------------------------------------------------------------------

    async def train(self, micro_batches: int = 1, order: Sequence[int] | None = None) -> None:
        """One optimizer step; `order`: which streamed units run in it."""
        units = self.streamed if order is None else [self.units[index] for index in order]
        for number in range(micro_batches):
            self._begin(Mode.TRAIN)
            self._is_last = number == micro_batches - 1
            for unit in units:
                await self._use(unit, Phase.FORWARD)
            for unit in reversed(units):
                await self._use(unit, Phase.BACKWARD)
                for group in unit.groups:
                    if group.trainable and len(group.units) == 1:
                        await self._complete(group)
            ran = {unit.index for unit in self.units if unit.resident or unit in units}
            for group in self.groups:
                is_resident = any(self.units[index].resident for index in group.units)
                if group.trainable and ran & group.units and (is_resident or len(group.units) > 1):
                    await self._complete(group)
        left = self.placement.updated_in_forward
        later = [update for update in self._updates if update.state.group.index in left]
        if self.placement.schedule is not Schedule.OVERLAPPED:
            self.read_ahead.force()
            for ticket in [*(update.computed for update in self._updates), *self._spills]:
                await ticket
            self._spills.clear()
            for index in sorted(self._gradients):
                update = self._make_update(self.groups[index])
                is_resident = any(self.units[unit].resident for unit in self.groups[index].units)
                if self.placement.schedule is Schedule.DEFERRED and not is_resident:
                    later.append(update)
                else:
                    self.pipeline.submit([update])
            self.pipeline.defer(later)
        self.step += 1
        self.read_ahead.step_submitted(self.step)
        for update in self._updates:
            if update not in later:
                await update.computed
        self._updates = [update for update in self._updates if not update.written.done]

    async def evaluate(self) -> None:
        """One forward without a backward."""
        self._begin(Mode.EVAL)
        for unit in self.streamed:
            await self._use(unit, Phase.FORWARD)

    @property
    def streamed(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.resident]

    def _begin(self, mode: Mode) -> None:
        self.order.begin(mode)
        self.read_ahead.begin(mode, *self.order.upcoming())

    async def _use(self, unit: Unit, phase: Phase) -> None:
        """Gather, compute, release. A read that fails is tried again a few times, as a user would."""
        regions = [await self._gather_again(group, phase) for group in unit.groups]
        access = Access(phase, unit.index)
        self.order.record(access)
        self.read_ahead.moved(self.order.mode, *self.order.upcoming())
        await asyncio.sleep(self._compute_s(access))
        for group, region in zip(unit.groups, regions, strict=True):
            values = torch.frombuffer(bytearray(self.gpu.read(region)), dtype=torch.float32)
            assert bool((values == self.expected[group.index]).all()), f"stale bytes of {group.key}"
            self.gpu.free(region)

    async def _gather_again(self, group: FlatGroup, phase: Phase) -> FakeRegion:
        for _ in range(_TRIES):
            try:
                return await self._gather(group, phase)
            except ReadError:
                self.read_errors += 1
        return await self._gather(group, phase)

    async def _gather(self, group: FlatGroup, phase: Phase) -> FakeRegion:
        copy = self.copies[group.index]
        if not copy.update.done:
            self.read_ahead.want(group.index)
            await copy.update
        if not copy.claim():
            await self.read_ahead.demand(group.index)
        try:
            if copy.state is CopyState.READING:
                await copy.ticket
            region = self.gpu.allocate(group.shard_nbytes, group.key)
            await self.gpu.upload_async(region, copy.memory, group.key)
        finally:
            self.read_ahead.consumed(group.index, phase)
        return region

    # Gradients and updates -------------------------------------------------------------------------------------

    async def _complete(self, group: FlatGroup) -> None:
        """The gradient of one backward arrives: all ones."""
        gradient = self._gradients.setdefault(group.index, GroupGradient(group, self.store))  # type: ignore[arg-type]
        is_placed_on_nvme = group.index in self.placement.spilled_gradients
        if gradient.block is None:
            if is_placed_on_nvme:
                self._make_room(gradient_nbytes(group))
            budget = self._transit if is_placed_on_nvme else self._held
            reservation = budget.request(gradient_nbytes(group), gradient_key(group))
            await reservation
            gradient.block = HostBlock.take(self.pool, reservation, gradient_key(group))
            if gradient.is_spilled:
                await gradient.submit_read_back(self.step, priority=0)  # type: ignore[arg-type]
            else:
                gradient.tensor.zero_()
        gradient.tensor.add_(1)
        self._arrived[group.index] += 1
        if group.index in self.placement.lasting_gradients and self._is_last:
            gradient.is_spilled = False
        elif is_placed_on_nvme:
            self._spill(gradient)
        elif self.placement.schedule is Schedule.OVERLAPPED:
            update = self._make_update(group)
            is_left = group.index in self.placement.updated_in_forward
            (self.pipeline.defer if is_left else self.pipeline.submit)([update])

    def _make_room(self, nbytes: int) -> None:
        """In transit, where no write that is over gives it."""
        waiting = [self._gradients[index] for index in self.placement.lasting_gradients & self._gradients.keys()]
        waiting = [gradient for gradient in waiting if gradient.block is not None]
        if sum(gradient_nbytes(each.group) for each in waiting) + nbytes > self._transit.limit_nbytes:
            for gradient in waiting:
                self._spill(gradient)

    def _spill(self, gradient: GroupGradient) -> None:
        block, gradient.block = gradient.block, None
        assert block is not None
        key = gradient_key(gradient.group)
        ticket = self.store.submit_write(key, block.memory, tag=TrafficTag("grad", self.step))
        gradient.is_spilled = True
        ticket.add_done_callback(lambda _: block.release())
        self._spills.append(ticket)

    def _make_update(self, group: FlatGroup) -> GroupUpdate:
        self.expected[group.index] += self._arrived[group.index]
        self._arrived[group.index] = 0
        gradient = self._gradients.pop(group.index)
        update = GroupUpdate.make(
            self.states[group.index], self.copies[group.index], gradient, [HYPER], [None], self.step
        )
        update.copy.update = update.computed
        self._updates.append(update)
        return update

    # End -------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is in flight any more."""
        self.read_ahead.force()
        self.read_ahead.stop()
        await asyncio.sleep(0)
        await self.pipeline.drain()
        for copy in self.copies:
            with suppress(IoError):
                await copy.ticket
        with suppress(IoError):
            await Ticket.all_of(self._spills)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Settle, and check that nothing is held that was not placed in memory for good."""
        await self.settle()
        for gradient in self._gradients.values():
            gradient.release()
        kept = [copy for copy in self.copies if not copy.pinned and copy.block is not None]
        assert self.window.used_nbytes == sum(copy.group.shard_nbytes for copy in kept)
        assert all(copy.state is CopyState.CLEAN or copy.lost_update is not None for copy in kept)
        for copy in self.copies:
            copy.discard()
        for state in self.states.values():
            for record in state.records:
                if record.lease is not None:
                    record.lease.release()
        self._stack.close()
        budgets = (self.window, self._held, self._transit, self._pipeline_budget)
        assert [budget.used_nbytes for budget in budgets] == [0] * 4, [budget.holders() for budget in budgets]
        assert self.pool.leased_nbytes == 0, self.pool.holders()
        assert self.store.in_flight == 0
        self.pool.close()

    def moved_nbytes(self, op: Op, kind: str, step: int) -> int:
        return sum(t.nbytes for t in self.store.log if (t.op, t.tag.kind, t.tag.step) == (op, kind, step))
