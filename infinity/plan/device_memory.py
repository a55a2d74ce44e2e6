"""Device memory of a simulated rank, as the engine hands it out: what is on its way down gives way first."""

from __future__ import annotations

from collections import deque

from infinity.errors import InfinityError
from infinity.groups import FlatGroup
from infinity.observe.stalls import StallCause
from infinity.plan.thread_time import ThreadTime
from infinity.plan.virtual import VirtualFence
from storage.budget import Reservation, TierBudget


class DeviceMemory:
    """Blocks of gathered groups and of gradients. Used by the training thread.

    Attributes:
        gathered: blocks of groups in use.
        ahead: uploads started for the next unit, which give way when memory is short.
        gradients: blocks of gradients that backward fills.
    """

    def __init__(self, budget: TierBudget, time: ThreadTime) -> None:
        self._budget = budget
        self._time = time
        self.gathered: dict[int, Reservation] = {}
        self.ahead: dict[int, tuple[VirtualFence, Reservation]] = {}
        self.gradients: dict[int, Reservation] = {}
        self._retiring: deque[tuple[VirtualFence, Reservation]] = deque()

    def try_reserve(self, group: FlatGroup) -> Reservation | None:
        """A block without waiting for one."""
        return self._budget.try_reserve(group.flat_nbytes, group.key)

    def retire(self, index: int, fence: VirtualFence) -> None:
        """The block of a gradient is free once it has been copied away."""
        block = self.gradients.pop(index, None)
        if block is not None:
            self._retiring.append((fence, block))

    def release(self, index: int) -> None:
        """A group is no longer in use."""
        block = self.gathered.pop(index, None)
        if block is not None:
            block.release()

    async def allocate(self, group: FlatGroup, owner: str) -> Reservation:
        """Device memory. Gradients on their way down give theirs back first, then what is ahead."""
        device = self._budget
        while True:
            while self._retiring and self._retiring[0][0].done:
                self._retiring.popleft()[1].release()
            if (block := device.try_reserve(group.flat_nbytes, owner)) is not None:
                return block
            if self._retiring:
                with self._time.stalled(StallCause.LINK):
                    await self._retiring[0][0]
            elif self.ahead:
                _, (fence, ahead) = self.ahead.popitem()
                await fence
                ahead.release()
            else:
                raise InfinityError(f"{owner} needs {group.flat_nbytes} bytes of the device: {device.holders()}")
