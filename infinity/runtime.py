"""The parts of one engine, made once and closed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.activations import Activations
from infinity.checkpoint.saver import Saver
from infinity.config import Config, OptimizerKind
from infinity.devices.base import Device
from infinity.durable.committer import Committer
from infinity.errors import InfinityError
from infinity.gather import Gatherer
from infinity.gradient_sink import GradientSink
from infinity.groups import FlatGroup, Unit
from infinity.io_loop import IoLoop
from infinity.lockstep import Lockstep
from infinity.observe.inspection import Inspection
from infinity.observe.stalls import StallCause, StallClock
from infinity.observe.trace import Trace
from infinity.optim.group_update import GroupUpdate
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import AccessOrder
from infinity.passage import Passage
from infinity.placement import Placement
from infinity.readahead import ReadAhead
from infinity.residency import HostCopy
from infinity.tensor_parallel import TensorParallel
from storage.budget import TierBudget
from storage.drives import WrapBackend
from storage.errors import ClosedError, detached
from storage.pool import HostPool
from storage.store import ShardStore


@dataclass(slots=True, eq=False)
class Failure:
    """The first thing that went wrong behind the training thread's back. Set by the I/O loop, read by everybody.

    The error is raised by nobody, for it would keep the frames that it is raised in, with all their tensors.
    """

    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        if self.error is None:
            self.error = detached(error)


@dataclass(slots=True, eq=False)
class Runtime:
    """Everything an engine works with. Who writes what is said in each part's own module."""

    model: nn.Module
    config: Config
    placement: Placement
    units: Sequence[Unit]
    groups: Sequence[FlatGroup]
    copies: Sequence[HostCopy]
    states: dict[int, GroupState]
    kernel: Kernel
    optimizer: OptimizerKind  # whose state the kernel keeps
    threads: KernelThreads
    device: Device
    pool: HostPool
    budgets: dict[str, TierBudget]
    store: ShardStore | None
    io: IoLoop
    stalls: StallClock
    order: AccessOrder
    read_ahead: ReadAhead
    pipeline: UpdatePipeline
    passage: Passage
    gatherer: Gatherer
    sink: GradientSink
    trace: Trace
    inspection: Inspection
    failure: Failure
    in_flight: list[GroupUpdate]  # written by the training thread
    committer: Committer | None  # where steps are durable
    saver: Saver
    activations: Activations
    lockstep: Lockstep | None = None  # with several ranks
    tensor_parallel: TensorParallel | None = None  # with DTensor parameters
    wrap_backend: WrapBackend | None = None  # the user's, for stores that are opened later
    closing: ExitStack = field(default_factory=ExitStack)
    step: int = 0
    hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    is_closed: bool = False

    @property
    def resident_groups(self) -> list[FlatGroup]:
        """What is never given back: the groups outside of repeated blocks."""
        return [group for unit in self.units if unit.resident for group in unit.groups]

    def held(self) -> dict[str, Callable[[], int]]:
        """What tells how many bytes each tier holds at the moment."""
        tiers: dict[str, Callable[[], int]] = {
            "device": lambda: self.device.budget.used_nbytes,
            "host": lambda: self.pool.leased_nbytes,
        }
        if (store := self.store) is not None:
            tiers["nvme"] = lambda: store.held_nbytes
        return tiers

    def check_open(self) -> None:
        """Raise InfinityError when the engine is closed."""
        if self.is_closed:
            raise InfinityError("this engine is closed; its parameters and optimizer state are gone")

    def land_updates(self) -> None:
        """Wait until the swap files hold every update, those that were deferred too.

        Raises what went wrong with one.
        """
        if self.in_flight:
            self.io.post(self.read_ahead.force)
        for update in self.in_flight:
            self.stalls.wait(update.written, StallCause.NVME_WRITE)
        self.in_flight.clear()

    def before_overwrite(self) -> None:
        """Stored bytes are about to change: wait until the commit under way has what it needs of them.

        Raises:
            StorageError: the commit failed.
        """
        if self.committer is not None:
            self.committer.wait()

    def before_replacing(self) -> None:
        """Stored bytes or host memory are about to change outside of a step: what commits and saves need comes first.

        Raises:
            StorageError: the commit failed.
        """
        self.before_overwrite()
        self.saver.preserve_all()

    def shut_down(self) -> None:
        """Close every part in reverse order of its making; an error is raised after all are closed.

        Idempotent. Called again after an interrupt (Ctrl-C), it closes what is left.
        """
        with self.closing:
            if not self.is_closed:
                self.is_closed = True
                self.io.post(self.read_ahead.stop)
            while self.hooks:
                self.hooks.pop().remove()

    def free_memory(self) -> None:
        """Give back every lease and reservation, whatever fails. Only when no transfer is in flight any more."""
        with ExitStack() as closing:
            closing.callback(self._free_for_good)
            closing.callback(self.pipeline.free)
            closing.callback(self.sink.close)
            closing.callback(self.read_ahead.give_up, ClosedError("the engine has been closed"))
            closing.callback(self.gatherer.close)
            closing.callback(self.activations.close)

    def _free_for_good(self) -> None:
        for copy in self.copies:
            copy.discard()
        for state in self.states.values():
            for record in state.records:
                if record.lease is not None:
                    record.lease.release()
                    record.lease = None
