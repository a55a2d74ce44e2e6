"""What computing loses to what goes on beside it; `thread_phases` tells how much that is on a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contention:
    """Seconds that computing loses to what goes on beside it; 0 where a device of its own computes.

    Attributes:
        kernel: for each second of the optimizer.
        transfer_s, byte_s: for each transfer that ends, and for each of its bytes.
    """

    kernel: float = 0.0
    transfer_s: float = 0.0
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kernel", "transfer_s", "byte_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of the contention is {getattr(self, name)}, and should be 0 or more")

    def transfers_s(self, transfers: float, nbytes: float) -> float:
        """Lost to so many transfers of so many bytes together."""
        return transfers * self.transfer_s + nbytes * self.byte_s


NO_CONTENTION = Contention()
