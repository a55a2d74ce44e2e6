"""Assembly: from a model and a config to the parts of an engine, in the one order in which they can be made."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from torch import nn

from infinity.config import Config, DeviceKind, Precision, Schedule
from infinity.devices.base import Device
from infinity.devices.select import make_device
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.gather import Gatherer
from infinity.gradients import GradientSink, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup, Unit
from infinity.init import staging_nbytes
from infinity.io_loop import IoLoop
from infinity.observe.stalls import StallClock
from infinity.observe.trace import Trace
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import AccessOrder
from infinity.placement import Placement, Request, make_placement
from infinity.readahead import ReadAhead
from infinity.released import Access
from infinity.residency import HostCopy
from infinity.runtime import Failure, Runtime
from infinity.units import UnitSpec, partition
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions

_log = logging.getLogger(__name__)
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
        kernel = kernel_for(config.precision, threads)
        groups, units = _make_groups(specs, config.precision, kernel, device)
        placement = _plan(model, config, units, groups, kernel, device)
        runtime = _allocate(model, config, access, placement, units, groups, kernel, device, stack)
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
                len(groups), f"{spec.name or 'root'}/{kind}", own, shard_dtype=shard, compute_dtype=compute
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


def _open_store(config: Config, placement: Placement, stack: ExitStack) -> ShardStore | None:
    if not placement.nvme_nbytes:
        return None
    if config.nvme.paths is None:
        folder = Path(tempfile.mkdtemp(prefix="infinity-swap-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        paths: Sequence[Path] = (folder,)
    else:
        paths = config.nvme.paths
    options = StorageOptions(
        engine=config.nvme.engine.value, block_nbytes=config.nvme.block_nbytes, threads=config.nvme.threads
    )
    store = ShardStore.open(paths, placement.nvme_nbytes, options=options)
    stack.callback(store.close)
    return store


def _create_keys(
    store: ShardStore, placement: Placement, groups: Sequence[FlatGroup], states: dict[int, GroupState]
) -> None:
    for group in groups:
        if group.index not in placement.pinned_params:
            store.create(group.key, group.shard_nbytes)
        if group.index in states and group.index not in placement.pinned_states:
            for record in states[group.index].records:
                store.create(record.key, record.nbytes)
        if group.index in placement.spilled_gradients:
            store.create(gradient_key(group), gradient_nbytes(group))


def _allocate(
    model: nn.Module,
    config: Config,
    access: Access,
    placement: Placement,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    kernel: Kernel,
    device: Device,
    stack: ExitStack,
) -> Runtime:
    states = {g.index: GroupState.build(g, placement.chunk_numel, kernel.fields) for g in groups if g.trainable}
    register = device.host_register() if config.host.pin is not False else None
    pool = HostPool(placement.host_budget_nbytes, register=register)
    stack.callback(pool.close)
    made: list[Runtime] = []
    stack.callback(_free_memory, made)
    store = _open_store(config, placement, stack)
    if store is not None:
        _create_keys(store, placement, groups, states)
    budgets = {
        "window": TierBudget("read-ahead window", placement.window_nbytes),
        "gradients": TierBudget("gradients", placement.gradients_nbytes),
        "transit": TierBudget("gradient transit", placement.transit_nbytes),
        "pipeline": TierBudget("update pipeline", placement.pipeline_nbytes),
        "device": device.budget,
    }
    io = IoLoop()
    stack.callback(io.close)
    worker = ThreadPoolExecutor(1, thread_name_prefix="infinity-optimizer")
    stack.callback(worker.shutdown)
    trace = Trace()
    failure = Failure()
    copies = [HostCopy(group, pinned=group.index in placement.pinned_params) for group in groups]
    for copy in copies:
        copy.keep_at_turn = copy.group.index in placement.keep_at_turn
        copy.keep_at_boundary = copy.group.index in placement.keep_at_boundary
    read_ahead = ReadAhead(
        store=store,
        pool=pool,
        window=budgets["window"],
        copies=copies,
        groups_of_unit=[[g.index for g in unit.groups] for unit in units],
        keep_after_backward=placement.schedule is Schedule.OVERLAPPED,
    )
    pipeline = UpdatePipeline(
        store=store,
        pool=pool,
        budget=budgets["pipeline"],
        kernel=kernel,
        worker=worker,
        read_ahead=read_ahead,
        on_failure=failure.note,
        on_chunk=lambda name, start_s, duration_s: trace.add(name, "optimizer", start_s, duration_s),
    )
    stalls = StallClock(
        config.nvme.io_timeout_s,
        progress=lambda: runtime.progress(),  # noqa: PLW0108 - made below
        report=lambda: runtime.report(),  # noqa: PLW0108 - made below
        on_stall=lambda cause, start_s, duration_s: trace.add(cause, "stall", start_s, duration_s),
    )
    for group in groups:
        group.attach(device.torch_device, access)
    runtime = Runtime(
        model=model,
        config=config,
        placement=placement,
        units=units,
        groups=groups,
        copies=copies,
        states=states,
        kernel=kernel,
        device=device,
        pool=pool,
        budgets=budgets,
        store=store,
        io=io,
        worker=worker,
        stalls=stalls,
        order=AccessOrder([unit.index for unit in units if not unit.resident]),
        read_ahead=read_ahead,
        pipeline=pipeline,
        gatherer=Gatherer(device, groups, copies, read_ahead, io, stalls),
        sink=GradientSink(
            device=device,
            pool=pool,
            store=store,
            held=budgets["gradients"],
            transit=budgets["transit"],
            spilled=placement.spilled_gradients,
            updates_in_flight=lambda: any(not update.written.done for update in runtime.in_flight),
            stalls=stalls,
        ),
        trace=trace,
        failure=failure,
        closing=ExitStack(),
    )
    made.append(runtime)
    _pin_states(runtime)
    return runtime


def _free_memory(made: Sequence[Runtime]) -> None:
    for runtime in made:
        runtime.free_memory()


def _pin_states(runtime: Runtime) -> None:
    """Host memory for the state that is placed there for good; it is born zero."""
    for index in runtime.placement.pinned_states:
        if index in runtime.states:
            for record in runtime.states[index].records:
                record.lease = runtime.pool.lease(record.nbytes, record.key)
