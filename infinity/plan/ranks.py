"""Groups and units as one rank of many holds them: ranks that behave alike are simulated once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from infinity.config import Precision
from infinity.devices.cpu import CpuDevice
from infinity.grouping import make_groups
from infinity.groups import FlatGroup, Unit
from infinity.optim.hyper import Kernel
from infinity.units import Owned, UnitSpec

_UNLIMITED_NBYTES = 1 << 62
_GPU_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}  # else fp32, as on CPUs


class PlannedDevice(CpuDevice):
    """Stands for the device of a plan where the engine asks what it computes in; nothing is allocated on it."""

    def __init__(self, *, is_gpu: bool) -> None:
        super().__init__(_UNLIMITED_NBYTES)
        self._is_gpu = is_gpu

    def compute_dtype(self, precision: Precision) -> torch.dtype:
        return _GPU_DTYPES.get(precision, torch.float32) if self._is_gpu else torch.float32


def rank_groups(
    specs: Sequence[UnitSpec], precision: Precision, kernel: Kernel, *, is_gpu: bool, ranks: int
) -> tuple[list[FlatGroup], list[Unit]]:
    """The engine's groups and units; with several ranks, of what one of them stores.

    `shard_nbytes` and `layout` are this rank's part, `flat_nbytes` the whole that is gathered on the device.
    """
    device = PlannedDevice(is_gpu=is_gpu)
    groups, units = make_groups(specs, precision, kernel, device)
    if ranks == 1:
        return groups, units
    parts = [_part(group, ranks) for group in groups]
    resized = [
        Unit(u.index, u.name, u.module, tuple(parts[g.index] for g in u.groups), u.resident, u.n_places) for u in units
    ]
    return parts, resized


def _part(group: FlatGroup, ranks: int) -> FlatGroup:
    numel = -(-group.layout.numel // ranks)
    weight = nn.Parameter(
        torch.empty(numel, dtype=group.source_dtype, device="meta"),
        requires_grad=group.trainable,
    )
    part = FlatGroup(
        group.index,
        group.key,
        [Owned(group.key, weight)],
        shard_dtype=group.shard_dtype,
        compute_dtype=group.compute_dtype,
    )
    part.flat_nbytes = group.flat_nbytes
    part.units = group.units
    return part
