"""Memory for parameters while their modules initialise them: of the host, or of the device for what is large.

A module fills a parameter in one go, so its memory has to be there as a whole. Where groups pass host memory in chunks
that is not in the host budget. A device that computes in host memory has it in its own, which is empty before training.
On a GPU the values would be others, because its random numbers are: there host memory has to hold them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.devices.base import Device, DeviceBlock
from infinity.runtime import Runtime
from storage.closing import Releasing
from storage.pool import Lease

LARGE_NBYTES = 256 << 10


def is_large(nbytes: int) -> bool:
    """Whether memory of this size is the device's where groups are chunked."""
    return nbytes > LARGE_NBYTES


def can_stage(device: Device) -> bool:
    """Whether modules initialise parameters in the memory of a device as they do in that of the host."""
    return device.torch_device.type == "cpu"


@dataclass(slots=True, eq=False)
class Staged(Releasing):
    """Memory for one parameter or group, as a 1-D tensor; given back at the end of its block.

    Attributes:
        lease: None where the memory is the device's.
    """

    values: torch.Tensor
    device: Device
    lease: Lease | None = None
    block: DeviceBlock | None = None

    def release(self) -> None:
        """Give it back."""
        if self.lease is not None:
            self.lease.release()
        if self.block is not None:
            self.device.free(self.block)


class StagingMemory:
    """Hands it out."""

    def __init__(self, runtime: Runtime) -> None:
        self._pool = runtime.pool
        self._device = runtime.device
        self._has_device = runtime.placement.stages_on_device

    def take(self, numel: int, dtype: torch.dtype, owner: str) -> Staged:
        """Memory with undefined content.

        Raises:
            PoolExhaustedError, DeviceOutOfMemoryError: there is too little.
        """
        nbytes = numel * dtype.itemsize
        if self._has_device and is_large(nbytes):
            block = self._device.allocate(nbytes, owner)
            return Staged(torch.empty(numel, dtype=dtype), self._device, block=block)
        lease = self._pool.lease(nbytes, owner)
        return Staged(torch.frombuffer(lease.memory, dtype=dtype, count=numel), self._device, lease=lease)
