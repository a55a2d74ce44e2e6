"""The CPU as compute device: "device memory" is a part of host memory with a budget of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from infinity.config import DeviceKind, Precision
from infinity.devices.base import CompletedFence, Copy, Device, Fence
from infinity.torch_compat import can_swap_memory

_FAST_BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # x86 and, last, Arm; the same names in torch and in /proc/cpuinfo


class CpuDevice(Device):
    """Computes where the shards are; every copy is over when its call returns."""

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.CPU

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def computes_in_host_memory(self) -> bool:
        return can_swap_memory()

    def compute_dtype(self, precision: Precision) -> torch.dtype:
        return torch.bfloat16 if precision is Precision.BF16 and has_fast_bf16() else torch.float32

    def _upload(self, copy: Copy) -> Fence:
        fill(copy.target, copy.source)
        self._over(copy)
        return CompletedFence()

    def make_ready(self, fence: Fence) -> None:
        """Nothing to order: copies and compute run on the same thread."""

    def _download(self, copy: Copy) -> Fence:
        fill(copy.target, copy.source)
        self._over(copy)
        return CompletedFence()

    def _add_to_host(self, copy: Copy) -> Fence:
        add(copy.target, copy.source)
        self._over(copy)
        return CompletedFence()

    def close(self) -> None:
        """Nothing to wait for."""


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values, converting dtypes, unseen by autograd: saved tensors that share the memory stay valid."""
    with torch.no_grad():
        target.data.copy_(source)  # .data: has its own version counter


def add(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target += source`, unseen by autograd; narrower sources are widened exactly."""
    with torch.no_grad():
        target.data.add_(source)


def has_fast_bf16(capabilities: Mapping[str, object] | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 natively (AVX512-BF16, AMX, Arm BF16) and torch was built to use it.

    `capabilities` are those torch reports; versions of torch that report none are helped by the kernel's list.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if capabilities is None and hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
    if capabilities is not None:
        return any(bool(capabilities.get(name)) for name in _FAST_BF16)
    try:
        words = cpuinfo.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False  # not Linux: nothing is known, and fp32 is right everywhere
    return any(name in words for name in _FAST_BF16)
