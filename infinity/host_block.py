"""Host memory that counts against a budget: leased and given back together with its reservation."""

from __future__ import annotations

from storage.budget import Reservation
from storage.pool import HostPool, Lease, Loan


class HostBlock:
    """Bytes of host memory; what `DeviceBlock` is on a device.

    Args:
        lease: the memory.
        reservation: what it counts against; None for what stays in host memory for good, which no part of the budget
            that is shared out while training holds.
    """

    __slots__ = ("lease", "reservation")

    def __init__(self, lease: Lease, reservation: Reservation | None = None) -> None:
        self.lease = lease
        self.reservation = reservation

    @classmethod
    def take(cls, pool: HostPool, reservation: Reservation, owner: str) -> HostBlock:
        """The memory for a reservation that was granted. Without memory the reservation is given back too.

        Raises:
            PoolExhaustedError: the system has none.
            ClosedError: the pool is closed.
        """
        try:
            return cls(pool.lease(reservation.nbytes, owner), reservation)
        except BaseException:
            reservation.release()
            raise

    @property
    def memory(self) -> memoryview:
        return self.lease.memory

    def lend(self) -> Loan:
        """A loan of the memory, for a device that computes where it lies."""
        return self.lease.lend()

    def renew(self, pool: HostPool) -> None:
        """Other memory with the same bytes: what was lent of the memory stays with whom it was lent to."""
        before, nbytes, owner = self.lease, self.lease.nbytes, self.lease.owner
        with before.lend() as loan:
            before.release()  # first: the pool need not have room for both
            self.lease = pool.lease(nbytes, owner)
            self.lease.memory[:] = loan.memory

    def release(self) -> None:
        """Give both back. Idempotent. Views of the memory must not be used afterwards."""
        self.lease.release()
        if self.reservation is not None:
            self.reservation.release()
