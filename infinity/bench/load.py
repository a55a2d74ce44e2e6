"""A load on one backend: so many transfers in flight, the next one submitted by the completion of the last."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from infinity.bench.profiles import Order, Workload
from infinity.bench.target import Target
from infinity.errors import ConfigError
from infinity.sizes import format_minimum_nbytes, format_nbytes
from storage.backends.base import Backend
from storage.types import IoRequest, Op, Priority, Ticket

_SEED = 20240229
_PRIORITIES = {Op.READ: Priority.READ_AHEAD, Op.WRITE: Priority.WRITE}


def check_fits(workload: Workload, file_nbytes: int) -> None:
    """Refuse a file in which transfers in flight could overlap.

    Raises:
        ConfigError: it holds too few of them.
    """
    need_nbytes = 2 * workload.transfers * workload.transfer_nbytes
    if file_nbytes < need_nbytes:
        raise ConfigError(
            f"a file of {format_nbytes(file_nbytes)} is too small for {workload.profile!r}, which has "
            f"{workload.transfers} transfers of {format_nbytes(workload.transfer_nbytes)} in flight: "
            f"--size must be at least {format_minimum_nbytes(need_nbytes)}"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which transfers, in order; begins again at the end. No two in flight overlap, however the mix falls."""

    ops: list[Op]
    offsets: list[int]
    nbytes: int

    @classmethod
    def of(cls, workload: Workload, file_nbytes: int) -> Schedule:
        """As many transfers as the file holds.

        Raises:
            ConfigError: those are too few.
        """
        check_fits(workload, file_nbytes)
        count = file_nbytes // workload.transfer_nbytes
        random = np.random.default_rng(_SEED)
        places = random.permutation(count) if workload.order is Order.RANDOM else np.arange(count)
        # Shares are exact within every hundred transfers, in random order.
        hundreds = [random.permutation(100) < workload.read_percent for _ in range(-(-count // 100))]
        is_read = np.concatenate(hundreds)[:count].tolist()
        return cls(
            [Op.READ if read else Op.WRITE for read in is_read],
            (places * workload.transfer_nbytes).tolist(),
            workload.transfer_nbytes,
        )


class Load:
    """Runs a schedule on a backend until the time is over, then lets what is in flight land.

    Args:
        memories: one piece of page-aligned memory per transfer in flight, each as long as a transfer.
        seconds: after so many nothing more is submitted.
        most_transfers: stop after so many, if the time is not over before.
    """

    def __init__(
        self,
        backend: Backend,
        target: Target,
        schedule: Schedule,
        memories: Sequence[memoryview],
        *,
        seconds: float,
        most_transfers: int | None = None,
    ) -> None:
        self.ended = Ticket(f"load on {target.directory}")
        self.ended_s = 0.0
        self._backend = backend
        self._fd, self._path = target.file.fd, target.path
        self._schedule = schedule
        self._length = len(schedule.ops)
        self._memories = memories
        self._seconds = seconds
        self._deadline_s = 0.0
        self._most = most_transfers
        self._numbers = itertools.count()  # next() is atomic: several threads complete transfers
        self._latencies_ns: dict[Op, list[int]] = {Op.READ: [], Op.WRITE: []}
        self._active = len(memories)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Submit the first transfers."""
        self._deadline_s = time.perf_counter() + self._seconds
        for memory in self._memories:
            self._submit(memory)

    def stop(self) -> None:
        """Submit nothing more."""
        self._deadline_s = 0.0

    def latencies_ns(self, op: Op) -> npt.NDArray[np.int64]:
        """Of every transfer in one direction, in the order in which they ended."""
        return np.array(self._latencies_ns[op], dtype=np.int64)

    def moved_nbytes(self, op: Op) -> int:
        """Bytes that have been moved in one direction until now."""
        return len(self._latencies_ns[op]) * self._schedule.nbytes

    @property
    def total_nbytes(self) -> int:
        """Bytes that have been moved in both directions until now."""
        return sum(self.moved_nbytes(op) for op in Op)

    def _submit(self, memory: memoryview) -> None:
        number = next(self._numbers)
        if self._error is not None or (self._most is not None and number >= self._most):
            self._leave(None)
            return
        place = number % self._length
        op = self._schedule.ops[place]
        request = IoRequest(
            op=op,
            fd=self._fd,
            path=self._path,
            offset=self._schedule.offsets[place],
            memory=memory,
            priority=_PRIORITIES[op],
            key="bench",
        )
        started_ns = time.perf_counter_ns()

        def landed(ticket: Ticket) -> None:
            if ticket.exception is not None:
                self._leave(ticket.exception)
                return
            self._latencies_ns[op].append(time.perf_counter_ns() - started_ns)
            if time.perf_counter() >= self._deadline_s:
                self._leave(None)
            else:
                self._submit(memory)

        request.ticket.add_done_callback(landed)
        try:
            self._backend.submit(request)
        except Exception as error:  # the ticket carries it, as if the transfer had failed
            request.ticket.set_exception(error)

    def _leave(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._active -= 1
            is_last = self._active == 0
        if not is_last:
            return
        self.ended_s = time.perf_counter()
        self.ended.complete(self._error)
