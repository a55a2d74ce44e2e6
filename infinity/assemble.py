"""Assembly: from a model and a config to a placement, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import psutil
import torch
from torch import nn

from infinity.allocate import Blueprint, allocate
from infinity.config import Config, DeviceKind, Precision, Schedule
from infinity.devices.base import Device
from infinity.devices.select import make_device
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.groups import FlatGroup, Unit
from infinity.init import staging_nbytes
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.placement import Placement, Request, make_placement
from infinity.released import Access
from infinity.runtime import Runtime
from infinity.units import ROOT_NAME, UnitSpec, partition

_DEVICE_SHARE = 4  # a budget that is not given is this fraction of what is available
_HOST_SHARE = 2


def assemble(model: nn.Module, config: Config, access: Access) -> Runtime:
    """Plan, then allocate. A plan that cannot work is refused before the model is touched or a file is made.

    Raises:
        ConfigError, PlacementError, UnsupportedModelError: before anything was changed.
        SwapFullError and other storage errors: nothing is left behind.
    """
    _refuse_ranks()
    specs = partition(
        model, resident_threshold_nbytes=config.resident_threshold, unit_classes=config.unit_classes
    )
    if not specs:
        raise UnsupportedModelError("the model has no parameters; there is nothing to offload")
    with ExitStack() as stack:
        device = make_device(config.device, _device_budget(config))
        stack.callback(device.close)
        threads = KernelThreads(config.optimizer_threads)
        stack.callback(threads.close)
        kernel = kernel_for(config.precision, threads, config.optimizer)
        groups, units = _make_groups(specs, config.precision, kernel, device)
        placement = _plan(model, config, units, groups, kernel, device)
        blueprint = Blueprint(model, config, access, placement, units, groups, kernel, threads, device)
        runtime = allocate(blueprint, stack)
        runtime.closing = stack.pop_all()
    return runtime


def _refuse_ranks() -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = max(world_size, torch.distributed.get_world_size())
    if world_size > 1:
        raise ConfigError(
            f"this job has {world_size} ranks; this version trains on one. Start a single process (unset WORLD_SIZE)"
        )


def _device_budget(config: Config) -> int:
    if config.device.budget is not None:
        return config.device.budget
    uses_cuda = config.device.kind in (DeviceKind.AUTO, DeviceKind.CUDA) and torch.cuda.is_available()
    if uses_cuda:
        free_nbytes, _ = torch.cuda.mem_get_info()
        return int(free_nbytes) // 2
    return int(psutil.virtual_memory().available) // _DEVICE_SHARE


def _host_budget(config: Config) -> int:
    if config.host.budget is not None:
        return config.host.budget
    return int(psutil.virtual_memory().available) // _HOST_SHARE


def _make_groups(
    specs: Sequence[UnitSpec], precision: Precision, kernel: Kernel, device: Device
) -> tuple[list[FlatGroup], list[Unit]]:
    compute_dtype = device.compute_dtype(precision)
    groups: list[FlatGroup] = []
    group_of: dict[int, FlatGroup] = {}
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        buckets: dict[tuple[torch.dtype, bool], list[int]] = {}
        for number, entry in enumerate(spec.own):
            buckets.setdefault((entry.parameter.dtype, entry.parameter.requires_grad), []).append(number)
        mine: dict[int, FlatGroup] = {}
        for (dtype, trainable), numbers in buckets.items():
            own = [spec.own[n] for n in numbers]
            shard, compute = _dtypes(own[0].name, dtype, trainable, precision, kernel, compute_dtype)
            kind = str(dtype).removeprefix("torch.") + ("" if trainable else ".frozen")
            group = FlatGroup(
                len(groups), f"{spec.name or ROOT_NAME}/{kind}", own, shard_dtype=shard, compute_dtype=compute
            )
            groups.append(group)
            mine[group.index] = group
            group_of.update({id(entry.parameter): group for entry in own})
        for entry in spec.borrowed:
            group = group_of[id(entry.parameter)]
            mine[group.index] = group
        units.append(Unit(index, spec.name, spec.module, tuple(mine.values()), spec.resident))
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


def _plan(
    model: nn.Module,
    config: Config,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    kernel: Kernel,
    device: Device,
) -> Placement:
    schedule, reason = config.schedule, "asked for"
    if schedule is Schedule.AUTO:
        schedule = Schedule.SYNCHRONOUS
        reason = "auto: right for every loop, with accumulation and clipping"
    return make_placement(
        Request(
            units=units,
            groups=groups,
            fields=kernel.fields,
            schedule=schedule,
            schedule_reason=reason,
            host_budget_nbytes=_host_budget(config),
            device_budget_nbytes=device.budget.limit_nbytes,
            nvme_budget_nbytes=config.nvme.budget,
            chunk_nbytes=config.chunk,
            staging_nbytes=staging_nbytes(model, groups),
        )
    )
