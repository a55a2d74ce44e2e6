"""The parts of a simulated rank: the engine's policies over virtual memory, drives, links and threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from infinity.errors import InfinityError
from infinity.gradients import GRAD_DTYPE
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.link import LinkPatience
from infinity.optim.hyper import Piece, StateField
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import AccessOrder
from infinity.placement import Placement
from infinity.plan.bounds import element_s, moved_nbytes, scenario_traffic
from infinity.plan.scenario import Scenario
from infinity.plan.simulated_drives import SimulatedDrives
from infinity.plan.timeline import Span
from infinity.plan.virtual import Link, PlanLoop, SparseMemory, VirtualFence, VirtualWorker
from infinity.readahead import ReadAhead
from infinity.residency import HostCopy
from infinity.swap_keys import swap_keys
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Op, Ticket

_UNLIMITED_NBYTES = 1 << 62


class _Kernel:
    """Implements `infinity.optim.hyper.Kernel`: takes its time and touches nothing."""

    def __init__(self, loop: PlanLoop, scenario: Scenario) -> None:
        self.param_dtype = next((g.shard_dtype for g in scenario.groups if g.trainable), torch.float32)
        self.fields = scenario.fields
        self.moments = ()
        self.completes_master = self.param_dtype is not torch.float32
        self._loop = loop
        self._element_s = element_s(scenario)

    def warm_up(self) -> None:
        """Nothing to compile."""

    def decode(self, name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Nobody looks at the moments of a simulation."""
        return state[name]

    def encode(self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Nobody replaces them either."""

    def begin(self, param: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        """The memory is made up."""

    def edited(self, param: torch.Tensor, state: Sequence[torch.Tensor], changed: torch.Tensor) -> None:
        """Nobody edits parameters in a simulation."""

    def update(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        grad_scale: torch.Tensor | None,
    ) -> None:
        numel = sum(piece.stop - piece.start for piece in pieces)
        self._loop.charge(numel * self._element_s)


class Machinery:
    """Made on the loop of its simulation; `close()` gives everything back."""

    def __init__(self, scenario: Scenario) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, PlanLoop):
            raise InfinityError("a simulation runs on a PlanLoop")
        self.loop = loop
        self._scenario = scenario = scenario.coarse()
        placement, speeds = scenario.placement, scenario.speeds
        self.speeds = speeds  # with what coarse chunks stand for
        self.chunk_numel = placement.chunk_numel  # of the coarse ones
        self.pool = HostPool(_UNLIMITED_NBYTES, map_memory=SparseMemory().map)
        self.window = TierBudget("window", placement.window_nbytes)
        self.gradients = TierBudget("gradients", placement.gradients_nbytes)
        self.transit = TierBudget("transit", placement.transit_nbytes)
        self.passage = TierBudget("passage", placement.passage_nbytes)
        self._pipeline_budget = TierBudget("pipeline", placement.pipeline_nbytes)
        self.device = TierBudget("device", placement.device_budget_nbytes)
        self.h2d = Link(loop, speeds.h2d_bytes_per_s)
        self.d2h = Link(loop, speeds.d2h_bytes_per_s)
        self._gathers = _link(loop, speeds.gather_bytes_per_s, speeds.collective_s)
        self._reductions = _link(loop, speeds.reduce_bytes_per_s, speeds.collective_s)
        self.completed = VirtualFence(loop, 0.0)
        self.resident = {g.index for unit in scenario.units if unit.resident for g in unit.groups}
        self._hold_resident()
        self.copies = [self._copy(group, placement) for group in scenario.groups]
        self.states = {g.index: self._state(g, placement, scenario.fields) for g in scenario.groups if g.trainable}
        self.store = self._store()
        self.worker = VirtualWorker()
        self.order = AccessOrder([unit.index for unit in scenario.streamed])
        self._failures: list[BaseException] = []
        self._connect(placement)

    def _connect(self, placement: Placement) -> None:
        scenario = self._scenario
        self.read_ahead = ReadAhead(
            store=self.store,
            pool=self.pool,
            window=self.window,
            copies=self.copies,
            groups_of_unit=[[group.index for group in unit.groups] for unit in scenario.units],
            uses=placement.uses,
            updated_after_backward=placement.updated_after_backward(scenario.groups),
            link=LinkPatience(math.inf),
        )
        self.pipeline = UpdatePipeline(
            store=self.store,
            pool=self.pool,
            budget=self._pipeline_budget,
            kernel=_Kernel(self.loop, scenario),
            worker=self.worker,
            read_ahead=self.read_ahead,
            on_failure=self._failures.append,
            link=LinkPatience(math.inf),
        )

    def _store(self) -> SimulatedDrives:
        scenario = self._scenario
        keys = swap_keys(scenario.groups, self.states, scenario.placement)
        return SimulatedDrives(
            scenario.drives,
            [(entry.key, entry.nbytes) for entry in keys],
            moved_nbytes=moved_nbytes(scenario_traffic(scenario)),
            keep_log=True,
            hand_over_s=scenario.speeds.hand_over_s,
        )

    def _hold_resident(self) -> None:
        for group in (self._scenario.groups[index] for index in sorted(self.resident)):
            if self.device.try_reserve(group.flat_nbytes, group.key) is None:
                raise InfinityError(f"the device cannot hold {group.key}: {self.device.holders()}")

    def _copy(self, group: FlatGroup, placement: Placement) -> HostCopy:
        is_stored = placement.stores_param(group.index)
        copy = HostCopy(group, pinned=group.index in placement.pinned_params, is_stored=is_stored)
        copy.is_chunked = group.index in placement.chunked
        copy.keep_at_turn = group.index in placement.keep_at_turn
        copy.keep_at_boundary = group.index in placement.keep_at_boundary
        if copy.pinned:
            copy.begin_read(HostBlock(self.pool.lease(group.shard_nbytes, group.key)), Ticket.completed())
            copy.landed()
        return copy

    def _state(self, group: FlatGroup, placement: Placement, fields: tuple[StateField, ...]) -> GroupState:
        state = GroupState.build(group, placement.chunk_numel, fields)
        for record in state.records:
            record.is_initialised = True  # the step that is asked about is not the first
            record.is_durable = placement.is_durable
            if placement.pins_state(group.index, record.chunk.index):
                record.lease = self.pool.lease(record.nbytes, record.key)
        return state

    # Copies ----------------------------------------------------------------------------------------------------

    def upload(self, group: FlatGroup) -> VirtualFence:
        """Start the upload of a shard and, with several ranks, its gathering."""
        return self.gather(group, self.h2d.copy(group.key, group.shard_nbytes))

    def gather(self, group: FlatGroup, uploaded: VirtualFence) -> VirtualFence:
        """Start the gathering of a group between ranks, whose shard is on its way to the device."""
        if self._gathers is None:
            return uploaded
        return self._gathers.copy(group.key, group.flat_nbytes, not_before_s=uploaded.ready_s)

    def reduce(self, group: FlatGroup) -> VirtualFence:
        """Start the reduction of a gradient between ranks."""
        return self.completed if self._reductions is None else self._reductions.copy(group.key, group.flat_nbytes)

    def download(self, group: FlatGroup) -> VirtualFence:
        """Start the reduction of a gradient between ranks, and its way to the host."""
        nbytes = group.layout.numel * GRAD_DTYPE.itemsize
        return self.d2h.copy(group.key, nbytes, not_before_s=self.reduce(group).ready_s)

    def copy_s(self, group: FlatGroup) -> float:
        """Seconds of an upload that the training thread makes itself."""
        return group.shard_nbytes / self._scenario.speeds.h2d_bytes_per_s

    def gradient_copy_s(self, group: FlatGroup) -> float:
        """The same of a gradient's download."""
        return group.layout.numel * GRAD_DTYPE.itemsize / self._scenario.speeds.d2h_bytes_per_s

    # Looking ---------------------------------------------------------------------------------------------------

    @property
    def budgets(self) -> list[TierBudget]:
        """All budgets that a run is held to, of host and device."""
        return [self.window, self.gradients, self.transit, self.passage, self._pipeline_budget, self.device]

    def transferred_s(self) -> float:
        """What computing would have lost to all transfers so far, had they all ended beside it."""
        return self.speeds.contention.transfers_s(self.store.n_moved, self.store.moved_nbytes)

    def busy_s(self) -> dict[str, list[float]]:
        """Seconds every resource has worked so far; of drives, each of them."""
        busy = {f"drive {op.value}": [server.busy_s[op] for server in self.store.servers] for op in Op}
        busy["optimizer"] = [sum(end - start for start, end in self.worker.spans)]
        for name, link in self._links():
            busy[name] = [sum(end - start for _, start, end in link.spans)]
        return busy

    def _links(self) -> Iterator[tuple[str, Link]]:
        named = (("h2d", self.h2d), ("d2h", self.d2h), ("all-gather", self._gathers), ("reduce", self._reductions))
        return ((name, link) for name, link in named if link is not None)

    def spans(self, since_s: float) -> Iterator[Span]:
        """What drives, links and the optimizer did and had not ended at `since_s`."""
        for transfer in self.store.log:
            if transfer.end_s > since_s:
                lane = f"nvme {transfer.op.value}"
                yield Span(lane, f"{transfer.tag.kind} {transfer.key}", transfer.submitted_s, transfer.end_s)
        for name, link in self._links():
            for label, start_s, end_s in link.spans:
                if end_s > since_s:
                    yield Span(name, label, start_s, end_s)
        for start_s, end_s in self.worker.spans:
            if end_s > since_s:
                yield Span("optimizer", "update", start_s, end_s)

    # End -------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is in flight any more.

        Raises:
            InfinityError: an update failed.
        """
        self.read_ahead.force()
        self.read_ahead.stop()
        await asyncio.sleep(0)
        await self.pipeline.drain()
        for copy in self.copies:
            await copy.ticket
        await asyncio.sleep(0)
        if self._failures:
            raise InfinityError("a simulated update failed") from self._failures[0]

    def close(self) -> None:
        """Give the virtual memory back."""
        for copy in self.copies:
            copy.discard()
        for state in self.states.values():
            for record in state.records:
                if record.lease is not None:
                    record.lease.release()
        self.pool.close()


def _link(loop: PlanLoop, bytes_per_s: float | None, latency_s: float) -> Link | None:
    return Link(loop, bytes_per_s, latency_s) if bytes_per_s is not None else None
