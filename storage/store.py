"""The shard store: keys to bytes, over any number of drives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from storage.align import align_up, is_aligned
from storage.backends.base import Backend
from storage.backends.probe import make_backend
from storage.errors import ClosedError, SwapFullError
from storage.ordering import KeyOrder, Operation
from storage.stats import IoStats
from storage.stripes import Piece, overlap, share_sizes
from storage.swapfile import RunFolder, SwapFile, make_directory_error
from storage.types import Extent, IoRequest, Op, Priority, Ticket, TrafficTag


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How a store does its I/O.

    Attributes:
        engine: "auto" probes every directory; "direct" and "buffered" insist.
        block_nbytes: size of one system call.
        threads: blocks at the devices at the same time.
        free_margin_nbytes: bytes to leave free on every file system.
    """

    engine: str = "auto"
    block_nbytes: int = 4 << 20
    threads: int = 4
    free_margin_nbytes: int = 64 << 20


@dataclass(slots=True, eq=False)
class _Key:
    nbytes: int
    pieces: list[Piece]
    order: KeyOrder = field(default_factory=KeyOrder)


@dataclass(frozen=True, slots=True)
class _Drive:
    file: SwapFile
    backend: Backend
    reason: str


class ShardStore:
    """Stores byte strings of fixed size under keys. Thread safe; nothing here waits for I/O except `drain` and `close`.

    Overlapping operations on a key, of which one is a write, run in the order they were submitted. A write that fails
    fails its ticket, and every later read of the same bytes, until they are overwritten successfully.
    """

    def __init__(self, drives: Sequence[_Drive], closing: ExitStack) -> None:
        self._drives = tuple(drives)
        self._closing = closing
        self._keys: dict[str, _Key] = {}
        self._next_drive = 0
        self._in_flight: dict[Ticket, str] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self.stats = IoStats()

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        capacity_nbytes: int,
        *,
        run_name: str = "infinity",
        rank: int = 0,
        options: StorageOptions | None = None,
        wrap_backend: Callable[[Backend], Backend] | None = None,
    ) -> ShardStore:
        """Make one swap file per directory, in a private run folder that `close` (or the process's exit) removes.

        Args:
            paths: directories, one per drive.
            capacity_nbytes: bytes of all keys together; the space is reserved on disk.
            wrap_backend: wraps each backend, for example with `storage.backends.faulty`.

        Raises:
            SwapFullError: too little space; nothing is left behind.
            StorageError: a directory cannot be used, or cannot do what `options.engine` insists on.
        """
        options = options or StorageOptions()
        share_nbytes = align_up(-(-capacity_nbytes // len(paths)), 1 << 16)
        with ExitStack() as stack:
            drives = []
            for path in paths:
                try:
                    folder = RunFolder(Path(path), run_name)
                except OSError as error:
                    raise make_directory_error(Path(path), error) from error
                stack.callback(folder.remove)
                backend, reason = make_backend(folder.path, options.engine, options.threads, options.block_nbytes)
                stack.callback(backend.close)
                used = wrap_backend(backend) if wrap_backend is not None else backend
                file = SwapFile(
                    folder.path / f"rank{rank}.swap",
                    share_nbytes,
                    direct=backend.opens_direct,
                    free_margin_nbytes=options.free_margin_nbytes,
                )
                stack.callback(file.close)
                if used is not backend:
                    stack.callback(used.close)
                drives.append(_Drive(file, used, reason))
            return cls(drives, stack.pop_all())

    @property
    def progress(self) -> int:
        """Grows with every block that completes."""
        return sum(drive.backend.progress for drive in self._drives)

    @property
    def engine_name(self) -> str:
        """Which backend serves each directory, and why."""
        return "; ".join(f"{d.backend.name} ({d.reason}) in {d.file.path.parent.parent}" for d in self._drives)

    def create(self, key: str, nbytes: int) -> None:
        """Make room for a key; its content is undefined until it is written.

        Raises:
            SwapFullError: the disks are full.
            ValueError: the key exists, or the size is not a positive multiple of 4096.
        """
        if nbytes <= 0 or not is_aligned(nbytes):
            raise ValueError(f"key {key!r} has {nbytes} bytes; sizes are positive multiples of 4096")
        with self._lock:
            self._check_open()
            if key in self._keys:
                raise ValueError(f"key {key!r} exists already")
            pieces: list[Piece] = []
            start = 0
            try:
                for drive, size in share_sizes(nbytes, len(self._drives), self._next_drive):
                    pieces.append(Piece(start, Extent(drive, self._allocate(drive, size), size)))
                    start += size
            except BaseException:
                self._free(pieces)
                raise
            self._next_drive = (self._next_drive + len(pieces)) % len(self._drives)
            self._keys[key] = _Key(nbytes, pieces)

    def delete(self, key: str) -> None:
        """Give a key's space back. Nothing may be in flight on it."""
        with self._lock:
            entry = self._entry(key)
            if entry.order.operations:
                raise ValueError(f"key {key!r} has transfers in flight and cannot be deleted")
            self._free(entry.pieces)
            del self._keys[key]

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._keys)

    def nbytes_of(self, key: str) -> int:
        with self._lock:
            return self._entry(key).nbytes

    def submit_read(
        self,
        key: str,
        memory: memoryview,
        *,
        offset: int = 0,
        priority: Priority = Priority.READ_AHEAD,
        tag: TrafficTag,
        payload_nbytes: int | None = None,
    ) -> Ticket:
        """Read `len(memory)` bytes of a key, starting at `offset`, into page-aligned memory.

        Args:
            tag: what the bytes are counted as.
            payload_nbytes: how many of them are data, not padding; default all.
        """
        return self._submit(Op.READ, key, memory, offset, priority, tag, payload_nbytes)

    def submit_write(
        self,
        key: str,
        memory: memoryview,
        *,
        offset: int = 0,
        priority: Priority = Priority.WRITE,
        tag: TrafficTag,
        payload_nbytes: int | None = None,
    ) -> Ticket:
        """Write page-aligned memory to a key, starting at `offset`; it must not change until the ticket is done."""
        return self._submit(Op.WRITE, key, memory, offset, priority, tag, payload_nbytes)

    def describe_in_flight(self) -> list[str]:
        """One line per transfer that has not completed."""
        with self._lock:
            lines = list(self._in_flight.values())
        served = [request for drive in self._drives for request in drive.backend.in_flight()]
        return lines + [f"  at {request.path} offset {request.offset}: {request.key}" for request in served]

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight; whether that happened in time."""
        with self._lock:
            tickets = list(self._in_flight)
        return Ticket.all_of(tickets, "drain").wait(timeout_s)

    def close(self) -> None:
        """Finish what is in service, drop what is queued, remove the swap files. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._closing.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the shard store is closed")

    def _entry(self, key: str) -> _Key:
        entry = self._keys.get(key)
        if entry is None:
            raise KeyError(f"the shard store has no key {key!r}")
        return entry

    def _allocate(self, drive: int, nbytes: int) -> int:
        file = self._drives[drive].file
        try:
            return file.extents.allocate(nbytes)
        except SwapFullError:
            file.grow(nbytes)
            return file.extents.allocate(nbytes)

    def _free(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._drives[piece.extent.drive].file.extents.free(piece.extent.offset)

    def _submit(
        self,
        op: Op,
        key: str,
        memory: memoryview,
        offset: int,
        priority: Priority,
        tag: TrafficTag,
        payload_nbytes: int | None,
    ) -> Ticket:
        nbytes = len(memory)
        ticket = Ticket(f"{op.value} of {key} ({nbytes} bytes at {offset})")
        operation = Operation(op, offset, offset + nbytes, ticket)
        with self._lock:
            self._check_open()
            entry = self._entry(key)
            _check_span(key, entry.nbytes, offset, nbytes)
            before = entry.order.add(operation)
            self._in_flight[ticket] = ticket.label
        moved = nbytes if payload_nbytes is None else payload_nbytes

        def start(_: Ticket | None = None) -> None:
            self._start(entry, operation, key, memory, priority, tag, moved)

        if before:
            Ticket.all_of(before).add_done_callback(start)
        else:
            start()
        return ticket

    def _start(
        self,
        entry: _Key,
        operation: Operation,
        key: str,
        memory: memoryview,
        priority: Priority,
        tag: TrafficTag,
        payload_nbytes: int,
    ) -> None:
        """Every conflicting operation before has ended: hand the pieces to the backends."""
        with self._lock:
            lost = entry.order.lost_in(operation.start, operation.stop) if operation.op is Op.READ else None
        if lost is not None:
            self._finish(entry, operation, lost)
            return
        started_s = time.perf_counter()
        tickets = []
        for piece, start, stop in overlap(entry.pieces, operation.start, operation.stop):
            drive = self._drives[piece.extent.drive]
            request = IoRequest(
                op=operation.op,
                fd=drive.file.fd,
                path=str(drive.file.path),
                offset=piece.extent.offset + start - piece.start,
                memory=memory[start - operation.start : stop - operation.start],
                priority=priority,
                key=key,
            )
            tickets.append(request.ticket)
            try:
                drive.backend.submit(request)
            except BaseException as error:
                request.ticket.set_exception(error)

        def ended(joined: Ticket) -> None:
            if joined.exception is None:
                seconds = time.perf_counter() - started_s
                self.stats.add(operation.op, tag, len(memory), payload_nbytes, seconds)
            self._finish(entry, operation, joined.exception)

        Ticket.all_of(tickets, operation.ticket.label).add_done_callback(ended)

    def _finish(self, entry: _Key, operation: Operation, error: BaseException | None) -> None:
        with self._lock:
            entry.order.remove(operation, error)
            self._in_flight.pop(operation.ticket, None)
        if error is None:
            operation.ticket.set_done()
        else:
            operation.ticket.set_exception(error)


def _check_span(key: str, size: int, offset: int, nbytes: int) -> None:
    if nbytes <= 0 or not is_aligned(nbytes) or not is_aligned(offset):
        raise ValueError(f"a transfer of {nbytes} bytes at {offset} of key {key!r}: both must be multiples of 4096")
    if offset < 0 or offset + nbytes > size:
        raise ValueError(f"a transfer of {nbytes} bytes at {offset} leaves key {key!r}, which has {size} bytes")
