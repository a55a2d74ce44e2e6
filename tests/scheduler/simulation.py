"""A training thread made of coroutines, around the real read-ahead scheduler and update pipeline.

Every parameter of a group is a number that counts the updates it has had, so a stale read shows as a wrong number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from infinity.gradients import GroupGradient, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.link import LinkPatience
from infinity.optim.group_update import GroupUpdate
from infinity.optim.hyper import AdamWHyper, Piece, StateField
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import Access, AccessOrder, Mode, Phase
from infinity.readahead import ReadAhead
from infinity.residency import CopyState, HostCopy
from infinity.testing import FakeGpu, SimulatedStore
from infinity.units import Owned
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Op

HYPER = AdamWHyper(0.1, 0.9, 0.999, 1e-8, 0.0)


class CountingKernel:
    """Adds one to every parameter and to its state."""

    param_dtype = torch.float32
    fields = (StateField("count", torch.float32),)
    moments = ("count",)

    def __init__(self, on_compute: Callable[[], None]) -> None:
        self._on_compute = on_compute

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
        self._on_compute()
        for piece in pieces:
            param[piece.start : piece.stop] += 1
            state[0][piece.start : piece.stop] += 1


def make_groups(pages: Sequence[int], *, trainable: bool = True) -> list[FlatGroup]:
    """One group per unit, of as many alignment units as asked for."""
    groups = []
    for index, count in enumerate(pages):
        weight = nn.Parameter(torch.empty(count * SHARD_ALIGN_NUMEL, device="meta"), requires_grad=trainable)
        owned = [Owned(f"unit{index}.weight", weight)]
        groups.append(FlatGroup(index, f"unit{index}", owned, shard_dtype=torch.float32, compute_dtype=torch.float32))
    return groups


@dataclass
class Uploaded:
    """One use of a unit: when its bytes were on the device and when its computation ended."""

    access: Access
    ready_s: float
    end_s: float


@dataclass
class Simulation:
    """Give it sizes and timings, then await `train_step` as often as you like."""

    path: Path
    pages: Sequence[int]
    window_nbytes: int
    overlapped: bool = True
    keep_at_turn: Sequence[int] = ()
    keep_at_boundary: Sequence[int] = ()
    pipeline_chunks: int = 3
    chunk_numel: int = SHARD_ALIGN_NUMEL
    compute_s: Callable[[Access], float] = lambda access: 1.0
    store: SimulatedStore = field(default_factory=SimulatedStore)
    device_nbytes: int | None = None
    pipeline_nbytes: int | None = None  # instead of `pipeline_chunks`
    on_compute: Callable[[], None] = lambda: None  # called in every kernel, on the optimizer worker

    def __post_init__(self) -> None:
        self.groups = make_groups(self.pages)
        self.copies = [HostCopy(group, pinned=False) for group in self.groups]
        for copy in self.copies:
            copy.keep_at_turn = copy.group.index in self.keep_at_turn
            copy.keep_at_boundary = copy.group.index in self.keep_at_boundary
        kernel = CountingKernel(self.on_compute)
        self.states = [GroupState.build(group, self.chunk_numel, kernel.fields) for group in self.groups]
        for group, state in zip(self.groups, self.states, strict=True):
            self.store.create(group.key, group.shard_nbytes)
            for record in state.records:
                self.store.create(record.key, record.nbytes)
        chunk_nbytes = self.chunk_numel * (4 + 4)
        self.window = TierBudget("window", self.window_nbytes)
        self.pipeline_budget = TierBudget("pipeline", self.pipeline_nbytes or self.pipeline_chunks * chunk_nbytes)
        gradients = sum(gradient_nbytes(group) for group in self.groups)
        # A gradient may arrive before the one of the step before has been written behind and given back.
        self.pool = HostPool(self.window_nbytes + self.pipeline_budget.limit_nbytes + 4 * gradients)
        largest = max(group.shard_nbytes for group in self.groups)
        self.gpu = FakeGpu(
            self.path / "device", self.device_nbytes or largest, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12
        )
        self.order = AccessOrder(range(len(self.groups)))
        self.read_ahead = ReadAhead(
            link=LinkPatience(60.0),
            store=self.store,
            pool=self.pool,
            window=self.window,
            copies=self.copies,
            groups_of_unit=[[group.index] for group in self.groups],
            uses={group.index: 1 for group in self.groups},
            updated_after_backward={group.index for group in self.groups} if self.overlapped else (),
        )
        self._stack = ExitStack()
        worker = self._stack.enter_context(ThreadPoolExecutor(1))
        self._stack.enter_context(self.gpu)
        self.failures: list[BaseException] = []
        self.pipeline = UpdatePipeline(
            link=LinkPatience(60.0),
            store=self.store,
            pool=self.pool,
            budget=self.pipeline_budget,
            kernel=kernel,
            worker=worker,
            read_ahead=self.read_ahead,
            on_failure=self.failures.append,
        )
        self.updates: list[GroupUpdate] = []
        self.uses: list[Uploaded] = []
        self.versions = [0] * len(self.groups)
        self.step = 0

    def begin(self, mode: Mode = Mode.TRAIN) -> None:
        self.order.begin(mode)
        self.read_ahead.begin(mode, *self.order.upcoming())

    async def use(self, unit: int, phase: Phase) -> None:
        """Gather a unit, compute with it, release it; its bytes have to be the newest ones."""
        copy = self.copies[unit]
        if not copy.update.done:
            await copy.update
        if not copy.claim():
            await self.read_ahead.demand(unit)
        try:
            if copy.state is CopyState.READING:
                await copy.ticket
            region = self.gpu.allocate(copy.group.shard_nbytes, copy.group.key)
            await self.gpu.upload_async(region, copy.memory, copy.group.key)
        finally:
            self.read_ahead.consumed(unit, phase)
        access = Access(phase, unit)
        self.order.record(access)
        self.read_ahead.moved(self.order.mode, *self.order.upcoming())
        loop = asyncio.get_running_loop()
        ready_s = loop.time()
        await asyncio.sleep(self.compute_s(access))
        values = torch.frombuffer(bytearray(self.gpu.read(region)), dtype=torch.float32)
        slot = copy.group.layout.slots[0]
        assert bool((values[slot.offset : slot.stop] == self.versions[unit]).all()), f"stale bytes of unit {unit}"
        self.gpu.free(region)
        self.uses.append(Uploaded(access, ready_s, loop.time()))

    def submit_update(self, unit: int) -> GroupUpdate:
        group = self.groups[unit]
        gradient = GroupGradient(group, None)
        gradient.block = HostBlock(self.pool.lease(gradient_nbytes(group), f"gradient {unit}"))
        self.versions[unit] += 1
        update = GroupUpdate.make(self.states[unit], self.copies[unit], gradient, [HYPER], [None], self.step)
        self.copies[unit].update = update.computed
        self.updates.append(update)
        self.pipeline.submit([update])
        return update

    async def train_step(self, forward: Sequence[int] | None = None) -> None:
        """One forward, one backward, one optimizer step."""
        units = list(forward if forward is not None else range(len(self.groups)))
        self.begin()
        for unit in units:
            await self.use(unit, Phase.FORWARD)
        for unit in reversed(units):
            await self.use(unit, Phase.BACKWARD)
            if self.overlapped:
                self.submit_update(unit)
        if not self.overlapped:
            for unit in sorted(set(units)):
                self.submit_update(unit)
        self.step += 1
        self.read_ahead.step_submitted(self.step)
        for update in self.updates:
            await update.computed

    async def settle(self) -> None:
        """Wait until nothing is in flight any more, and give everything back."""
        self.read_ahead.stop()
        await self.pipeline.drain()
        for copy in self.copies:
            if not copy.ticket.done:
                await copy.ticket
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.settle()
        for copy in self.copies:
            copy.discard()
        self._stack.close()
        assert self.pool.leased_nbytes == 0, self.pool.holders()
        assert self.window.used_nbytes == 0, self.window.holders()
        assert self.pipeline_budget.used_nbytes == 0
        assert self.store.in_flight == 0

    def read_nbytes(self, step: int, kind: str = "param") -> int:
        return sum(t.nbytes for t in self.store.log if t.op is Op.READ and t.tag.kind == kind and t.tag.step == step)
