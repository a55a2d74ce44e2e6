"""From the `device` settings to a device."""

from __future__ import annotations

import logging
import os
import tempfile

import torch

from infinity.config import DeviceConfig, DeviceKind
from infinity.devices.base import Device
from infinity.devices.cpu import CpuDevice
from infinity.devices.cuda import CudaDevice
from infinity.devices.fake import FakeDevice
from infinity.errors import ConfigError
from infinity.testing.fake_gpu import FakeGpu

_log = logging.getLogger(__name__)


def make_device(config: DeviceConfig, budget_nbytes: int) -> Device:
    """The device that `config` asks for, holding at most `budget_nbytes`; `close()` it.

    Raises:
        ConfigError: CUDA is asked for and torch finds none, or the fake's file cannot be made.
    """
    kind = config.kind
    if kind is DeviceKind.AUTO:
        kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
        _log.info("device.kind = 'auto': computing on %s", kind.value)
    if kind is DeviceKind.CUDA:
        if not torch.cuda.is_available():
            raise ConfigError(f"device.kind = 'cuda': {describe_missing_cuda()}; allowed here: 'auto', 'cpu', 'fake'")
        return CudaDevice(budget_nbytes)
    if kind is DeviceKind.FAKE:
        return FakeDevice(_make_fake_gpu(config, budget_nbytes))
    return CpuDevice(budget_nbytes)


def describe_missing_cuda() -> str:
    """What torch reports about CUDA where it is not available."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} was built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f", CUDA_VISIBLE_DEVICES = {visible!r}"
    return (
        f"torch {torch.__version__} was built for CUDA {torch.version.cuda} but finds no usable device "
        f"({torch.cuda.device_count()} visible{hint}); see what nvidia-smi says about the driver"
    )


def _make_fake_gpu(config: DeviceConfig, budget_nbytes: int) -> FakeGpu:
    path = tempfile.gettempdir() if config.path is None else config.path
    try:
        return FakeGpu(
            path,
            budget_nbytes,
            h2d_bytes_per_s=config.h2d_bytes_per_s,
            d2h_bytes_per_s=config.d2h_bytes_per_s,
            latency_s=config.latency_s or 0.0,
        )
    except OSError as error:
        raise ConfigError(f"device.path = {str(path)!r}: {error.strerror or error}") from error
