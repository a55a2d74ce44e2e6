"""Budgets: who may hold how many bytes of a tier. Nothing allocates without a reservation."""

from __future__ import annotations

import threading
from collections import Counter, deque

from storage.closing import Releasing
from storage.errors import CapacityError, ClosedError
from storage.types import Ticket


class Reservation(Ticket, Releasing):
    """Bytes of a budget, or a place in its queue. Done once granted; give it back with `release`.

    One that leaves the queue ungranted completes with ClosedError, so that nobody waits for it for ever.
    """

    __slots__ = ("_budget", "_is_held", "nbytes", "owner")

    def __init__(self, budget: TierBudget, nbytes: int, owner: str) -> None:
        super().__init__(f"{nbytes} bytes of {budget.name} for {owner}")
        self._budget = budget
        self._is_held = False
        self.nbytes = nbytes
        self.owner = owner

    def release(self) -> None:
        """Give the bytes back, or leave the queue. Idempotent."""
        self._budget._release(self)

    def cancel(self) -> None:
        """The same as `release`, for a reservation that was not granted yet."""
        self._budget._release(self)


class TierBudget:
    """A ceiling in bytes. Thread safe; requests are granted in the order they were made.

    The lock is held for a few arithmetic operations; grants are announced outside of it.
    """

    def __init__(self, name: str, limit_nbytes: int) -> None:
        if limit_nbytes < 0:
            raise ValueError(f"the limit of budget {name!r} is {limit_nbytes} bytes; it must not be negative")
        self.name = name
        self.limit_nbytes = limit_nbytes
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self._queue: deque[Reservation] = deque()
        self._holders: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not reserved."""
        return self.limit_nbytes - self.used_nbytes

    def holders(self) -> dict[str, int]:
        """Bytes held, by owner."""
        with self._lock:
            return {owner: nbytes for owner, nbytes in self._holders.items() if nbytes}

    def waiting(self) -> list[str]:
        """Owners in the queue, first first."""
        with self._lock:
            return [reservation.owner for reservation in self._queue]

    def try_reserve(self, nbytes: int, owner: str) -> Reservation | None:
        """Bytes at once, or None when there are too few or somebody queues for them."""
        reservation = self._make(nbytes, owner)
        with self._lock:
            if self._queue or nbytes > self.free_nbytes:
                return None
            self._grant(reservation)
        reservation.set_done()
        return reservation

    def request(self, nbytes: int, owner: str) -> Reservation:
        """Bytes as soon as everybody before is served and there are enough.

        Raises:
            CapacityError: more than the limit, which could never be granted.
        """
        if nbytes > self.limit_nbytes:
            raise CapacityError(
                f"{owner} needs {nbytes} bytes of {self.name}, whose limit is {self.limit_nbytes} bytes"
            )
        reservation = self._make(nbytes, owner)
        with self._lock:
            self._queue.append(reservation)
        self._serve()
        return reservation

    def _make(self, nbytes: int, owner: str) -> Reservation:
        if nbytes < 0:
            raise ValueError(f"{owner} asked for {nbytes} bytes of {self.name}; sizes are not negative")
        return Reservation(self, nbytes, owner)

    def _grant(self, reservation: Reservation) -> None:
        reservation._is_held = True
        self.used_nbytes += reservation.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        self._holders[reservation.owner] += reservation.nbytes

    def _serve(self) -> None:
        granted = []
        with self._lock:
            while self._queue and self._queue[0].nbytes <= self.free_nbytes:
                reservation = self._queue.popleft()
                self._grant(reservation)
                granted.append(reservation)
        for reservation in granted:
            reservation.set_done()

    def _release(self, reservation: Reservation) -> None:
        is_cancelled = False
        with self._lock:
            if reservation._is_held:
                reservation._is_held = False
                self.used_nbytes -= reservation.nbytes
                self._holders[reservation.owner] -= reservation.nbytes
                if not self._holders[reservation.owner]:
                    del self._holders[reservation.owner]
            elif reservation in self._queue:
                self._queue.remove(reservation)
                is_cancelled = True
        if is_cancelled:
            reservation.set_exception(ClosedError(f"the request for {reservation.label} was taken back"))
        self._serve()
