"""Optimizer state in the tiers for parameters that stay where they are, in the hands of the user or of FSDP.

    parameters, gradients: the user's        state: host memory and swap files, within `host.budget`

A step goes through the state chunk by chunk. While one chunk is updated the next ones are read and those before are
written; and what a step will need first is read behind the forward and backward before it.

[Note: one rank is enough] Every rank updates its own shards with its own state, so nothing here waits for other ranks.
What does (clipping, looking for overflows) is a call of all ranks by its nature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from infinity.bridge.parameters import LocalParameter, any_rank_has, local_parameters
from infinity.bridge.plan import SectionSizes, StatePlan, plan_state
from infinity.bridge.section import Section, SectionUpdate, make_sections
from infinity.bridge.stream import Passage, RecordStream
from infinity.checkpoint.moments import SlotState, SlotStates
from infinity.config import Config, OptimizerKind
from infinity.errors import ConfigError, InfinityError, IterationError
from infinity.local_share import host_budget_nbytes, told_local_size
from infinity.meshes import local_of
from infinity.observe.counters import stall_counters, store_counters
from infinity.observe.stalls import StallClock
from infinity.observe.trace import Trace
from infinity.optim.hyper import Hyper
from infinity.optim.kernel_threads import KernelThreads
from infinity.sizes import format_nbytes
from infinity.swap_directories import check_directories, swap_directories
from infinity.swap_files import open_log, speeds_to_start_with, storage_options, traced
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.space import DriveReport
from storage.store import ShardStore

_USED = ("host", "nvme", "chunk", "optimizer_threads")
_STATE_DICT_STEP = -2  # the step that traffic of state_dict() and load_state_dict() belongs to


class StateTier:
    """Keeps the state of one optimizer's parameters and updates them. Used by the training thread.

    Args:
        param_groups: of the optimizer, all of them.
        kind: which state it needs.
        config: `host`, `nvme`, `chunk` and `optimizer_threads` of it.

    Raises:
        ConfigError: a setting that only an offloaded model has.
        PlacementError: the host budget is too small.
        UnsupportedModelError: a parameter that no kernel updates.
        StorageError: the swap files cannot be made; nothing is left behind.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], kind: OptimizerKind, config: Config) -> None:
        _refuse_settings(config)
        self.parameters: list[LocalParameter] = local_parameters(param_groups)
        self.last_grad_norm: torch.Tensor | None = None
        self._config = config
        self._torn: str | None = None
        self._is_closed = False
        self._step = 0
        self._chunks_done = 0
        self.trace = Trace()
        with ExitStack() as stack:
            threads = KernelThreads(config.optimizer_threads)
            stack.callback(threads.close)
            self.sections, self.places = make_sections(self.parameters, kind, threads)
            self._allocate(stack)
            for section in self.sections:
                section.kernel.warm_up()
            self._closing = stack.pop_all()

    def _allocate(self, stack: ExitStack) -> None:
        local_size = told_local_size() or 1
        host_nbytes = host_budget_nbytes(self._config, local_size)
        sizes = [
            SectionSizes(
                section.layout,
                sum(f.dtype.itemsize for f in section.kernel.fields),
                section.kernel.param_dtype.itemsize if section.copies_param else 0,
            )
            for section in self.sections
        ]
        self.plan = plan = plan_state(sizes, host_nbytes, self._config.chunk, local_size)
        for section in self.sections:
            section.cut(plan.chunk_numel)
        self.pool = HostPool(host_nbytes)
        stack.callback(self.pool.close)
        self.budget = TierBudget("chunks in transit", plan.transit_nbytes)
        self.store = _open_store(self._config, plan, local_size, self.trace, stack)
        timeout_s = self._config.nvme.io_timeout_s
        self.stalls = StallClock(timeout_s, self._progress, self.report, on_stall=self.trace.add_stall)
        self._stream = RecordStream(self.store, self.pool, self.budget, self.stalls)
        for section, count in zip(self.sections, plan.kept, strict=True):
            for number, record in enumerate(section.records):
                if not record.nbytes:
                    continue
                if number < count:
                    record.lease = self.pool.lease(record.nbytes, record.key)
                elif self.store is not None:
                    self.store.create(record.key, record.nbytes)

    # Training --------------------------------------------------------------------------------------------------

    def step(self, hypers: Sequence[Hyper], max_grad_norm: float | None) -> None:
        """Update every parameter that has a gradient.

        Args:
            hypers: of every parameter, in the order of the parameter groups.

        Raises:
            IterationError: an earlier step was lost half-way.
            StorageError: a transfer failed or is stuck; the step is lost.
        """
        self._check_usable()
        if max_grad_norm is not None:
            total = torch.nn.utils.clip_grad_norm_([p.parameter for p in self.parameters], max_grad_norm)
            self.last_grad_norm = _whole(total)
        by_section: list[list[Hyper]] = [[] for _ in self.sections]
        for (index, _), hyper in zip(self.places, hypers, strict=True):
            by_section[index].append(hyper)
        updates = [SectionUpdate(*both) for both in zip(self.sections, by_section, strict=True)]
        passages = self._passages(updates)
        owner = {passage.record.key: update for update, own in passages for passage in own}
        self._torn = f"step {self._step} was interrupted"
        try:
            for update in updates:
                update.begin()
            with self.trace.phase(str(self._step), "step"):
                for buffer in self._stream.pass_through([one for _, own in passages for one in own], self._step):
                    key = buffer.passage.record.key
                    with self.trace.phase(key, "optimizer"):
                        owner[key].compute(buffer)
                    self._chunks_done += 1
        except BaseException as error:
            self._torn = f"step {self._step} was lost half-way ({type(error).__name__}: {error})"
            raise
        self._torn = None
        for update in updates:
            update.finish()
        self._step += 1
        self.read_ahead()

    def read_ahead(self) -> None:
        """Start to read what the next step needs first, as far as there is room."""
        if not self._is_closed and self._torn is None:
            passages = [section.passage(record) for section in self.sections for record in section.records]
            self._stream.read_ahead([p for p in passages if p.has_state and p.record.is_initialised], self._step)

    def unscale(self, inverse: float) -> bool:
        """Multiply all gradients by `inverse`; whether one is infinite or NaN, on any rank."""
        self._check_usable()
        grads = [local_of(p.parameter.grad) for p in self.parameters if p.parameter.grad is not None]
        for grad in grads:
            grad.mul_(inverse)
        return any_rank_has(not all(bool(grad.isfinite().all()) for grad in grads), self.parameters)

    # State as tensors ------------------------------------------------------------------------------------------

    def read_optimizer_state(self) -> SlotStates:
        """Copies of all moments, by section and slot, of this rank's parts of the parameters.

        Raises:
            IterationError: a step was lost half-way.
        """
        self._check_usable()
        found: SlotStates = {}
        for section in self.sections:
            for number, (slot, step) in enumerate(zip(section.layout.slots, section.steps, strict=True)):
                if step:
                    moments = {name: torch.empty(slot.shape) for name in section.kernel.moments}
                    found[section.index, number] = SlotState(step, moments)
        self._stream.drain()
        for section in self.sections:
            self._copy_out(section, found)
        return found

    def write_optimizer_state(self, states: SlotStates) -> None:
        """Replace all moments and step counts; what `states` leaves out starts as new. A lost step is forgotten."""
        self._check_open()
        self._stream.reset()
        self._torn = "replacing the optimizer's state was interrupted"
        for section in self.sections:
            section.steps[:] = [
                states[section.index, slot].step if (section.index, slot) in states else 0
                for slot in range(len(section.parameters))
            ]
            for record in section.records:
                record.is_initialised = False
            wanted = section.wanted([slot for slot, step in enumerate(section.steps) if step])
            for buffer in self._stream.pass_through(wanted, _STATE_DICT_STEP):
                _copy_in(section, states, buffer.passage, buffer.state)
        self._stream.drain()
        self._torn = None
        self.read_ahead()

    def localized(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A `state_dict()` with this rank's parts in place of DTensors.

        Raises:
            ConfigError: one is sharded differently from its parameter.
        """
        numbers = [n for group in state_dict.get("param_groups", ()) for n in group.get("params", ())]
        by_number = dict(zip(numbers, self.parameters, strict=False))
        state = {
            number: {
                name: by_number[number].unwrap(value) if isinstance(value, torch.Tensor) and name != "step" else value
                for name, value in saved.items()
            }
            for number, saved in state_dict.get("state", {}).items()
            if number in by_number
        }
        return {**state_dict, "state": state}

    def _copy_out(self, section: Section, found: SlotStates) -> None:
        names = [field.name for field in section.kernel.fields]
        for record in section.records:
            if not record.is_initialised:
                continue
            buffer = self._stream.look_at(section.passage(record), _STATE_DICT_STEP)
            state = dict(zip(names, buffer.state, strict=True))
            for piece in record.chunk.pieces:
                there = found.get((section.index, piece.slot))
                if there is not None:
                    start = record.chunk.start + piece.start - section.layout.slots[piece.slot].offset
                    for name, tensor in there.moments.items():
                        part = state[name][piece.start : piece.stop]
                        tensor.view(-1)[start : start + part.numel()].copy_(part)
            self._stream.put_back(buffer)

    # Looking inside, and ends ----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """All counters as one flat dictionary, after everything under way has landed. Bytes end in `_bytes`."""
        self._check_open()
        self._stream.drain()
        return self.counters()

    def counters(self) -> dict[str, float]:
        """The same as they stand now: waits for nothing, so it can be read after every step."""
        self._check_open()
        flat: dict[str, float] = {"step": self._step, "optimizer/chunks": self._chunks_done}
        flat["host/budget_bytes"] = self.pool.capacity_nbytes
        flat["host/held_bytes"], flat["host/peak_bytes"] = self.pool.leased_nbytes, self.pool.peak_nbytes
        flat["host/kept_bytes"] = self.plan.kept_nbytes
        flat |= store_counters(self.store)
        flat["nvme/capacity_bytes"] = self.plan.nvme_nbytes
        flat["readahead/reads_ahead"] = self._stream.reads_ahead
        flat["readahead/reads_on_demand"] = self._stream.reads_on_demand
        return flat | stall_counters(self.stalls)

    @property
    def is_closed(self) -> bool:
        """Whether `close()` has been called: the optimizer state is gone."""
        return self._is_closed

    @property
    def config(self) -> Config:
        """What the optimizer was given."""
        return self._config

    @property
    def drives(self) -> list[DriveReport]:
        """What each drive with swap files has done and holds; none without any."""
        return self.store.drive_report() if self.store is not None else []

    @property
    def parameters_numel(self) -> int:
        """Elements of this rank's parts of the parameters that train."""
        return sum(parameter.values().numel() for parameter in self.parameters if parameter.trains)

    @property
    def state_nbytes(self) -> int:
        """Bytes of their state, in host memory and in swap files."""
        return self.plan.kept_nbytes + self.plan.nvme_nbytes

    def report(self) -> str:
        """What is in flight and who holds memory, for error messages."""
        held = ", ".join(f"{who} {nbytes}" for who, nbytes in self.pool.holders().items()) or "nothing"
        lines = [f"host memory: {self.pool.leased_nbytes} of {self.pool.capacity_nbytes} bytes held: {held}"]
        lines += self.store.describe_in_flight() if self.store is not None else []
        return "\n".join(lines)

    def describe(self) -> str:
        """Where the state lies, in a line."""
        kept, there = format_nbytes(self.plan.kept_nbytes), format_nbytes(self.plan.nvme_nbytes)
        return f"optimizer state: {kept} in host memory, {there} in swap files, chunks of {self.plan.chunk_numel}"

    def close(self) -> None:
        """Remove the swap files and give threads and memory back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.store is not None:
            self.store.close()  # first: nothing may be moving when the buffers go
        self._stream.release()
        for section in self.sections:
            for record in section.records:
                if record.lease is not None:
                    record.lease.release()
                    record.lease = None
        self._closing.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _passages(self, updates: Sequence[SectionUpdate]) -> list[tuple[SectionUpdate, list[Passage]]]:
        return [(update, update.section.wanted(update.slots)) for update in updates]

    def _progress(self) -> int:
        return (self.store.progress if self.store is not None else 0) + self._chunks_done

    def _check_open(self) -> None:
        if self._is_closed:
            raise InfinityError("this optimizer is closed; its state is gone")

    def _check_usable(self) -> None:
        self._check_open()
        if self._torn is not None:
            raise IterationError(
                f"{self._torn}; some parameters are updated and others are not. Load the model and the optimizer from "
                "the last checkpoint (load_state_dict), or start again"
            )


def _copy_in(section: Section, states: SlotStates, passage: Passage, state: Sequence[torch.Tensor]) -> None:
    by_name = dict(zip((field.name for field in section.kernel.fields), state, strict=True))
    for tensor in state:
        tensor.zero_()
    chunk = passage.record.chunk
    for piece in chunk.pieces:
        new = states.get((section.index, piece.slot))
        if new is not None:
            start = chunk.start + piece.start - section.layout.slots[piece.slot].offset
            for name, tensor in new.moments.items():
                part = by_name[name][piece.start : piece.stop]
                part.copy_(tensor.reshape(-1)[start : start + part.numel()])


def _whole(norm: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def _refuse_settings(config: Config) -> None:
    useless = sorted(config.model_fields_set.difference(_USED))
    if useless:
        raise ConfigError(
            f"{', '.join(useless)} would have no effect: the model is not offloaded, only the optimizer's state is. "
            f"Allowed in the config of an optimizer: {', '.join(_USED)}"
        )


def _open_store(
    config: Config, plan: StatePlan, local_size: int, trace: Trace, stack: ExitStack
) -> ShardStore | None:
    nvme = config.nvme
    check_directories(nvme.paths)
    if not plan.nvme_nbytes:
        return None
    is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if is_one_of_several else None
    paths = stack.enter_context(swap_directories(nvme.paths, rank=rank))
    wrap = traced(trace, open_log(nvme, rank, stack))
    files_nbytes = None if nvme.budget is None else nvme.budget // local_size
    store = ShardStore.open(
        paths,
        plan.nvme_nbytes,
        options=storage_options(
            nvme, write_memory_nbytes=plan.transit_nbytes // len(paths), files_nbytes=files_nbytes
        ),
        speeds=speeds_to_start_with(nvme, paths),
        wrap_backend=wrap,
    )
    stack.callback(store.close)
    return store
