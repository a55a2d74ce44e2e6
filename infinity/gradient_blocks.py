"""Device memory of gradients: reserved when a backward begins, given back when the gradient has left the device."""

from __future__ import annotations

from infinity.device_memory import DeviceMemory
from infinity.devices.base import DeviceBlock, Fence
from infinity.groups import FlatGroup
from infinity.observe.stalls import StallClock


class GradientBlocks:
    """Holds the blocks. Used by the training thread."""

    def __init__(self, memory: DeviceMemory, stalls: StallClock) -> None:
        self._memory = memory
        self._stalls = stalls
        self._reserved: dict[int, DeviceBlock] = {}  # by group
        self._leaving: list[tuple[list[Fence], DeviceBlock]] = []  # in the order in which they leave

    def reserve(self, group: FlatGroup) -> None:
        """Memory for the gradient that the backward of a group is about to give. Idempotent."""
        if group.index not in self._reserved:
            self._reserved[group.index] = self.allocate(group.flat_nbytes, f"gradient of {group.key}")

    def take(self, group: FlatGroup) -> DeviceBlock:
        """What was reserved for a group, or as much."""
        self.reserve(group)
        return self._reserved.pop(group.index)

    def cancel(self, group: FlatGroup) -> None:
        """What was reserved for a group goes back. Idempotent."""
        block = self._reserved.pop(group.index, None)
        if block is not None:
            self._memory.free(block)

    def cancel_all(self) -> None:
        """No backward is running any more: what was reserved and no gradient came for goes back."""
        for block in self._reserved.values():
            self._memory.free(block)
        self._reserved.clear()
        self.free_left()

    def close(self) -> None:
        """Give everything back without waiting: the device has ended its copies, or never will."""
        self.cancel_all()
        for _, block in self._leaving:
            self._memory.free(block)
        self._leaving.clear()

    def leave(self, fences: list[Fence], block: DeviceBlock) -> None:
        """The block goes back when all of `fences`, to which more may be added, have passed."""
        self._leaving.append((fences, block))

    def allocate(self, nbytes: int, owner: str) -> DeviceBlock:
        """Device memory, from what has been given back by now or can be spared.

        Raises:
            DeviceOutOfMemoryError: there is too little.
        """
        self.free_left()
        return self._memory.allocate(nbytes, owner)

    def free(self, block: DeviceBlock) -> None:
        """Give back a block of `allocate` or `take` that no copy uses. Idempotent."""
        self._memory.free(block)

    def free_first(self) -> bool:
        """Wait until the gradient that leaves the device next has left it. False when none does."""
        if not self._leaving:
            return False
        fences, block = self._leaving.pop(0)
        try:
            for fence in fences:
                self._stalls.wait_fence(fence, block.owner)
        finally:
            self._memory.free(block)
        return True

    def free_left(self) -> None:
        """Free the blocks whose gradients have arrived in host memory."""
        waiting = []
        for fences, block in self._leaving:
            if all(fence.done for fence in fences):
                self._memory.free(block)
            else:
                waiting.append((fences, block))
        self._leaving = waiting
