"""Device memory under its budget: when it is full, whoever holds some that can be spared is asked for it."""

from __future__ import annotations

from collections.abc import Callable

from infinity.devices.base import Device, DeviceBlock
from infinity.errors import DeviceOutOfMemoryError

Spare = Callable[[], bool]


class DeviceMemory:
    """Allocates blocks of one device. Used by the training thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spares: tuple[Spare, ...] = ()

    def ask(self, *spares: Spare) -> None:
        """Who is asked for memory, in this order: each frees some and returns True, or has none to spare."""
        self._spares = spares

    def allocate(self, nbytes: int, owner: str) -> DeviceBlock:
        """A block of `nbytes` bytes.

        Raises:
            DeviceOutOfMemoryError: nobody is left that could spare any.
        """
        while True:
            try:
                return self._device.allocate(nbytes, owner)
            except DeviceOutOfMemoryError:
                if not any(spare() for spare in self._spares):
                    raise

    def free(self, block: DeviceBlock) -> None:
        """Give a block back. Idempotent."""
        self._device.free(block)
