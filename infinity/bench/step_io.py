"""What the drives need for the bytes of one training step by themselves: the same bytes, nothing else going on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from storage.align import PAGE_NBYTES, align_up
from storage.checksums import Digests
from storage.errors import IoTimeoutError
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Ticket, TrafficTag

_TAG = TrafficTag("bench", 0)
_MOST_TRANSFER_NBYTES = 8 << 20
_LEAST_TRANSFERS = 32  # of a small step
_MOST_KEYS = 256  # 2 GiB: beyond the caches that drives have
_DEPTH = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that the transfers of a step took, and the processor seconds in them: checksums, system calls, Python."""

    elapsed_s: float
    cpu_s: float


class StepTraffic:
    """A store in the directories of a run that moves the bytes of a step of it, in whole transfers. Close it.

    Args:
        read_nbytes, write_nbytes: bytes of one step, on all drives together.
    """

    def __init__(self, paths: Sequence[Path], options: StorageOptions, read_nbytes: int, write_nbytes: int) -> None:
        share = align_up(max(read_nbytes, write_nbytes, 1) // _LEAST_TRANSFERS + 1, PAGE_NBYTES)
        size = min(share, _MOST_TRANSFER_NBYTES)
        self._counts = {Op.READ: round(read_nbytes / size), Op.WRITE: round(write_nbytes / size)}
        n_keys = min(max(self._counts.values()), _MOST_KEYS)
        self._keys = [f"transfer{number}" for number in range(n_keys)]
        self._closing = ExitStack()
        try:
            pool = HostPool(_DEPTH * size)
            self._closing.callback(pool.close)
            self._leases = [pool.lease(size, "bench") for _ in range(_DEPTH)]
            for lease in self._leases:
                self._closing.callback(lease.release)
            self._store = ShardStore.open(list(paths), n_keys * size, options=options)
            self._closing.callback(self._store.close)  # first: after an error transfers may be in flight in this memory
            for key in self._keys:
                self._store.create(key, size)
            self._run([Op.WRITE] * n_keys)  # what is read has been written
        except BaseException:
            self.close()
            raise

    def measure(self) -> StepCost:
        """The reads and writes of one step, evenly mixed and a few at a time."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        self._run(_mixed(self._counts[Op.READ], self._counts[Op.WRITE]))
        return StepCost(time.perf_counter() - started_s, time.process_time() - started_cpu_s)

    def close(self) -> None:
        """Give the files back. Idempotent."""
        self._closing.close()

    def _run(self, operations: Sequence[Op]) -> None:
        in_flight: deque[Ticket] = deque()
        numbers = {Op.READ: 0, Op.WRITE: len(self._keys) // 2}  # apart: nobody waits for the same key
        for number, op in enumerate(operations):
            if len(in_flight) == _DEPTH:
                _finish(in_flight.popleft())
            key = self._keys[numbers[op] % len(self._keys)]
            numbers[op] += 1
            memory = self._leases[number % _DEPTH].memory
            if op is Op.READ:
                in_flight.append(self._store.submit_read(key, memory, tag=_TAG))
            else:  # checksums on this thread, as updates compute theirs, and not on those that wait for the drive
                digests = Digests.of(memory, 0) if self._store.notes_digests else None
                in_flight.append(self._store.submit_write(key, memory, tag=_TAG, digests=digests))
        for ticket in in_flight:
            _finish(ticket)


def _finish(ticket: Ticket) -> None:
    if not ticket.wait(_TIMEOUT_S):
        raise IoTimeoutError(f"{ticket.label} is not over after {_TIMEOUT_S:g} s; the drive is stuck or far too slow")
    ticket.result()


def _mixed(reads: int, writes: int) -> list[Op]:
    """So many of each, spread evenly."""

    def places(op: Op, count: int) -> Iterator[tuple[float, Op]]:
        return (((number + 0.5) / count, op) for number in range(count))

    return [op for _, op in sorted([*places(Op.READ, reads), *places(Op.WRITE, writes)], key=lambda place: place[0])]
