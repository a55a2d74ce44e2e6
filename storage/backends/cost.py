"""What I/O threads cost: CPU time in Python, in checks and in system calls, per block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class IoCost:
    """CPU seconds of the threads that move blocks; waiting takes none.

    Attributes:
        operations: blocks moved.
        python_s: in Python: taking blocks, preparing calls, completing tickets and what that starts.
        check_s: in the checks of what moved: checksums.
        system_s: in the calls that move bytes, most of it in the kernel.
    """

    operations: int = 0
    python_s: float = 0.0
    check_s: float = 0.0
    system_s: float = 0.0

    @property
    def python_s_per_operation(self) -> float:
        """Seconds of Python's threads for one block; 0 before the first."""
        return self.python_s / self.operations if self.operations else 0.0

    def __sub__(self, before: IoCost) -> IoCost:
        return IoCost(
            self.operations - before.operations,
            self.python_s - before.python_s,
            self.check_s - before.check_s,
            self.system_s - before.system_s,
        )

    @staticmethod
    def total(costs: Iterable[IoCost]) -> IoCost:
        """The sum."""
        total = IoCost()
        for cost in costs:
            total.operations += cost.operations
            total.python_s += cost.python_s
            total.check_s += cost.check_s
            total.system_s += cost.system_s
        return total
