"""A device whose memory is a file: real models train through it on machines without a GPU.

Uploads write the shard into the block's region of the file; the tensor that computes is filled from the file when the
copy is over. Gradients are written into the file and read back. Compute itself runs on the CPU.

[Note: late filling]
The target of an upload is filled by `make_ready` or `Fence.wait`, not by `upload`: code that forgets to order its
compute after the copy computes with garbage here, as it would now and then on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from infinity.config import DeviceKind, Precision
from infinity.devices.base import Copy, Device, DeviceBlock, Fence
from infinity.devices.cpu import add, fill
from infinity.sizes import MIB
from infinity.testing.clock import Clock
from infinity.testing.fake_gpu import FakeGpu
from infinity.testing.fake_pages import PAGE_NBYTES, FakeRegion
from storage.budget import Reservation
from storage.closing import Closing

_PIECE_NBYTES = MIB


class FakeBlock(DeviceBlock):
    """A region of the file. It occupies whole pages of the budget."""

    __slots__ = ("region",)

    def __init__(self, region: FakeRegion, reservation: Reservation) -> None:
        super().__init__(region.nbytes, region.owner, reservation)
        self.region = region


class FakeDevice(Device, Closing):
    """Drives a `FakeGpu`, which it owns from now on; the budget is its capacity."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu.capacity_nbytes)
        self.gpu = gpu
        self._piece = torch.empty(_PIECE_NBYTES, dtype=torch.uint8)  # on the way between dtypes
        self._piece_lock = threading.Lock()

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.FAKE

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def compute_dtype(self, precision: Precision) -> torch.dtype:
        return torch.float32  # the same numbers on every machine

    def allocate(self, nbytes: int, owner: str) -> FakeBlock:
        reservation = self._reserve(-(-nbytes // PAGE_NBYTES) * PAGE_NBYTES, owner)
        try:
            return FakeBlock(self.gpu.allocate(nbytes, owner), reservation)
        except BaseException:
            reservation.release()
            raise

    def free(self, block: DeviceBlock) -> None:
        self.gpu.free(_region(block))
        super().free(block)

    def _upload(self, copy: Copy) -> Fence:
        source, region = copy.source, _region(copy.block)
        if source.itemsize > copy.target.itemsize:
            source = source.to(copy.target.dtype)  # the region holds no more than the target
        entry = self.gpu.start_upload(region, host_bytes(source), copy.label, offset_nbytes=copy.offset_nbytes)
        self._will_be_over(copy, entry.start_s, entry.end_s)
        return _Upload(self, region, copy, source.dtype, entry.end_s)

    def make_ready(self, fence: Fence) -> None:
        fence.wait()  # for the modelled time, which is known

    def _download(self, copy: Copy) -> Fence:
        source, region = self._put_on_device(copy)
        if source.dtype != copy.target.dtype:
            return self._by_pieces(copy, source, fill)
        target = host_bytes(copy.target)
        entry = self.gpu.start_download(region, target, copy.label, offset_nbytes=copy.offset_nbytes)
        self._will_be_over(copy, entry.start_s, entry.end_s)
        return _Timed(self.gpu.clock, copy.label, entry.end_s)

    def _add_to_host(self, copy: Copy) -> Fence:
        source, _ = self._put_on_device(copy)
        return self._by_pieces(copy, source, add)

    def _put_on_device(self, copy: Copy) -> tuple[torch.Tensor, FakeRegion]:
        """The values to be downloaded, contiguous, and where in the file they lie now."""
        source, region = copy.source.contiguous(), _region(copy.block)
        self.gpu.write(region, host_bytes(source), offset_nbytes=copy.offset_nbytes)
        return source, region

    def _by_pieces(self, copy: Copy, source: torch.Tensor, take: Callable[[torch.Tensor, torch.Tensor], None]) -> Fence:
        """Download by way of the piece buffer, where the dtypes differ or the values are added to others."""
        region, start_s = _region(copy.block), self.gpu.clock.now_s()
        end_s = start_s
        with self._piece_lock:
            for part, start in self._pieces(source.dtype, copy.target):
                piece = self._piece_of(source.dtype, part.numel())
                offset = copy.offset_nbytes + start * source.itemsize
                end_s = self.gpu.start_download(region, host_bytes(piece), copy.label, offset_nbytes=offset).end_s
                take(part, piece)
        self._will_be_over(copy, start_s, end_s)
        return _Timed(self.gpu.clock, copy.label, end_s)

    def close(self) -> None:
        self.gpu.close()
        self._piece = torch.empty(0, dtype=torch.uint8)  # an engine is a part of cycles, which live until a collection

    def fill_from_file(self, region: FakeRegion, offset_nbytes: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Fill a compute tensor with the elements of `dtype` that the region holds at `offset_nbytes`."""
        if dtype == target.dtype:
            self.gpu.read_into(region, host_bytes(target), offset_nbytes=offset_nbytes)
            return
        with self._piece_lock:
            for part, start in self._pieces(dtype, target):
                piece = self._piece_of(dtype, part.numel())
                self.gpu.read_into(region, host_bytes(piece), offset_nbytes=offset_nbytes + start * dtype.itemsize)
                fill(part, piece)

    def _will_be_over(self, copy: Copy, start_s: float, end_s: float) -> None:
        """The times of a copy are known when it begins; they are of the device's clock, those of `LinkCopy` are not."""
        shift_s = time.perf_counter() - self.gpu.clock.now_s()
        self._over(replace(copy, start_s=start_s + shift_s), end_s + shift_s)

    def _pieces(self, dtype: torch.dtype, target: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Parts of a tensor, with their first element, that fit in the piece buffer as elements of `dtype`."""
        numel = _PIECE_NBYTES // dtype.itemsize
        return [(target[start : start + numel], start) for start in range(0, target.numel(), numel)]

    def _piece_of(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._piece.view(dtype)[:numel]


class _Timed:
    """A copy that is over when the clock of the fake GPU says so."""

    def __init__(self, clock: Clock, label: str, end_s: float) -> None:
        self._clock = clock
        self._label = label
        self._end_s = end_s

    @property
    def done(self) -> bool:
        return self._clock.now_s() >= self._end_s

    def wait(self, timeout_s: float | None = None) -> None:
        rest_s = self._end_s - self._clock.now_s()
        if timeout_s is not None and rest_s > timeout_s:
            self._clock.sleep(timeout_s)
            raise TimeoutError(f"the copy of {self._label} is not over after {timeout_s:g} s")
        self._clock.sleep(rest_s)


class _Upload(_Timed):
    """An upload whose bytes are in the file; whoever waits first fills the tensor."""

    def __init__(
        self, device: FakeDevice, region: FakeRegion, copy: Copy, stored_dtype: torch.dtype, end_s: float
    ) -> None:
        super().__init__(device.gpu.clock, copy.label, end_s)
        self._device = device
        self._region = region
        self._offset_nbytes = copy.offset_nbytes
        self._dtype = stored_dtype
        self._target: torch.Tensor | None = copy.target
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        super().wait(timeout_s)
        with self._lock:
            if self._target is None:
                return
            if self._target.untyped_storage().nbytes() < self._target.nbytes:
                raise RuntimeError(f"{self._label} was released while it was being uploaded; wait for its fence first")
            self._device.fill_from_file(self._region, self._offset_nbytes, self._dtype, self._target)
            self._target = None


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as writable bytes, valid while the tensor lives.

    Not through numpy: a tensor that was once seen by numpy can never again resize its storage.
    """
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _region(block: DeviceBlock) -> FakeRegion:
    if not isinstance(block, FakeBlock):
        raise TypeError(f"{block!r} was allocated on another device")
    return block.region
