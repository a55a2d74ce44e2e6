"""From the partition of a model to units and their flat groups: which parameters lie in one buffer, in which dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from infinity.config import Precision
from infinity.devices.base import Device
from infinity.errors import UnsupportedModelError
from infinity.groups import ALONE, FlatGroup, Unit
from infinity.layout import Sharding
from infinity.optim.hyper import Kernel
from infinity.units import ROOT_NAME, UnitSpec


def make_groups(
    specs: Sequence[UnitSpec], precision: Precision, kernel: Kernel, device: Device, sharding: Sharding = ALONE
) -> tuple[list[FlatGroup], list[Unit]]:
    """The flat groups of what `partition` found, one per unit, dtypes and whether it trains; and the units over them.

    Raises:
        UnsupportedModelError: a parameter's dtype cannot be trained in this precision.
    """
    compute_dtype = device.compute_dtype(precision)
    groups: list[FlatGroup] = []
    group_of: dict[int, FlatGroup] = {}
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        buckets: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
        for number, entry in enumerate(spec.own):
            in_fp32 = compute_dtype is not torch.float32 and any(has_fp32_statistics(m) for m, _ in entry.owners)
            buckets.setdefault((entry.dtype, entry.trainable, in_fp32), []).append(number)
        mine: dict[int, FlatGroup] = {}
        for (dtype, trainable, in_fp32), numbers in buckets.items():
            own = [spec.own[n] for n in numbers]
            computes_in = torch.float32 if in_fp32 else compute_dtype
            shard, compute = _dtypes(own[0].name, dtype, trainable, precision, kernel, computes_in)
            kind = str(dtype).removeprefix("torch.") + (".fp32" if in_fp32 else "") + ("" if trainable else ".frozen")
            group = FlatGroup(
                len(groups),
                f"{spec.name or ROOT_NAME}/{kind}",
                own,
                shard_dtype=shard,
                compute_dtype=compute,
                sharding=sharding,
            )
            groups.append(group)
            mine[group.index] = group
            group_of.update({id(entry.parameter): group for entry in own})
        for entry in spec.borrowed:
            group = group_of[id(entry.parameter)]
            mine[group.index] = group
        units.append(Unit(index, spec.name, spec.module, tuple(mine.values()), spec.resident, spec.n_places))
        for group in mine.values():
            group.units.add(index)
    return groups, units


def has_fp32_statistics(module: nn.Module) -> bool:
    """Whether a module normalises with fp32 running statistics, as `nn.BatchNorm2d`: its parameters are fp32 too then.

    Running averages in fewer bits would stop moving, and torch's CPU kernels take fp32 statistics with fp32 parameters
    alone. Inputs and outputs keep the compute dtype, as under autocast.
    """
    running = module._buffers.get("running_mean")
    return isinstance(module, _NormBase) and running is not None and running.dtype is torch.float32


def _dtypes(
    name: str, dtype: torch.dtype, trainable: bool, precision: Precision, kernel: Kernel, compute_dtype: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """Stored and compute dtype of a parameter."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return dtype, dtype
    if precision is Precision.FP32:
        if trainable and dtype is not torch.float32:
            raise UnsupportedModelError(
                f"parameter {name!r} is {dtype} and trains, but precision is 'fp32': convert the model with .float(), "
                "or use precision='bf16'"
            )
        return dtype, dtype
    return kernel.param_dtype, compute_dtype
