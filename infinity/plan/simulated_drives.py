"""Drives on virtual time: a shard store whose transfers take as long as modelled drives would need.

A drive is a fluid server. In each direction the transfer of the highest priority moves, at a rate that depends on
whether something moves the other way; a more urgent transfer overtakes at once, as it does on a real queue at the next
block. No byte is stored anywhere.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from infinity.plan.drives import DriveModel
from infinity.plan.spread import Spread, steady_speeds
from infinity.shard_io import SimulatedIo
from storage.ordering import Operation
from storage.types import Op, TrafficTag

_RESOLUTION_S = 1e-9  # a transfer that would end within this has ended
_RESOLUTION = 2.0**-50  # the same in parts of the time that has passed, of which a float holds 53 bits


class _Piece:
    """The part of a transfer that one drive moves."""

    __slots__ = ("on_end", "remaining")

    def __init__(self, nbytes: float, on_end: Callable[[], None]) -> None:
        self.remaining = nbytes
        self.on_end = on_end


class _Direction:
    """Pieces that go one way, of which the first moves at a rate (bytes/s; 0 when there is none)."""

    __slots__ = ("queue", "rate")

    def __init__(self) -> None:
        self.queue: list[tuple[int, int, _Piece]] = []
        self.rate = 0.0


class DriveServer:
    """One drive on the running loop's time. `busy_s` counts seconds in which a direction moved."""

    def __init__(self, model: DriveModel) -> None:
        self.model = model
        self.busy_s = dict.fromkeys(Op, 0.0)
        self._ways = {op: _Direction() for op in Op}
        self._both = model.utilisation()
        self._slc_free = model.slc_nbytes
        self._sequence = 0
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cache_free_nbytes(self) -> float:
        """Of the cache that takes writes faster, now."""
        return self._cache_free_after(asyncio.get_running_loop().time() - self._since_s)

    def submit(self, op: Op, nbytes: float, priority: int, on_end: Callable[[], None]) -> _Piece:
        """Queue a piece; `on_end` is called when it has been moved."""
        self._sequence += 1
        piece, queue = _Piece(nbytes, on_end), self._ways[op].queue
        if queue and queue[0][0] <= priority:  # its turn comes later, and until then nothing moves otherwise
            heapq.heappush(queue, (priority, self._sequence, piece))
            return piece
        self._advance()
        heapq.heappush(queue, (priority, self._sequence, piece))
        self._reschedule()
        return piece

    def promote(self, op: Op, promoted: _Piece, priority: int) -> None:
        """Give a piece another priority. Nothing happens when it has been moved."""
        self._advance()
        queue = self._ways[op].queue
        queue[:] = [(priority if piece is promoted else before, number, piece) for before, number, piece in queue]
        heapq.heapify(queue)
        self._reschedule()

    def _advance(self) -> None:
        """Move what has been moved since the last time."""
        now_s = asyncio.get_running_loop().time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if passed_s <= 0:
            return
        for op, way in self._ways.items():
            if way.rate:
                way.queue[0][2].remaining -= way.rate * passed_s
                self.busy_s[op] += passed_s
        if self.model.slc_nbytes:
            self._slc_free = self._cache_free_after(passed_s)

    def _cache_free_after(self, passed_s: float) -> float:
        """Of the cache, so long after the last change of rates."""
        if not self.model.slc_nbytes:
            return 0.0
        filled = self._ways[Op.WRITE].rate - self.model.write_bytes_per_s
        return min(max(self._slc_free - filled * passed_s, 0.0), self.model.slc_nbytes)

    def _reschedule(self) -> None:
        """Decide what moves how fast from now on, and look again when the first of it ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        model, reading, writing = self.model, self._ways[Op.READ], self._ways[Op.WRITE]
        read_part, write_part = self._both if reading.queue and writing.queue else (1.0, 1.0)
        is_cached = self._slc_free > 1.0
        write_rate = model.slc_write_bytes_per_s if is_cached else model.write_bytes_per_s
        reading.rate = model.read_bytes_per_s * read_part if reading.queue else 0.0
        writing.rate = write_rate * write_part if writing.queue else 0.0
        ends = [way.queue[0][2].remaining / way.rate for way in (reading, writing) if way.rate]
        if is_cached and writing.rate > model.write_bytes_per_s:
            ends.append(self._slc_free / (writing.rate - model.write_bytes_per_s))
        if ends:
            self._timer = asyncio.get_running_loop().call_later(max(min(ends), 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        ended, resolution_s = [], max(_RESOLUTION_S, self._since_s * _RESOLUTION)
        for way in self._ways.values():
            if way.rate and way.queue[0][2].remaining <= way.rate * resolution_s:
                ended.append(heapq.heappop(way.queue)[2])
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
    """A store over modelled drives, each with a server of its own. No byte is moved.

    Drives alike do not do the same at the same time: a key is cut at multiples of a quantum, and a part of it that
    passes by itself (a chunk of a parameter) lies on one of them.

    Args:
        drives: one model per drive.
        keys: with their bytes, in the order in which a store is asked for them.
        moved_nbytes: what a step reads and writes, by which the speed of a drive is weighed.
        keep_log: whether every transfer is noted in `log`.
        hand_over_s: from the end of a transfer until those who wait for it know; the drive goes on meanwhile.
    """

    def __init__(
        self,
        drives: Sequence[DriveModel],
        keys: Iterable[tuple[str, int]],
        *,
        moved_nbytes: tuple[int, int] = (1, 1),
        keep_log: bool = False,
        hand_over_s: float = 0.0,
    ) -> None:
        super().__init__()
        self.spread = Spread(steady_speeds(drives, *moved_nbytes), keys)
        self.servers = [DriveServer(model) for model in drives]
        self._latency_s = max((model.latency_s for model in drives), default=0.0)
        self._keep_log = keep_log
        self._hand_over_s = hand_over_s
        self._started_s: dict[Operation, float] = {}
        self._pieces: dict[Operation, list[tuple[DriveServer, _Piece]]] = {}  # of what the servers have
        self.log: list[Moved] = []
        self.n_moved = self.moved_nbytes = 0  # transfers that have ended, and their bytes
        self.traffic: Counter[tuple[Op, str, int]] = Counter()  # bytes by direction, kind and step

    @property
    def n_drives(self) -> int:
        return len(self.servers)

    def nbytes_by_drive(self, key: str, start: int, stop: int) -> Mapping[int, int]:
        return self.spread.shares(key, start, stop)

    def nbytes(self, op: Op, step: int) -> int:
        """Bytes of one step in one direction."""
        return sum(n for (way, _, at), n in self.traffic.items() if (way, at) == (op, step))

    def under_way(self) -> list[tuple[str, float]]:
        """Transfers that have not ended, and when they were submitted; in that order."""
        return [(f"{each.op.value} {each.key} {each.start}", at_s) for each, at_s in self._submitted_s.items()]

    def cache_free_nbytes(self) -> list[float]:
        """Of each drive."""
        return [server.cache_free_nbytes for server in self.servers]

    def _check_span(self, op: Op, key: str, start: int, stop: int) -> None:
        size = self.spread.nbytes_of(key)
        if not 0 <= start < stop <= size:
            raise ValueError(f"{op.value} of bytes {start} to {stop} of {key}, which has {size}")

    def _begin(self, operation: Operation) -> None:
        loop = asyncio.get_running_loop()
        self._started_s[operation] = loop.time()
        loop.call_later(self._latency_s, self._move, operation)

    def _move(self, operation: Operation) -> None:
        start = operation.start
        shares = self.spread.shares(operation.key, start, start + len(operation.memory))
        left = len(shares)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                del self._pieces[operation]
                self._note(operation)
                asyncio.get_running_loop().call_later(self._hand_over_s, self._finish, operation)

        priority = int(operation.priority)
        self._pieces[operation] = [
            (server := self.servers[drive], server.submit(operation.op, nbytes, priority, ended))
            for drive, nbytes in shares.items()
        ]

    def _promoted(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            for server, piece in self._pieces.get(operation, ()):
                server.promote(operation.op, piece, int(operation.priority))

    def _note(self, operation: Operation) -> None:
        """Count a transfer that has ended."""
        tag, nbytes = operation.tag, len(operation.memory)
        submitted_s, started_s = self._submitted_s[operation], self._started_s.pop(operation)
        self.traffic[operation.op, tag.kind, tag.step] += nbytes
        self.n_moved += 1
        self.moved_nbytes += nbytes
        if self._keep_log:
            end_s = asyncio.get_running_loop().time()
            key, start = operation.key, operation.start
            self.log.append(Moved(operation.op, key, start, nbytes, tag, submitted_s, started_s, end_s))
