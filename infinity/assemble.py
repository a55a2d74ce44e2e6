"""Assembly: from a model and a config to a placement, before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import psutil
import torch
from torch import nn

from infinity.allocate import allocate
from infinity.blueprint import Blueprint
from infinity.collectives import Collectives
from infinity.config import Config, DeviceKind, Durability, Precision, Schedule
from infinity.demand import Request
from infinity.devices.base import Device
from infinity.devices.select import make_device
from infinity.durable.notes import StoredRun
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.grouping import make_groups
from infinity.groups import ALONE, FlatGroup, Unit
from infinity.init import is_empty, small_staging_nbytes, staging_nbytes
from infinity.local_share import host_budget_nbytes, told_local_size
from infinity.materialise import FirstValues
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.placement import Placement, make_placement, place_for_any_loop
from infinity.rank_gradients import reduction_nbytes
from infinity.ranks import Ranks
from infinity.released import Access
from infinity.runtime import Runtime
from infinity.unit_advice import refuse_without_units, unfound_units
from infinity.units import Kept, UnitSpec
from infinity.wrap_policies import units_of
from storage.drives import WrapBackend

_log = logging.getLogger(__name__)
_DEVICE_SHARE = 4  # a budget that is not given is this fraction of the memory that is available
_NEED = "a loop may accumulate or clip, which needs all gradients"


def assemble(
    model: nn.Module,
    config: Config,
    access: Access,
    ranks: Ranks | None = None,
    run: StoredRun | None = None,
    values: FirstValues | None = None,
    wrap_backend: WrapBackend | None = None,
) -> Runtime:
    """Plan, then allocate. A plan that cannot work is refused before the model is touched or a file is made.

    Args:
        ranks: who shares the shards; None with one rank.
        run: what is continued; its chunks stay as they are.
        values: where the first values come from.
        wrap_backend: see `offload`.

    Raises:
        ConfigError, PlacementError, UnsupportedModelError: before anything was changed.
        SwapFullError and other storage errors: nothing is left behind.
    """
    with ExitStack() as stack:
        blueprint = draw_up(model, config, access, stack, ranks, run, values, wrap_backend=wrap_backend)
        runtime = allocate(blueprint, stack)
        runtime.closing = stack.pop_all()
    return runtime


def draw_up(
    model: nn.Module,
    config: Config,
    access: Access,
    stack: ExitStack,
    ranks: Ranks | None = None,
    run: StoredRun | None = None,
    values: FirstValues | None = None,
    kept: Mapping[int, Kept] | None = None,
    wrap_backend: WrapBackend | None = None,
) -> Blueprint:
    """The plan alone; what it has opened is left on `stack`. Arguments and errors are those of `assemble`.

    Args:
        kept: parameters that are offloaded already, by the id of every object that may stand for one.
    """
    _refuse_with_ranks(config, ranks)
    _refuse_late_updates(config)
    specs = units_of(model, config, kept)
    if not specs:
        theirs = "that another engine does not serve already" if any(True for _ in model.parameters()) else ""
        raise UnsupportedModelError(f"the model has no parameters {theirs}".rstrip() + "; there is nothing to offload")
    refuse_without_units(model, specs, config)
    if kept is None and not config.unit_classes and config.wrap_policy is None:
        _warn_of_unfound(model, specs)
    collectives = _connect(config, ranks, stack)
    local_size = _local_size(collectives)
    device = make_device(config.device, _device_budget(config, local_size))
    stack.callback(device.close)
    threads = KernelThreads(config.optimizer_threads)
    stack.callback(threads.close)
    kernel = kernel_for(config.precision, threads, config.optimizer, config.state_format)
    sharding = ranks.sharding(config.stage) if ranks is not None else ALONE
    groups, units = make_groups(specs, config.precision, kernel, device, sharding)
    chunk_nbytes = config.chunk if run is None else run.layout.chunk_nbytes(kernel.fields)
    staging = staging_nbytes(model, units, groups, values)
    request = _request(config, units, groups, kernel, device, local_size, chunk_nbytes, staging)
    small_staging = small_staging_nbytes(model, units, groups, values, device)
    request = replace(request, small_staging_nbytes=small_staging, is_empty=is_empty(groups, values))
    if collectives is not None:
        _refuse_durable_ranks(config)
        request = _with_ranks(request, config, groups, collectives)
    is_chosen = request.schedule is not Schedule.AUTO
    placement = make_placement(request) if is_chosen else place_for_any_loop(request, _NEED)
    if collectives is not None:
        placement = _agree_on_schedule(request, placement, collectives)
    parts = (model, config, access, placement, request, units, groups, kernel, threads, device, collectives)
    return Blueprint(*parts, nvme_budget_nbytes=request.nvme_budget_nbytes, wrap_backend=wrap_backend)


def _warn_of_unfound(model: nn.Module, specs: Sequence[UnitSpec]) -> None:
    if (told := unfound_units(model, specs)) is not None:
        _log.warning("%s", told)


def _refuse_with_ranks(config: Config, ranks: Ranks | None) -> None:
    if ranks is None:
        return
    if config.stage != 3 and config.schedule in (Schedule.DEFERRED, Schedule.OVERLAPPED):
        raise ConfigError(
            f"stage={config.stage} trades the updated parameters between the ranks in step(), so no update can be made "
            f"before or after it as schedule={config.schedule.value!r} does; use stage=3, or 'synchronous' or 'auto'"
        )
    if config.device.kind is DeviceKind.FAKE:
        raise ConfigError("device.kind='fake' computes for one rank; with several ranks use 'cpu' or 'cuda'")


def _connect(config: Config, ranks: Ranks | None, stack: ExitStack) -> Collectives | None:
    if ranks is None:
        return None
    uses_cuda = config.device.kind in (DeviceKind.AUTO, DeviceKind.CUDA) and torch.cuda.is_available()
    collectives = Collectives(ranks, torch.device("cuda" if uses_cuda else "cpu"), config.rank_timeout_s)
    stack.push(collectives.end)
    return collectives


def _local_size(collectives: Collectives | None) -> int:
    """Processes of this job on this machine, which share its memory and drives, whoever shares this engine."""
    return told_local_size() or (collectives.local_size() if collectives is not None else 1)


def _with_ranks(request: Request, config: Config, groups: Sequence[FlatGroup], collectives: Collectives) -> Request:
    request = replace(request, ranks_nbytes=_ranks_nbytes(groups, collectives))
    if config.stage == 3 or config.schedule is not Schedule.AUTO:
        return request
    reason = f"auto: stage {config.stage} trades the updated parameters between the ranks in step()"
    return replace(request, schedule=Schedule.SYNCHRONOUS, schedule_reason=reason)


def _agree_on_schedule(request: Request, placement: Placement, collectives: Collectives) -> Placement:
    """With "auto" no rank defers its updates into the forward where another has to make them in step().

    The ranks wait for each other in both, so they would wait for updates twice in every step.

    Raises:
        PlacementError: as `make_placement`.
    """
    in_step = placement.schedule is Schedule.SYNCHRONOUS
    if not collectives.exchange(torch.tensor([in_step], dtype=torch.int64)).any() or in_step:
        return placement
    if request.schedule is not Schedule.AUTO:
        return placement
    reason = f"auto: {_NEED}, and the host memory of another rank does not hold all of them"
    return make_placement(replace(request, schedule=Schedule.SYNCHRONOUS, schedule_reason=reason))


def _ranks_nbytes(groups: Sequence[FlatGroup], collectives: Collectives) -> int:
    """Device bytes for transfers between ranks: one gradient being averaged, and what is lent meanwhile."""
    replicas = collectives.ranks.replicas
    reduction = max((reduction_nbytes(group, replicas) for group in groups if group.trainable), default=0)
    lent = [
        (g.layout.numel if collectives.uses_nccl else g.param_span.numel) * g.compute_dtype.itemsize
        for g in groups
        if g.is_gathered_from_ranks
    ]
    return reduction + max(lent, default=0)


def _device_budget(config: Config, local_size: int) -> int:
    if config.device.budget is not None:
        return config.device.budget
    uses_cuda = config.device.kind in (DeviceKind.AUTO, DeviceKind.CUDA) and torch.cuda.is_available()
    if uses_cuda:
        free_nbytes, _ = torch.cuda.mem_get_info()
        return int(free_nbytes) // 2
    return int(psutil.virtual_memory().available) // _DEVICE_SHARE // local_size


def _refuse_late_updates(config: Config) -> None:
    if config.durability is Durability.STEP and config.schedule is Schedule.DEFERRED:
        raise ConfigError(
            "schedule='deferred' contradicts durability='step': its updates are still to be made when a step is "
            "committed. Use schedule='synchronous' or 'overlapped'"
        )


def _refuse_durable_ranks(config: Config) -> None:
    if config.durability is Durability.STEP and config.schedule is Schedule.OVERLAPPED:
        raise ConfigError(
            "schedule='overlapped' with durability='step' and several ranks: it would overwrite, during backward, what "
            "a rank that is behind needs to go back to. Use schedule='synchronous'"
        )


def _request(
    config: Config,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    kernel: Kernel,
    device: Device,
    local_size: int,
    chunk_nbytes: int | None,
    initial_nbytes: int,
) -> Request:
    if config.schedule is Schedule.OVERLAPPED and config.precision is Precision.FP16:
        raise ConfigError(
            "schedule='overlapped' contradicts precision='fp16': a step can be skipped for an overflow only when all "
            "gradients are known before the first update; allowed: 'synchronous', 'deferred', 'auto'"
        )
    return Request(
        units=units,
        groups=groups,
        fields=kernel.fields,
        schedule=config.schedule,
        schedule_reason="asked for",
        host_budget_nbytes=host_budget_nbytes(config, local_size),
        device_budget_nbytes=device.budget.limit_nbytes,
        nvme_budget_nbytes=None if config.nvme.budget is None else config.nvme.budget // local_size,
        chunk_nbytes=chunk_nbytes,
        staging_nbytes=initial_nbytes,
        activations_nbytes=config.activations.held_nbytes // local_size,
        stored_activations_nbytes=config.activations.stored_nbytes // local_size,
        n_drives=len(config.nvme.paths or ()),
        is_durable=config.durability is Durability.STEP,
        local_size=local_size,
    )
