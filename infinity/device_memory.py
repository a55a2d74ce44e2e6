"""Device memory under its budget: when it is full, whoever holds some that can be spared is asked for it."""

from __future__ import annotations

from collections.abc import Callable

from infinity.devices.base import Device, DeviceBlock
from infinity.errors import DeviceOutOfMemoryError
from infinity.observe.shortages import attach_report

Spare = Callable[[], bool]


class DeviceMemory:
    """Allocates blocks of one device. Used by the training thread.

    Args:
        report: text that tells who holds what, for the error.
    """

    def __init__(self, device: Device, report: Callable[[], str]) -> None:
        self._device = device
        self._report = report
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
            except DeviceOutOfMemoryError as error:
                if not any(spare() for spare in self._spares):
                    attach_report(error, self._report)
                    raise

    def free(self, block: DeviceBlock) -> None:
        """Give a block back. Idempotent."""
        self._device.free(block)
