"""Drives on virtual time: a shard store whose transfers take as long as modelled drives would need.

A drive is a fluid server. In each direction the transfer of the highest priority moves, at a rate that depends on
whether something moves the other way; a more urgent transfer overtakes at once, as it does on a real queue at the next
block. No byte is stored anywhere.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity.shard_io import SimulatedIo
from storage.ordering import Operation
from storage.types import Op, TrafficTag

_RESOLUTION_S = 1e-9  # a transfer that would end within this has ended


@dataclass(frozen=True, slots=True)
class DriveModel:
    """What a drive does, as the engine sees it. Rates in bytes/s.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: with nothing going the other way, for as long as a run lasts.
        latency_s: before the first byte of a transfer; latencies of queued transfers overlap.
        duplex: 1: each direction keeps its rate whatever the other does; 0: they share the time of the drive.
        read_share: the share of the time of both that reads get while both wait; writes get the rest.
        slc_nbytes, slc_write_bytes_per_s: a cache that takes writes faster until it is full; it drains at the
            sustained rate. 0: none.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 1e-4
    duplex: float = 0.5
    read_share: float = 0.5
    slc_nbytes: float = 0.0
    slc_write_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.read_bytes_per_s <= 0 or self.write_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"rates must be positive and the latency not negative: {self}")
        if not 0 <= self.duplex <= 1 or not 0 < self.read_share < 1:
            raise ValueError(f"duplex must be from 0 to 1, read_share between 0 and 1: {self}")

    def utilisation(self) -> tuple[float, float]:
        """What part of its own rate each direction (read, write) has while both are busy.

        The part of the time that both directions can use at once is `duplex`: with d = 1 both are 1, with d = 0 they
        add up to 1.
        """
        d, r = self.duplex, self.read_share
        scale = 1.0 / (max(r, 1 - r) + (1 - d) * min(r, 1 - r))
        return min(r * scale, 1.0), min((1 - r) * scale, 1.0)

    def seconds(self, read_nbytes: float, write_nbytes: float) -> float:
        """Least time in which the drive can move so much, in any order."""
        read_s = read_nbytes / self.read_bytes_per_s
        write_s = write_nbytes / max(self.write_bytes_per_s, self.slc_write_bytes_per_s)
        return max(read_s, write_s) + (1 - self.duplex) * min(read_s, write_s)

    def times(self, count: int) -> DriveModel:
        """So many of these drives, used as one."""
        return DriveModel(
            self.read_bytes_per_s * count,
            self.write_bytes_per_s * count,
            self.latency_s,
            self.duplex,
            self.read_share,
            self.slc_nbytes * count,
            self.slc_write_bytes_per_s * count,
        )


class _Piece:
    """The part of a transfer that one drive moves."""

    __slots__ = ("on_end", "remaining")

    def __init__(self, nbytes: float, on_end: Callable[[], None]) -> None:
        self.remaining = nbytes
        self.on_end = on_end


class DriveServer:
    """One drive, or several alike, on the running loop's time. `busy_s` counts seconds in which a direction moved."""

    def __init__(self, model: DriveModel) -> None:
        self.model = model
        self.busy_s = dict.fromkeys(Op, 0.0)
        self.moved = dict.fromkeys(Op, 0.0)
        self.both_busy_s = 0.0
        self._queues: dict[Op, list[tuple[int, int, _Piece]]] = {op: [] for op in Op}
        self._rates = dict.fromkeys(Op, 0.0)
        self._slc_free = model.slc_nbytes
        self._sequence = 0
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, op: Op, nbytes: float, priority: int, on_end: Callable[[], None]) -> None:
        """Queue a piece; `on_end` is called when it has been moved."""
        self._advance()
        self._sequence += 1
        heapq.heappush(self._queues[op], (priority, self._sequence, _Piece(nbytes, on_end)))
        self._reschedule()

    def _advance(self) -> None:
        """Move what has been moved since the last time."""
        now_s = asyncio.get_running_loop().time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if passed_s <= 0:
            return
        model = self.model
        for op, rate in self._rates.items():
            if rate:
                self._queues[op][0][2].remaining -= rate * passed_s
                self.busy_s[op] += passed_s
                self.moved[op] += rate * passed_s
        self.both_busy_s += passed_s if all(self._rates.values()) else 0.0
        if model.slc_nbytes:
            filled = self._rates[Op.WRITE] - model.write_bytes_per_s
            self._slc_free = min(max(self._slc_free - filled * passed_s, 0.0), model.slc_nbytes)

    def _reschedule(self) -> None:
        """Decide what moves how fast from now on, and look again when the first of it ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        reads, writes = (bool(self._queues[op]) for op in (Op.READ, Op.WRITE))
        read_part, write_part = self.model.utilisation() if reads and writes else (1.0, 1.0)
        is_cached = self._slc_free > 1.0
        write_rate = self.model.slc_write_bytes_per_s if is_cached else self.model.write_bytes_per_s
        self._rates[Op.READ] = self.model.read_bytes_per_s * read_part if reads else 0.0
        self._rates[Op.WRITE] = write_rate * write_part if writes else 0.0
        ends = [self._queues[op][0][2].remaining / rate for op, rate in self._rates.items() if rate]
        if is_cached and self._rates[Op.WRITE] > self.model.write_bytes_per_s:
            ends.append(self._slc_free / (self._rates[Op.WRITE] - self.model.write_bytes_per_s))
        if ends:
            self._timer = asyncio.get_running_loop().call_later(max(min(ends), 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        ended = []
        for op, rate in self._rates.items():
            queue = self._queues[op]
            if rate and queue[0][2].remaining <= rate * _RESOLUTION_S:
                ended.append(heapq.heappop(queue)[2])
        self._reschedule()
        for piece in ended:
            piece.on_end()


@dataclass(frozen=True, slots=True)
class Moved:
    """One finished transfer. Times in seconds of the loop."""

    op: Op
    key: str
    offset: int
    nbytes: int
    tag: TrafficTag
    submitted_s: float
    start_s: float  # when nothing before it stood in its way
    end_s: float


class SimulatedDrives(SimulatedIo):
    """A store over modelled drives; keys are spread by speed. No byte is moved.

    Args:
        drives: one model per drive; drives alike are simulated once.
        keep_log: whether every transfer is noted in `log`.
        hand_over_s: from the end of a transfer until those who wait for it know; the drive goes on meanwhile.
    """

    def __init__(self, drives: Sequence[DriveModel], *, keep_log: bool = False, hand_over_s: float = 0.0) -> None:
        super().__init__()
        counts = Counter(drives)
        self.servers = [DriveServer(model.times(count)) for model, count in counts.items()]
        speeds = [s.model.read_bytes_per_s + s.model.write_bytes_per_s for s in self.servers]
        self._shares = [speed / sum(speeds) for speed in speeds]
        self._latency_s = max((model.latency_s for model in drives), default=0.0)
        self._keep_log = keep_log
        self._hand_over_s = hand_over_s
        self._started_s: dict[Operation, float] = {}
        self.log: list[Moved] = []
        self.traffic: Counter[tuple[Op, str, int]] = Counter()  # bytes by direction, kind and step

    def nbytes(self, op: Op, step: int) -> int:
        """Bytes of one step in one direction."""
        return sum(n for (way, _, at), n in self.traffic.items() if (way, at) == (op, step))

    def _check_span(self, op: Op, key: str, start: int, stop: int) -> None:
        """Nothing is stored: every span is there."""

    def _begin(self, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        self._started_s[operation] = loop.time()
        loop.call_later(self._latency_s, self._move, operation)

    def _move(self, operation: Operation) -> None:
        nbytes, left = len(operation.memory), len(self.servers)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._note(operation)
                asyncio.get_running_loop().call_later(self._hand_over_s, self._finish, operation)

        for server, share in zip(self.servers, self._shares, strict=True):
            server.submit(operation.op, nbytes * share, int(operation.priority), ended)

    def _note(self, operation: Operation) -> None:
        """Count a transfer that has ended."""
        tag, nbytes = operation.tag, len(operation.memory)
        submitted_s, started_s = self._submitted_s[operation], self._started_s.pop(operation)
        self.traffic[operation.op, tag.kind, tag.step] += nbytes
        if self._keep_log:
            end_s = asyncio.get_running_loop().time()
            key, start = operation.key, operation.start
            self.log.append(Moved(operation.op, key, start, nbytes, tag, submitted_s, started_s, end_s))
