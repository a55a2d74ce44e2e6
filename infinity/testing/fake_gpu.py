"""A GPU made of a file: capacity is enforced, copies take modelled time, operations are logged.

It proves without a GPU that the right bytes reached the device, in the right order, within the budget.

[Note: time of the fake GPU]
There is one copy engine per direction, as on real devices. Copies of one direction run one after another in the order
they were issued, each for `latency + nbytes / bandwidth`; the two directions overlap. The blocking form takes its time
from `clock`. The asyncio form takes it from the running loop: on a `VirtualTimeLoop` no real time passes. To use both
on one device under virtual time, hand the loop's clock to the device: `FakeGpu(..., clock=loop.clock)`.

The asyncio form moves the bytes at the end of the modelled time, so that a host buffer reused too early shows up as
wrong bytes on the device.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from infinity.errors import DeviceOutOfMemoryError
from infinity.sizes import format_nbytes, parse_nbytes
from infinity.testing.clock import Clock, RealClock
from infinity.testing.fake_pages import PAGE_NBYTES, FakeRegion, Pages, each_piece
from storage.closing import Closing
from storage.paths import StrPath

_MOST_LOGGED = 20_000


class CopyOp(StrEnum):
    """What was done to the device."""

    ALLOCATE = "allocate"
    FREE = "free"
    UPLOAD = "upload"
    DOWNLOAD = "download"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One finished operation. `order` counts operations as they were issued; `label` is the owner for memory."""

    order: int
    op: CopyOp
    label: str
    nbytes: int
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy that was given its place in the queue of its engine."""

    order: int
    op: CopyOp
    region: FakeRegion
    memory: memoryview
    offset_nbytes: int
    label: str
    start_s: float
    end_s: float


class FakeGpu(Closing):
    """Device memory in a file of `capacity` bytes. Thread safe.

    Args:
        path: the file, which must not exist and is removed by `close()`; or a directory, for a file without a name.
        capacity: bytes, or text such as "64MiB".
        h2d_bytes_per_s, d2h_bytes_per_s: of the link; None: copies in that direction take no modelled time.
        latency_s: what every copy takes besides.
        clock: time of the blocking form; default the machine's.
        most_logged: operations that the log keeps, the newest ones: a training run goes on for hours.
    """

    def __init__(
        self,
        path: StrPath,
        capacity: int | str,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        clock: Clock | None = None,
        *,
        most_logged: int = _MOST_LOGGED,
    ) -> None:
        self.path = Path(path)
        self._is_named = not self.path.is_dir()
        self.capacity_nbytes = parse_nbytes(capacity)
        self._bandwidth = {CopyOp.UPLOAD: h2d_bytes_per_s, CopyOp.DOWNLOAD: d2h_bytes_per_s}
        self._latency_s = latency_s
        self.clock = RealClock() if clock is None else clock
        self._idle_at_s = {CopyOp.UPLOAD: 0.0, CopyOp.DOWNLOAD: 0.0}
        self._pages = Pages(self.capacity_nbytes)
        self._regions: set[FakeRegion] = set()
        self._copying: list[_Copy] = []
        self._log: deque[LogEntry] = deque(maxlen=most_logged)
        self._n_issued = 0
        self._peak_nbytes = 0
        self._lock = threading.Lock()
        self._fd: int | None = self._open()

    def _open(self) -> int:
        if not self._is_named:
            with tempfile.TemporaryFile(dir=self.path) as unnamed:
                fd = os.dup(unnamed.fileno())
        else:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError as error:
                hint = "device memory never overwrites a file; remove it or name a directory"
                raise FileExistsError(error.errno, f"{error.strerror}: {hint}", str(self.path)) from None
        try:
            os.ftruncate(fd, self.capacity_nbytes)
        except BaseException:
            os.close(fd)
            if self._is_named:
                self.path.unlink(missing_ok=True)
            raise
        return fd

    # Memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, owner: str) -> FakeRegion:
        """Take `nbytes`, rounded up to whole pages.

        Raises:
            DeviceOutOfMemoryError: need, free, limit, and who holds what.
        """
        if nbytes < 0:
            raise ValueError(f"{owner}: a region of {nbytes} bytes")
        block_nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        with self._lock:
            self._fileno()
            if block_nbytes > self._pages.free_nbytes:
                raise DeviceOutOfMemoryError(self._describe_shortage(block_nbytes, owner))
            region = FakeRegion(nbytes, owner, self._pages.take(block_nbytes))
            self._regions.add(region)
            self._peak_nbytes = max(self._peak_nbytes, self.used_nbytes)
            self._log_memory(CopyOp.ALLOCATE, region)
        return region

    def free(self, region: FakeRegion) -> None:
        """Give a region back; freeing it again does nothing. Raises RuntimeError while a copy uses it."""
        with self._lock:
            if region not in self._regions:
                return
            for copy in self._copying:
                if copy.region is region:
                    raise RuntimeError(f"{region.owner} was freed during its {copy.op} {copy.label!r}")
            self._regions.remove(region)
            self._pages.give_back(region.spans)
            self._log_memory(CopyOp.FREE, region)

    @property
    def used_nbytes(self) -> int:
        """Bytes in use, in whole pages."""
        return self._pages.total_nbytes - self._pages.free_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that were in use at a time."""
        return self._peak_nbytes

    def holders(self) -> dict[str, int]:
        """Bytes in use, by owner."""
        with self._lock:
            return self._holders()

    # Copies ----------------------------------------------------------------------------------------------------

    def upload(self, region: FakeRegion, source: memoryview, label: str = "", *, offset_nbytes: int = 0) -> LogEntry:
        """Copy host bytes to the device; returns when the modelled time is over."""
        entry = self.start_upload(region, source, label, offset_nbytes=offset_nbytes)
        self.wait_until(entry.end_s)
        return entry

    def download(self, region: FakeRegion, target: memoryview, label: str = "", *, offset_nbytes: int = 0) -> LogEntry:
        """Copy device bytes to the host; returns when the modelled time is over."""
        entry = self.start_download(region, target, label, offset_nbytes=offset_nbytes)
        self.wait_until(entry.end_s)
        return entry

    def start_upload(
        self, region: FakeRegion, source: memoryview, label: str = "", *, offset_nbytes: int = 0
    ) -> LogEntry:
        """Like `upload`, but returns at once: the bytes have moved, the copy counts as done at `end_s`."""
        return self._move(self._issue(CopyOp.UPLOAD, region, source, label, offset_nbytes, self.clock.now_s()))

    def start_download(
        self, region: FakeRegion, target: memoryview, label: str = "", *, offset_nbytes: int = 0
    ) -> LogEntry:
        """Like `download`, but returns at once: the bytes have moved, the copy counts as done at `end_s`."""
        return self._move(self._issue(CopyOp.DOWNLOAD, region, target, label, offset_nbytes, self.clock.now_s()))

    async def upload_async(
        self, region: FakeRegion, source: memoryview, label: str = "", *, offset_nbytes: int = 0
    ) -> LogEntry:
        """Copy host bytes to the device at the end of the modelled time; a cancelled copy moves nothing."""
        return await self._copy_async(CopyOp.UPLOAD, region, source, label, offset_nbytes)

    async def download_async(
        self, region: FakeRegion, target: memoryview, label: str = "", *, offset_nbytes: int = 0
    ) -> LogEntry:
        """Copy device bytes to the host at the end of the modelled time; a cancelled copy moves nothing."""
        return await self._copy_async(CopyOp.DOWNLOAD, region, target, label, offset_nbytes)

    def wait_until(self, end_s: float) -> None:
        """Sleep on the device's clock until `end_s`."""
        self.clock.sleep(end_s - self.clock.now_s())

    # What a test or a computation on the device sees: no link, no time, no log ------------------------------------

    def read(self, region: FakeRegion, nbytes: int | None = None, *, offset_nbytes: int = 0) -> bytes:
        """The bytes in device memory; default all of the region."""
        content = bytearray(region.nbytes - offset_nbytes if nbytes is None else nbytes)
        self.read_into(region, memoryview(content), offset_nbytes=offset_nbytes)
        return bytes(content)

    def read_into(self, region: FakeRegion, target: memoryview, *, offset_nbytes: int = 0) -> None:
        """Fill host memory with bytes in device memory."""
        with self._lock:
            self._check(region, target, offset_nbytes)
            each_piece(region, target, offset_nbytes, self._read_piece)

    def write(self, region: FakeRegion, source: memoryview, *, offset_nbytes: int = 0) -> None:
        """Put bytes into device memory, as a kernel does with its result."""
        with self._lock:
            self._check(region, source, offset_nbytes)
            each_piece(region, source, offset_nbytes, self._write_piece)

    @property
    def log(self) -> tuple[LogEntry, ...]:
        """The newest finished operations, in the order they were issued."""
        with self._lock:
            return tuple(sorted(self._log, key=lambda entry: entry.order))

    def close(self) -> None:
        """Remove the file. Idempotent."""
        with self._lock:
            if self._fd is None:
                return
            os.close(self._fd)
            self._fd = None
            if self._is_named:
                self.path.unlink(missing_ok=True)

    # Inside ----------------------------------------------------------------------------------------------------

    async def _copy_async(
        self, op: CopyOp, region: FakeRegion, memory: memoryview, label: str, offset_nbytes: int
    ) -> LogEntry:
        loop = asyncio.get_running_loop()
        copy = self._issue(op, region, memory, label, offset_nbytes, loop.time())
        try:
            await asyncio.sleep(copy.end_s - loop.time())
            return self._move(copy)
        finally:
            self._forget(copy)

    def _issue(
        self, op: CopyOp, region: FakeRegion, memory: memoryview, label: str, offset_nbytes: int, now_s: float
    ) -> _Copy:
        """Give the copy its place in the queue of its engine."""
        bandwidth = self._bandwidth[op]
        with self._lock:
            self._check(region, memory, offset_nbytes)
            start_s = max(now_s, self._idle_at_s[op])
            end_s = start_s + self._latency_s + (memory.nbytes / bandwidth if bandwidth else 0.0)
            copy = _Copy(self._number(), op, region, memory, offset_nbytes, label, start_s, end_s)
            self._check_race(copy)
            self._copying.append(copy)
            self._idle_at_s[op] = end_s
        return copy

    def _move(self, copy: _Copy) -> LogEntry:
        piece = self._write_piece if copy.op is CopyOp.UPLOAD else self._read_piece
        entry = LogEntry(copy.order, copy.op, copy.label, copy.memory.nbytes, copy.start_s, copy.end_s)
        try:
            each_piece(copy.region, copy.memory, copy.offset_nbytes, piece)
        finally:
            self._forget(copy)
        with self._lock:
            self._log.append(entry)
        return entry

    def _forget(self, copy: _Copy) -> None:
        with self._lock:
            self._copying = [other for other in self._copying if other is not copy]

    def _check(self, region: FakeRegion, memory: memoryview, offset_nbytes: int) -> None:
        if region not in self._regions:
            raise RuntimeError(f"device memory of {region.owner!r} was used after it was freed")
        if offset_nbytes < 0 or offset_nbytes + memory.nbytes > region.nbytes:
            raise ValueError(
                f"bytes {offset_nbytes} to {offset_nbytes + memory.nbytes} do not lie in {region.owner!r}, "
                f"which has {region.nbytes}"
            )

    def _check_race(self, copy: _Copy) -> None:
        """Copies of one direction queue up; nothing orders those of different directions but waiting."""
        stop = copy.offset_nbytes + copy.memory.nbytes
        for other in self._copying:
            overlap = copy.offset_nbytes < other.offset_nbytes + other.memory.nbytes and other.offset_nbytes < stop
            if other.region is copy.region and other.op is not copy.op and overlap:
                raise RuntimeError(
                    f"{copy.op} {copy.label!r} races with {other.op} {other.label!r} for the same bytes of "
                    f"{copy.region.owner!r}; wait for the first"
                )

    def _read_piece(self, offset: int, piece: memoryview) -> None:
        while piece:
            n_read = os.preadv(self._fileno(), [piece], offset)
            if n_read == 0:
                raise OSError(f"{self.path}: device memory ends at {offset}; somebody truncated the file")
            offset, piece = offset + n_read, piece[n_read:]

    def _write_piece(self, offset: int, piece: memoryview) -> None:
        while piece:
            n_written = os.pwrite(self._fileno(), piece, offset)
            offset, piece = offset + n_written, piece[n_written:]

    def _fileno(self) -> int:
        if self._fd is None:
            raise RuntimeError(f"the fake GPU on {self.path} is closed")
        return self._fd

    def _number(self) -> int:
        self._n_issued += 1
        return self._n_issued - 1

    def _log_memory(self, op: CopyOp, region: FakeRegion) -> None:
        try:
            now_s = asyncio.get_running_loop().time()
        except RuntimeError:  # no loop runs here
            now_s = self.clock.now_s()
        self._log.append(LogEntry(self._number(), op, region.owner, region.nbytes, now_s, now_s))

    def _holders(self) -> dict[str, int]:
        holders: Counter[str] = Counter()
        for region in self._regions:
            holders[region.owner] += region.block_nbytes
        return dict(sorted(holders.items()))

    def _describe_shortage(self, need_nbytes: int, owner: str) -> str:
        held = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in self._holders().items()) or "nobody"
        return (
            f"{owner} needs {need_nbytes} bytes of device memory, {self._pages.free_nbytes} of {self.capacity_nbytes} "
            f"are free; held by: {held}"
        )
