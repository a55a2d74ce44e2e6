"""From the partition of a model to units and their flat groups: which parameters lie in one buffer, in which dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    """The flat groups of what `partition` found, one per unit, dtype and whether it trains; and the units over them.

    Raises:
        UnsupportedModelError: a parameter's dtype cannot be trained in this precision.
    """
    compute_dtype = device.compute_dtype(precision)
    groups: list[FlatGroup] = []
    group_of: dict[int, FlatGroup] = {}
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        buckets: dict[tuple[torch.dtype, bool], list[int]] = {}
        for number, entry in enumerate(spec.own):
            buckets.setdefault((entry.dtype, entry.trainable), []).append(number)
        mine: dict[int, FlatGroup] = {}
        for (dtype, trainable), numbers in buckets.items():
            own = [spec.own[n] for n in numbers]
            shard, compute = _dtypes(own[0].name, dtype, trainable, precision, kernel, compute_dtype)
            kind = str(dtype).removeprefix("torch.") + ("" if trainable else ".frozen")
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
