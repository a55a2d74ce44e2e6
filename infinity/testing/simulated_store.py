"""A shard store on the running loop's time: for scheduler tests on a virtual clock, without disks or threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.shard_io import SimulatedIo
from storage.align import PAGE_NBYTES
from storage.ordering import KeyOrder, Operation
from storage.types import Op, Priority, TrafficTag


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """One finished transfer. Times in seconds of the loop."""

    op: Op
    key: str
    offset: int
    nbytes: int
    priority: Priority
    tag: TrafficTag
    submitted_s: float
    start_s: float
    end_s: float


class SimulatedStore(SimulatedIo):
    """Holds bytes in memory; a transfer takes `latency_s + nbytes / bandwidth` of the running loop's time.

    Reads and writes have a channel of their own unless `is_shared`; on each channel one transfer at a time, lower
    priority value first, then as submitted.

    Args:
        read_bytes_per_s, write_bytes_per_s: bandwidths.
        latency_s: fixed part of every transfer.
        is_shared: reads and writes take turns on one channel.
        duration_s: replaces the model: seconds for (op, key, nbytes).
        failure: asked before a transfer ends; an exception makes it fail with that.

    Example:
        ```python
        store = SimulatedStore(read_bytes_per_s=1e9, write_bytes_per_s=5e8, latency_s=1e-4)
        store.create("blocks.0", 4096)
        ```
    """

    def __init__(
        self,
        *,
        read_bytes_per_s: float = 1e9,
        write_bytes_per_s: float = 1e9,
        latency_s: float = 0.0,
        is_shared: bool = False,
        duration_s: Callable[[Op, str, int], float] | None = None,
        failure: Callable[[Op, str], BaseException | None] | None = None,
    ) -> None:
        super().__init__()
        self._bandwidth = {Op.READ: read_bytes_per_s, Op.WRITE: write_bytes_per_s}
        self._latency_s = latency_s
        self._duration_s = duration_s
        self._failure = failure
        self._bytes: dict[str, bytearray] = {}
        self._channel = {op: Op.READ if is_shared else op for op in Op}
        self._queues: dict[Op, list[Operation]] = {op: [] for op in Op}
        self._is_busy = dict.fromkeys(Op, False)
        self.log: list[SimulatedTransfer] = []

    def create(self, key: str, nbytes: int, content: bytes | None = None) -> None:
        """Make a key; its content is zero unless given."""
        self._bytes[key] = bytearray(content if content is not None else bytes(nbytes))
        self._orders[key] = KeyOrder()

    def content(self, key: str) -> bytes:
        """What is stored under a key now."""
        return bytes(self._bytes[key])

    def _check_span(self, op: Op, key: str, start: int, stop: int) -> None:
        there = len(self._bytes[key])
        if start % PAGE_NBYTES or stop % PAGE_NBYTES or stop > there:
            raise ValueError(f"{op.value} of {key}: bytes {start} to {stop} of {there}")

    def _begin(self, operation: Operation) -> None:
        lost = self._orders[operation.key].lost_in(operation.start, operation.stop)
        if operation.op is Op.READ and lost is not None:
            self._finish(operation, lost)
            return
        channel = self._channel[operation.op]
        self._queues[channel].append(operation)
        self._serve(channel)

    def _promoted(self, operations: Sequence[Operation]) -> None:
        """Nothing to do: whoever is served next is chosen by the priority it has then."""

    def _serve(self, channel: Op) -> None:
        queue = self._queues[channel]
        if self._is_busy[channel] or not queue:
            return
        self._is_busy[channel] = True
        operation = min(queue, key=lambda waiting: waiting.priority)  # the first of them, as submitted
        queue.remove(operation)
        loop = asyncio.get_running_loop()
        seconds = self._seconds(operation.op, operation.key, len(operation.memory))
        loop.call_later(seconds, self._end, operation, loop.time())

    def _seconds(self, op: Op, key: str, nbytes: int) -> float:
        if self._duration_s is not None:
            return self._duration_s(op, key, nbytes)
        return self._latency_s + nbytes / self._bandwidth[op]

    def _end(self, operation: Operation, start_s: float) -> None:
        error = self._failure(operation.op, operation.key) if self._failure is not None else None
        if error is None:
            self._move(operation, start_s)
        channel = self._channel[operation.op]
        self._is_busy[channel] = False
        self._finish(operation, error)
        self._serve(channel)

    def _move(self, operation: Operation, start_s: float) -> None:
        stored = memoryview(self._bytes[operation.key])[operation.start : operation.stop]
        if operation.op is Op.READ:
            operation.memory[:] = stored
        else:
            stored[:] = operation.memory
        self.log.append(
            SimulatedTransfer(
                op=operation.op,
                key=operation.key,
                offset=operation.start,
                nbytes=len(operation.memory),
                priority=operation.priority,
                tag=operation.tag,
                submitted_s=self._submitted_s[operation],
                start_s=start_s,
                end_s=asyncio.get_running_loop().time(),
            )
        )
