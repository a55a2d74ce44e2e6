"""What a compute device is to the engine: a budget, copies in both directions, and fences to wait for them.

[Note: what crosses the link]
Tensors on both sides are flat (1-D) and may differ in dtype; conversion is the device's work, so what crosses has the
dtype of the host side. `LinkStats` counts those bytes on every kind of device, also where nothing crosses a real link.

[Note: who keeps what alive]
A device keeps a reference to both tensors of a copy until the copy is over, so dropping them is safe. Resizing their
storages, freeing the block, or using the memory for something else is not: wait for the fence first.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from infinity.config import DeviceKind, Precision
from infinity.errors import DeviceOutOfMemoryError
from infinity.sizes import format_nbytes
from storage.budget import Reservation, TierBudget

Register = Callable[[int, int], Callable[[], None]]
"""Pins host memory, given its address and size in bytes; returns what undoes it."""


class LinkDirection(Enum):
    """Which way a copy goes; the value is the kind of shard that goes that way when a label does not tell."""

    H2D = "param"
    D2H = "grad"


@dataclass(frozen=True, slots=True)
class LinkCopy:
    """A copy between host and device that is over. Times on `time.perf_counter`'s clock.

    Attributes:
        start_s: when it was submitted; on the fake device when the link took it up.
        end_s: when it was over, on CUDA when that was noticed.
    """

    direction: LinkDirection
    label: str
    nbytes: int
    start_s: float
    end_s: float


class LinkStats:
    """Bytes that crossed between host and device, and who is told of every copy. Thread safe.

    The kind of a copy is the first word of a label of several words ("state blocks.3"); one word is a name only.

    Attributes:
        shared_nbytes: of those that count as uploaded, what nothing copied; see `Device.note_shared`. Written by the
            training thread.
    """

    def __init__(self) -> None:
        self._nbytes: Counter[tuple[LinkDirection, str]] = Counter()
        self.shared_nbytes = 0
        self._lock = threading.Lock()
        self._on_copy: Callable[[LinkCopy], None] | None = None

    def watch(self, on_copy: Callable[[LinkCopy], None]) -> None:
        """`on_copy` is told of every copy that is over from now on, in the thread that notices."""
        self._on_copy = on_copy

    def over(self, direction: LinkDirection, label: str, nbytes: int, start_s: float, end_s: float) -> None:
        """A copy, whose bytes `add` has counted, is over."""
        if self._on_copy is not None:
            self._on_copy(LinkCopy(direction, label, nbytes, start_s, end_s))

    def add(self, direction: LinkDirection, label: str, nbytes: int) -> None:
        """Count the bytes of a copy that begins."""
        kind, space, _ = label.partition(" ")
        with self._lock:
            self._nbytes[direction, kind if space else direction.value] += nbytes

    @property
    def h2d_nbytes(self) -> int:
        """Bytes from the host to the device."""
        return sum(self.by_kind(LinkDirection.H2D).values())

    @property
    def d2h_nbytes(self) -> int:
        """Bytes from the device to the host."""
        return sum(self.by_kind(LinkDirection.D2H).values())

    def by_kind(self, direction: LinkDirection) -> dict[str, int]:
        """Bytes in one direction, by kind of shard."""
        with self._lock:
            return {kind: nbytes for (way, kind), nbytes in self._nbytes.items() if way is direction}


class DeviceBlock:
    """Bytes held on a device, made by `Device.allocate`, given back by `Device.free`."""

    __slots__ = ("nbytes", "owner", "reservation")

    def __init__(self, nbytes: int, owner: str, reservation: Reservation) -> None:
        self.nbytes = nbytes
        self.owner = owner
        self.reservation = reservation

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.owner}, {self.nbytes} bytes)"


class Fence(Protocol):
    """A copy under way."""

    @property
    def done(self) -> bool:
        """Whether the copy is over: its source may be reused, what was downloaded may be read. Never waits."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Hold the host until the copy is over. Raises what went wrong; TimeoutError after `timeout_s`."""


class CompletedFence:
    """A copy that was over when its call returned."""

    @property
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One checked copy between host and device; what the parts are `Device.upload` and `Device.download` say.

    Attributes:
        start_s: when it was submitted, on `time.perf_counter`'s clock.
    """

    direction: LinkDirection
    block: DeviceBlock
    source: torch.Tensor
    target: torch.Tensor
    label: str
    offset_nbytes: int
    start_s: float = field(default_factory=time.perf_counter)

    @property
    def nbytes(self) -> int:
        """Bytes that cross: those of the host side."""
        return (self.source if self.direction is LinkDirection.H2D else self.target).nbytes


class Device(ABC):
    """The compute device: memory as reservations of one budget, copies checked and counted, fences to wait for them.

    Used by the training thread; fences may be waited for by any thread.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self._budget = TierBudget("device", budget_nbytes)
        self._traffic = LinkStats()

    @property
    @abstractmethod
    def kind(self) -> DeviceKind:
        """CPU, CUDA or FAKE."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors are and kernels run."""

    @property
    def budget(self) -> TierBudget:
        """The ceiling of what the engine holds on the device."""
        return self._budget

    @property
    def traffic(self) -> LinkStats:
        """Bytes copied so far."""
        return self._traffic

    @abstractmethod
    def compute_dtype(self, precision: Precision) -> torch.dtype:
        """The dtype of gathered parameters: bf16 for bf16 where its products are fast, else fp32."""

    def allocate(self, nbytes: int, owner: str) -> DeviceBlock:
        """Take `nbytes` of the budget. The caller makes the tensors, except on the fake, where it is a file region.

        Raises:
            DeviceOutOfMemoryError: need, limit, who holds what, and the budget that would do at this moment.
        """
        return DeviceBlock(nbytes, owner, self._reserve(nbytes, owner))

    def free(self, block: DeviceBlock) -> None:
        """Give a block back. Idempotent. No copy may be using it."""
        block.reservation.release()

    def upload(
        self, block: DeviceBlock, source: torch.Tensor, target: torch.Tensor, label: str, *, offset_nbytes: int = 0
    ) -> Fence:
        """Copy host to device, ordered after the compute work queued so far; may run behind.

        `make_ready(fence)` has to come before compute that reads the target. The version counter of the target does
        not change.

        Args:
            block: what holds the memory of the target.
            source: 1-D contiguous host tensor.
            target: 1-D contiguous device tensor of the same numel; dtypes may differ.
            label: what is copied, for the log, errors and `traffic`.
            offset_nbytes: where in the block the target starts.
        """
        check_copy(block, target, source, label, offset_nbytes)
        copy = Copy(LinkDirection.H2D, block, source, target, label, offset_nbytes)
        self._traffic.add(copy.direction, label, copy.nbytes)
        return self._upload(copy)

    def note_shared(self, source: torch.Tensor, label: str) -> None:
        """Count an upload for which nothing had to be copied: the device computes where the source lies."""
        self._traffic.add(LinkDirection.H2D, label, source.nbytes)
        self._traffic.shared_nbytes += source.nbytes
        now_s = time.perf_counter()
        self._traffic.over(LinkDirection.H2D, label, source.nbytes, now_s, now_s)

    @abstractmethod
    def make_ready(self, fence: Fence) -> None:
        """Order compute queued from now on after the copy; on CUDA the host does not wait."""

    def download(
        self,
        block: DeviceBlock,
        source: torch.Tensor,
        target: torch.Tensor,
        label: str,
        *,
        accumulate: bool,
        offset_nbytes: int = 0,
    ) -> Fence:
        """Copy device to host, ordered after the compute work queued so far; may run behind.

        The target may be read when the fence is done. Accumulations into one target run in the order of the calls; an
        overwriting download needs the earlier ones to be over.

        Args:
            block: what holds the memory of the source.
            source: 1-D device tensor.
            target: 1-D contiguous host tensor of the same numel; dtypes may differ.
            label: what is copied, for the log, errors and `traffic`.
            accumulate: add to the target instead of overwriting it.
            offset_nbytes: where in the block the source starts.
        """
        check_copy(block, source, target, label, offset_nbytes)
        copy = Copy(LinkDirection.D2H, block, source.detach(), target, label, offset_nbytes)
        self._traffic.add(copy.direction, label, copy.nbytes)
        return self._add_to_host(copy) if accumulate else self._download(copy)

    @property
    def computes_in_host_memory(self) -> bool:
        """Whether kernels may work on the memory of the host pool as it is."""
        return False

    def host_register(self) -> Register | None:
        """How to pin host memory for this device; None where that gains nothing."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies under way and give everything back. Idempotent."""

    # Parts -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _upload(self, copy: Copy) -> Fence:
        """Start a copy to the device. Whoever notices that it is over calls `_over`; the same for the others."""

    @abstractmethod
    def _download(self, copy: Copy) -> Fence:
        """Start a copy to the host that overwrites the target."""

    @abstractmethod
    def _add_to_host(self, copy: Copy) -> Fence:
        """Start a copy to the host that is added to the target."""

    def _over(self, copy: Copy, end_s: float | None = None) -> None:
        """A copy is over, now or at another time of `time.perf_counter`'s clock."""
        now_s = time.perf_counter() if end_s is None else end_s
        self._traffic.over(copy.direction, copy.label, copy.nbytes, copy.start_s, now_s)

    def _reserve(self, nbytes: int, owner: str) -> Reservation:
        reservation = self._budget.try_reserve(nbytes, owner)
        if reservation is None:
            raise DeviceOutOfMemoryError(_describe_shortage(self._budget, nbytes, owner))
        return reservation


def _describe_shortage(budget: TierBudget, nbytes: int, owner: str) -> str:
    holders = sorted(budget.holders().items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {format_nbytes(held_nbytes)}" for name, held_nbytes in holders) or "nobody"
    enough_nbytes = budget.used_nbytes + nbytes
    return (
        f"{owner} needs {nbytes} bytes on the device; {budget.used_nbytes} of {budget.limit_nbytes} are in use, by: "
        f"{held}; a device budget of {enough_nbytes} bytes ({format_nbytes(enough_nbytes)}) would do at this moment"
    )


def check_copy(
    block: DeviceBlock, on_device: torch.Tensor, on_host: torch.Tensor, label: str, offset_nbytes: int
) -> None:
    """Refuse a copy that would read or write memory that is not there, which torch would not notice.

    Raises:
        ValueError: shapes differ or are not flat, the host side is not contiguous host memory, the device side does not
            fit in the block, or one side's storage is released.
    """
    if on_device.dim() != 1 or on_device.shape != on_host.shape:
        raise ValueError(f"{label}: cannot copy between shapes {tuple(on_host.shape)} and {tuple(on_device.shape)}")
    if on_host.device.type != "cpu" or not on_host.is_contiguous():
        raise ValueError(f"{label}: the host side must be contiguous host memory, it is on {on_host.device}")
    if offset_nbytes < 0 or offset_nbytes + on_device.nbytes > block.nbytes:
        raise ValueError(f"{label}: {on_device.nbytes} bytes at {offset_nbytes} do not fit in {block!r}")
    for tensor in (on_device, on_host):
        if tensor.numel():
            last = tensor.storage_offset() + (tensor.numel() - 1) * tensor.stride(0)
            if tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
                raise ValueError(f"{label}: the memory of a tensor of {tensor.numel()} elements is released")
