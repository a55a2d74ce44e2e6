"""The smallest budgets a model trains with, and comfortable ones that still are far below its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.config import Config, DeviceKind, Precision, Schedule
from infinity.demand import Request
from infinity.devices.cpu import CpuDevice, has_fast_bf16
from infinity.empty import empty_init
from infinity.grouping import make_groups
from infinity.init import staging_nbytes
from infinity.models.gpt import Gpt, GptShape
from infinity.optim.hyper import payload_nbytes
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.placement import make_placement
from infinity.sizes import MIB, TIB
from infinity.wrap_policies import units_of
from storage.align import align_up

_UNLIMITED_NBYTES = 1024 * TIB
_STATE_SHARE = 4  # budgets that are not given are together at most this fraction of the state
_DEVICE_COMFORT = 1.25
_HOST_COMFORT = 1.75


@dataclass(frozen=True, slots=True)
class Minima:
    """Smallest budgets with which a step makes progress, and the whole state, in bytes."""

    device_nbytes: int
    host_nbytes: int
    state_nbytes: int


class _ComputeDtype(CpuDevice):
    """Stands for the device of a run while its sizes are computed; nothing is ever allocated on it."""

    def __init__(self, kind: DeviceKind) -> None:
        super().__init__(_UNLIMITED_NBYTES)
        self._stands_for = kind

    def compute_dtype(self, precision: Precision) -> torch.dtype:
        if precision is Precision.FP32 or self._stands_for is DeviceKind.FAKE:
            return torch.float32
        on_cuda = self._stands_for is not DeviceKind.CPU and torch.cuda.is_available()
        return torch.bfloat16 if on_cuda or has_fast_bf16() else torch.float32


def minima_of(shape: GptShape, config: Config) -> Minima:
    """Ask the placement manager with unlimited budgets. Builds the model on `meta`; takes no memory."""
    with empty_init():
        model = Gpt(shape)
    device = _ComputeDtype(config.device.kind)
    threads = KernelThreads(1)
    try:
        kernel = kernel_for(config.precision, threads, config.optimizer, config.state_format)
        specs = units_of(model, config)
        groups, units = make_groups(specs, config.precision, kernel, device)
        schedule = Schedule.SYNCHRONOUS if config.schedule is Schedule.AUTO else config.schedule
        placement = make_placement(
            Request(
                units=units,
                groups=groups,
                fields=kernel.fields,
                schedule=schedule,
                schedule_reason="",
                host_budget_nbytes=_UNLIMITED_NBYTES,
                device_budget_nbytes=_UNLIMITED_NBYTES,
                nvme_budget_nbytes=None,
                chunk_nbytes=config.chunk,
                staging_nbytes=staging_nbytes(model, units, groups),
            )
        )
    finally:
        threads.close()
        device.close()
    shards_nbytes = sum(group.layout.payload_numel * group.shard_dtype.itemsize for group in groups)
    state_nbytes = shards_nbytes + sum(payload_nbytes(kernel.fields, group.layout.payload_numel) for group in groups)
    return Minima(placement.device_minimum_nbytes, placement.host_whole_nbytes, state_nbytes)


def comfortable_budgets(minima: Minima) -> tuple[int, int]:
    """Device and host budgets in bytes: room to read ahead, yet together a quarter of the state where that is possible.

    A model whose minima alone are more than that gets little more than its minima.
    """
    least_device = align_up(int(minima.device_nbytes * 1.05), MIB)
    least_host = align_up(int(minima.host_nbytes * 1.05), MIB)
    room = minima.state_nbytes // _STATE_SHARE
    device = max(least_device, min(align_up(int(minima.device_nbytes * _DEVICE_COMFORT), MIB), room // 2))
    host = max(least_host, min(align_up(int(minima.host_nbytes * _HOST_COMFORT), MIB), room - device))
    return device, host
