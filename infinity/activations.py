"""What backward needs of the units' inputs: kept on the device, in host memory, or in the swap files.

[Note: unit-boundary checkpoints]
Under a policy other than `none` a unit saves nothing for its backward but its inputs, and runs again when its backward
begins. The inputs stay on the device (`recompute`), or are copied to host memory (`host`), or go on to the swap files
from there (`nvme`). Backward wants them in the reverse order: what was packed last stays in host memory, and what was
packed first is written as soon as the next input would not find room, so as much as fits is never written. In backward
older inputs are read ahead as far as the budget goes.

What is not offloaded stays as it is: tensors that need no gradient (masks, positions: units share them), leaves, views
of parameters, and what is smaller than a page. Used by the training thread only.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from infinity.config import ActivationPolicy
from infinity.devices.base import Device, LinkDirection
from infinity.errors import InfinityError, PlacementError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.observe.stalls import StallCause, StallClock
from infinity.sizes import format_minimum_nbytes, format_nbytes
from infinity.swap_files import create_volatile
from infinity.torch_compat import CheckpointRun
from storage.align import PAGE_NBYTES, align_up
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.store import ShardStore
from storage.types import Priority, Ticket, TrafficTag

_KIND = "activation"


@dataclass(slots=True, eq=False)
class _Entry:
    """One saved input. In host memory while its block is filled; in the swap files when `write` has succeeded."""

    nbytes: int  # whole pages
    payload_nbytes: int
    block: HostBlock | None = None
    is_filled: bool = False  # the block holds the input, or will when `read` is over
    key: str = ""
    write: Ticket | None = None
    read: Ticket | None = None

    @property
    def is_stored(self) -> bool:
        return self.write is not None and self.write.done and self.write.exception is None

    def forget_failures(self) -> None:
        """Transfers that failed are tried again. Their errors, with the frames they were raised in, are let go of."""
        if _has_failed(self.read):
            self.read, self.is_filled = None, False
        if _has_failed(self.write):
            self.write = None

    @property
    def in_flight(self) -> bool:
        return any(ticket is not None and not ticket.done for ticket in (self.write, self.read))

    def leave_memory(self) -> None:
        self.is_filled = False
        if self.block is not None:
            self.block.release()
        self.block = self.read = None


def _has_failed(ticket: Ticket | None) -> bool:
    return ticket is not None and ticket.done and ticket.exception is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """An input that stays where it is."""

    tensor: torch.Tensor
    version: int

    def checked(self) -> torch.Tensor:
        """Raises RuntimeError where autograd would: the value has changed."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"an input of shape {tuple(self.tensor.shape)} that backward needs was changed in place after the "
                "forward of its module; use an operation that makes a new tensor"
            )
        return self.tensor


class _Handle:
    """An input that has left the device; when it dies, nobody can ask for the tensor any more."""

    __slots__ = ("__weakref__", "device", "dtype", "entry", "shape", "stride")

    def __init__(self, tensor: torch.Tensor, entry: _Entry) -> None:
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.entry = entry


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a unit was called with. A tensor that is there several times is one: modules compare by identity."""

    leaves: list[Any]
    spec: TreeSpec


class Activations:
    """Unit-boundary checkpoints of one engine. See [Note: unit-boundary checkpoints].

    Args:
        budget: host bytes of saved inputs.
        store: the swap files; None where nothing lies in them.

    Attributes:
        step: the number of the running step, for the counters.
        packed_nbytes: bytes of inputs that have left the device so far.
    """

    def __init__(
        self,
        policy: ActivationPolicy,
        *,
        groups: Iterable[FlatGroup],
        device: Device,
        pool: HostPool,
        budget: TierBudget,
        store: ShardStore | None,
        stalls: StallClock,
    ) -> None:
        self._policy = policy
        self._groups = list(groups)
        self._device = device
        self._pool = pool
        self._budget = budget
        self._store = store
        self._stalls = stalls
        self._entries: list[_Entry] = []  # in the order of packing
        self._dead: deque[_Entry] = deque()  # whose handles died, on whatever thread
        self._runs: list[CheckpointRun] = []  # of units whose forward is under way, outermost first
        self._running_again: list[nn.Module] = []
        self._numbers = count()
        self._free_keys: dict[int, list[str]] = {}
        self._is_closed = False
        self.step = 0
        self.packed_nbytes = 0

    # Units -----------------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointRun | None:
        """The forward of a unit begins: from now on it saves nothing. None when there is nothing to do."""
        is_again = module in self._running_again
        if self._policy is ActivationPolicy.NONE or not torch.is_grad_enabled() or is_again:
            return None
        leaves, spec = tree_flatten((args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        saved = {number: self._save(tensor) for number, tensor in tensors.items()}
        inputs = _Inputs([saved.get(id(leaf), leaf) for leaf in leaves], spec)
        devices = {tensor.device for tensor in tensors.values()}
        run = CheckpointRun(partial(self._run_again, module, inputs), devices)
        self._runs.append(run)  # first: wherever Ctrl-C comes, a run that has begun is known, and will be abandoned
        run.begin()
        return run

    def end(self, run: CheckpointRun, *, is_complete: bool) -> None:
        """It is over, or it has failed."""
        if is_complete:
            run.end()
        else:
            run.abandon()
        if run in self._runs:
            self._runs.remove(run)

    def abandon(self) -> None:
        """A forward was interrupted between the two: nothing stays open."""
        while self._runs:
            self._runs[-1].abandon()
            self._runs.pop()

    def _run_again(self, module: nn.Module, inputs: _Inputs) -> None:
        """In backward: this forward saves what backward needs. It ends early, with an exception, when all is there."""
        restored = {id(saved): self._restore(saved) for saved in inputs.leaves if isinstance(saved, _Kept | _Handle)}
        args, kwargs = tree_unflatten([restored.get(id(leaf), leaf) for leaf in inputs.leaves], inputs.spec)
        self._running_again.append(module)
        try:
            module(*args, **kwargs)
        finally:
            self._running_again.remove(module)

    # Tensors ---------------------------------------------------------------------------------------------------

    def _save(self, tensor: torch.Tensor) -> _Kept | _Handle:
        """What is held in place of an input.

        Raises:
            PlacementError: it does not fit in the budget of activations.
            StorageError: a transfer failed, or the swap files are full.
        """
        self._reap()
        if self._policy is ActivationPolicy.RECOMPUTE or not self._is_worth(tensor):
            return _Kept(tensor, tensor._version)
        entry = _Entry(align_up(tensor.nbytes, PAGE_NBYTES), tensor.nbytes)
        handle = _Handle(tensor, entry)  # first: if saving fails it dies with the exception, and the entry with it
        weakref.finalize(handle, self._dead.append, entry).atexit = False
        self._take_memory(entry)
        start_s = time.perf_counter()
        with torch.no_grad():
            self._flat(entry, tensor.dtype, tensor.numel()).copy_(_memory_of(tensor.detach()))
        entry.is_filled = True
        self._crossed(LinkDirection.D2H, tensor.nbytes, start_s)
        self.packed_nbytes += tensor.nbytes
        self._entries.append(entry)
        if self._policy is ActivationPolicy.NVME:
            self._write_behind(entry.nbytes)
        return handle

    def _restore(self, saved: _Kept | _Handle) -> torch.Tensor:
        """The tensor that was saved, bit for bit.

        Raises:
            RuntimeError: it has stayed where it was, and was changed in place.
            InfinityError: the engine is closed.
            StorageError: it could not be read.
        """
        if isinstance(saved, _Kept):
            return saved.checked()
        if self._is_closed:
            raise InfinityError("this engine is closed; the activations of its forwards are gone")
        self._reap()
        entry = saved.entry
        self._settle(entry.read)
        entry.forget_failures()
        if not entry.is_filled:
            if entry.block is None:
                self._take_memory(entry)
            self._read(entry, Priority.DEMAND)
            self._wait(entry, entry.read)
        start_s = time.perf_counter()
        with torch.no_grad():
            found = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
            _memory_of(found).copy_(self._flat(entry, saved.dtype, found.numel()))
        self._crossed(LinkDirection.H2D, found.nbytes, start_s)
        if entry.is_stored:
            entry.leave_memory()
        self._read_ahead(entry)
        return found.requires_grad_()

    @property
    def held_nbytes(self) -> int:
        """Host bytes of inputs that may still be asked for."""
        self._reap()
        return self._budget.used_nbytes

    def close(self) -> None:
        """Give all memory back. Nothing is in flight any more. Idempotent."""
        self.abandon()
        self._is_closed = True
        for entry in (*self._entries, *self._dead):
            entry.leave_memory()
        self._entries.clear()
        self._dead.clear()

    # Parts -----------------------------------------------------------------------------------------------------

    def _crossed(self, direction: LinkDirection, nbytes: int, start_s: float) -> None:
        """An input has been copied between host and device; the copy is over."""
        label = f"{_KIND} input"
        self._device.traffic.add(direction, label, nbytes)
        self._device.traffic.over(direction, label, nbytes, start_s, time.perf_counter())

    def _is_worth(self, tensor: torch.Tensor) -> bool:
        if tensor.grad_fn is None or tensor.nbytes < PAGE_NBYTES or not _is_dense(tensor):
            return False
        storage = tensor.untyped_storage()._cdata
        return all(group.flat.untyped_storage()._cdata != storage for group in self._groups)

    def _flat(self, entry: _Entry, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if entry.block is None:
            raise RuntimeError("an activation is not in host memory")
        return torch.frombuffer(entry.block.memory, dtype=dtype, count=numel)

    def _take_memory(self, entry: _Entry) -> None:
        with self._stalls.reporting():
            while (reservation := self._budget.try_reserve(entry.nbytes, _KIND)) is None:
                self._make_room(entry)
            entry.block = HostBlock.take(self._pool, reservation, _KIND)

    def _make_room(self, entry: _Entry) -> None:
        """The input that is needed last leaves host memory."""
        oldest = next((other for other in self._entries if other.block is not None), None)
        if oldest is None or self._policy is ActivationPolicy.HOST:
            held = sum(other.nbytes for other in self._entries if other.block is not None)
            least = format_minimum_nbytes(held + entry.nbytes)
            raise PlacementError(
                f"no host memory for an activation of {format_nbytes(entry.nbytes)}: {format_nbytes(held)} of "
                f"activations.host_budget = {format_nbytes(self._budget.limit_nbytes)} are held, and a forward keeps "
                f"the inputs of all units until its backward. Raise it to at least {least}, use "
                "activations.policy = 'nvme', or a smaller batch or a shorter sequence"
            )
        self._settle(oldest.read)
        self._settle(oldest.write)
        oldest.forget_failures()
        if oldest.write is None:
            self._write(oldest)
            self._wait(oldest, oldest.write)
        oldest.leave_memory()

    def _settle(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._stalls.settle(ticket, StallCause.ACTIVATION)

    def _wait(self, entry: _Entry, ticket: Ticket | None) -> None:
        """Wait for a transfer of an entry, and raise what went wrong with it; the next use tries it again."""
        try:
            if ticket is not None:
                self._stalls.wait(ticket, StallCause.ACTIVATION)
        finally:
            entry.forget_failures()

    def _write_behind(self, nbytes: int) -> None:
        """Write the oldest inputs until another one of this size would find room."""
        room = self._budget.free_nbytes
        room += sum(entry.nbytes for entry in self._entries if entry.block is not None and entry.write is not None)
        for entry in self._entries[:-1]:
            if room >= nbytes:
                return
            if entry.block is not None and entry.write is None:
                self._write(entry)
                room += entry.nbytes

    def _write(self, entry: _Entry) -> None:
        store, block = self._open_store(), entry.block
        if block is None:
            raise RuntimeError("an activation that is not in host memory cannot be written")
        entry.key = entry.key or self._key(entry.nbytes)
        tag = TrafficTag(_KIND, self.step)
        entry.write = store.submit_write(entry.key, block.memory, tag=tag, payload_nbytes=entry.payload_nbytes)

    def _read(self, entry: _Entry, priority: Priority) -> None:
        store, block = self._open_store(), entry.block
        if block is None:
            raise RuntimeError("an activation needs memory before it is read")
        tag, payload_nbytes = TrafficTag(_KIND, self.step), entry.payload_nbytes
        entry.read = store.submit_read(
            entry.key, block.memory, priority=priority, tag=tag, payload_nbytes=payload_nbytes
        )
        entry.is_filled = True

    def _read_ahead(self, entry: _Entry) -> None:
        """Start to read the inputs that were packed before, newest first, as far as there is memory."""
        if entry not in self._entries:
            return
        for earlier in reversed(self._entries[: self._entries.index(entry)]):
            if earlier.block is not None or not earlier.is_stored:
                continue
            reservation = self._budget.try_reserve(earlier.nbytes, _KIND)
            if reservation is None:
                return
            earlier.block = HostBlock.take(self._pool, reservation, _KIND)
            self._read(earlier, Priority.READ_AHEAD)

    def _key(self, nbytes: int) -> str:
        free = self._free_keys.get(nbytes)
        if free:
            return free.pop()
        key = f"{_KIND}/{next(self._numbers)}"
        create_volatile(self._open_store(), key, nbytes)
        return key

    def _open_store(self) -> ShardStore:
        if self._store is None:
            raise RuntimeError("activations are to lie in swap files, but there are none")
        return self._store

    def _reap(self) -> None:
        """Forget inputs that nobody can ask for any more."""
        for _ in range(len(self._dead)):
            entry = self._dead.popleft()
            if entry.in_flight:
                self._dead.append(entry)
                continue
            entry.leave_memory()
            if entry in self._entries:
                self._entries.remove(entry)
            if entry.key:
                self._free_keys.setdefault(entry.nbytes, []).append(entry.key)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order of the dimensions."""
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], -shape[dimension]))
    return tensor.layout is torch.strided and tensor.permute(order).is_contiguous()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory, 1-D."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())
