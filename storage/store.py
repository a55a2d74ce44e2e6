"""The shard store: keys to bytes, over any number of drives."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from storage.align import is_aligned
from storage.backends.cost import IoCost
from storage.checksums import Checksum, Digests, KeyChecksums
from storage.drives import Drive, StorageOptions, WrapBackend, open_drive
from storage.errors import ClosedError
from storage.held import HeldKey, HeldKeys
from storage.operations import Operations
from storage.ordering import Operation
from storage.reserve import check_arguments, open_all, reserve
from storage.space import DriveReport, Space
from storage.stats import IoStats
from storage.stripes import overlap
from storage.transfer import StoredKey
from storage.transfer_arguments import as_pages, check_span
from storage.types import Op, Priority, Ticket, TrafficTag

__all__ = ["ShardStore", "StorageOptions"]


class ShardStore:
    """Stores byte strings of fixed size under keys. Thread safe; nothing here waits for I/O except `drain` and `close`.

    Overlapping operations on a key, of which one is a write, run in the order they were submitted. A write that fails
    fails its ticket, and every later read of the same bytes, until they are overwritten successfully. A read of bytes
    that are not what was written fails with IntegrityError.

    Keys are spread over the drives by speed, and may lie elsewhere after every write (see `space`). What a drive does
    not take goes to the others; a write fails only when no drive takes it.
    """

    def __init__(self, space: Space, closing: ExitStack, *, checksum: Checksum = Checksum.XXH3) -> None:
        self._space = space
        self._drives = space.drives
        self._closing = closing
        self._checksum = checksum
        self._keys: dict[str, StoredKey] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self.stats = IoStats()
        self.entered_nbytes: dict[str, int] = {}
        """Bytes written to each device that are in its ledger; kept by those who enter them, on one thread."""
        self._operations = Operations(space, self._lock, self.stats)

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        capacity_nbytes: int,
        *,
        run_name: str = "infinity",
        rank: int = 0,
        options: StorageOptions | None = None,
        speeds: Sequence[float] | None = None,
        wrap_backend: WrapBackend | None = None,
    ) -> ShardStore:
        """Make one swap file per directory, in a private run folder that `close` (or the process's exit) removes.

        Args:
            paths: directories, one per drive; made when missing.
            capacity_nbytes: bytes of all keys together; the space is reserved on disk. Keys beyond it make the files
                longer, as long as the disks have room.
            run_name: noted in the run folder, for people.
            rank: part of the swap file's name.
            speeds: of the drives, in any unit, until they are measured; equal by default.
            wrap_backend: wraps each backend, for example with `storage.backends.faulty`.

        Raises:
            SwapFullError: too little space on all drives together; nothing is left behind.
            StorageError: a directory cannot be used, or cannot do what `options.engine` insists on.
            ValueError: no path, a capacity that is negative or beyond `options.files_nbytes`, or speeds that are not
                positive numbers, one per path.
        """
        options = options or StorageOptions()
        given = check_arguments(paths, capacity_nbytes, speeds, options.files_nbytes)

        def open_one(path: Path, stack: ExitStack) -> Drive:
            return open_drive(
                path, 0, run_name=run_name, rank=rank, options=options, wrap_backend=wrap_backend, closing=stack
            )

        with ExitStack() as closing:
            drives, given = open_all(paths, given, open_one, closing)
            reserve(drives, capacity_nbytes, given)
            space = Space(drives, given, options=options)
            return cls(space, closing.pop_all(), checksum=Checksum(options.checksum))

    @property
    def n_drives(self) -> int:
        """Over which keys are spread."""
        return len(self._drives)

    @property
    def progress(self) -> int:
        """Grows with every block that completes."""
        return sum(drive.backend.progress for drive in self._drives)

    @property
    def cost(self) -> IoCost:
        """CPU time of the threads that move blocks, until now."""
        return IoCost.total(drive.backend.cost for drive in self._drives)

    @property
    def engine_name(self) -> str:
        """Which backend serves each directory, and why; and which directories take no new bytes."""
        return "; ".join(
            f"{drive.backend.name} ({drive.reason}) in {drive.directory}{self._space.health.describe(number)}"
            for number, drive in enumerate(self._drives)
        )

    def drive_report(self) -> list[DriveReport]:
        """What each drive has done and holds, and whether it takes new bytes."""
        with self._lock:
            return self._space.report()

    @property
    def held_nbytes(self) -> int:
        """Bytes of keys on all drives together."""
        with self._lock:
            return sum(self._space.held_nbytes)

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
            pieces = self._space.allocate(0, nbytes)
            self._keys[key] = StoredKey(nbytes, tuple(pieces), self._make_checksums(key, nbytes))

    def delete(self, key: str) -> None:
        """Give a key's space back. Nothing may be in flight on it."""
        with self._lock:
            entry = self._entry(key)
            if entry.order.operations:
                raise ValueError(f"key {key!r} has transfers in flight and cannot be deleted")
            self._space.free([piece.extent for piece in entry.pieces])
            del self._keys[key]

    def keys(self) -> list[str]:
        """All keys, in the order in which they were made."""
        with self._lock:
            return list(self._keys)

    def nbytes_of(self, key: str) -> int:
        """Bytes of a key; KeyError if there is none of that name."""
        with self._lock:
            return self._entry(key).nbytes

    def nbytes_by_drive(self, key: str, start: int, stop: int) -> Mapping[int, int]:
        """Bytes of a span of a key by the drive that they lie on now; nothing if there is no key of that name."""
        found: dict[int, int] = {}
        with self._lock:
            entry = self._keys.get(key)
            for piece, begin, end in overlap(entry.pieces if entry is not None else (), start, stop):
                found[piece.extent.drive] = found.get(piece.extent.drive, 0) + end - begin
        return found

    def hold(self, keys: Sequence[str]) -> HeldKeys:
        """Keep what these keys hold now, as files and offsets, until it is let go; training goes on meanwhile.

        Writes of held bytes go elsewhere, so up to as much room as the keys have is needed until then.

        Raises:
            KeyError: there is no such key.
            ValueError: a write of one is in flight.
            StorageError: the last write of one failed.
            ClosedError: the store is closed.
        """
        with self._lock:
            self._check_open()
            held = {key: HeldKey.of(key, self._entry(key)) for key in keys}
            pieces = [piece for one in held.values() for piece in one.pieces]
            number = self._space.hold(pieces)
        return HeldKeys(held, [drive.file.path for drive in self._drives], partial(self._let_go, number))

    def _let_go(self, number: int) -> None:
        with self._lock:
            self._space.let_go(number)

    @property
    def notes_digests(self) -> bool:
        """Whether writes note checksums, so that it is worth while to bring theirs along."""
        return self._checksum is Checksum.XXH3

    @property
    def room_nbytes(self) -> int:
        """Bytes that could be stored more, as far as the file systems and the budget tell."""
        with self._lock:
            return self._space.room_nbytes

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

        The ticket fails with what kept the last write of these bytes from succeeding, if anything did.

        Args:
            tag: what the bytes are counted as.
            payload_nbytes: how many of them are data, not padding; default all.

        Raises:
            KeyError: there is no such key.
            ValueError: size, offset or address is not a multiple of 4096, the span leaves the key, or the memory cannot
                be written to.
            ClosedError: the store is closed.
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
        digests: Digests | None = None,
    ) -> Ticket:
        """Write page-aligned memory to a key, starting at `offset`; it must not change until the ticket is done.

        Arguments and errors are those of `submit_read`.

        Args:
            digests: of the memory, if they are known; nothing to a store without checksums.

        Raises:
            ValueError: the digests are of other bytes of the key.
        """
        if digests is not None and (digests.start, digests.stop) != (offset, offset + memory.nbytes):
            raise ValueError(
                f"digests of bytes {digests.start} to {digests.stop} for a write of {memory.nbytes} bytes at {offset} "
                f"of key {key!r}"
            )
        return self._submit(Op.WRITE, key, memory, offset, priority, tag, payload_nbytes, digests)

    def promote(self, key: str) -> None:
        """Somebody waits for what is being moved of a key: it goes before all that nobody waits for.

        Raises:
            KeyError: there is no such key.
        """
        with self._lock:
            operations = self._entry(key).order.operations
            for operation in operations:
                operation.priority = Priority.DEMAND
        if operations:
            self._operations.promote(key)

    def describe_in_flight(self) -> list[str]:
        """One line per transfer that has not completed, oldest first: what it is, and where it is held up."""
        return self._operations.describe()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything submitted before has ended, well or not; whether that happened in time."""
        return self._operations.drain(timeout_s)

    def close(self) -> None:
        """Finish blocks in service, fail the rest with ClosedError, remove the swap files. Idempotent, bounded."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._closing.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the shard store is closed")

    def _entry(self, key: str) -> StoredKey:
        entry = self._keys.get(key)
        if entry is None:
            raise KeyError(f"the shard store has no key {key!r}")
        return entry

    def _make_checksums(self, key: str, nbytes: int) -> KeyChecksums | None:
        return KeyChecksums(key, nbytes) if self._checksum is Checksum.XXH3 else None

    def _submit(
        self,
        op: Op,
        key: str,
        memory: memoryview,
        offset: int,
        priority: Priority,
        tag: TrafficTag,
        payload_nbytes: int | None,
        digests: Digests | None = None,
    ) -> Ticket:
        memory = as_pages(op, key, memory)
        nbytes = len(memory)
        ticket = Ticket(f"{op.value} of {key} ({nbytes} bytes at {offset})")
        payload_nbytes = nbytes if payload_nbytes is None else payload_nbytes
        operation = Operation(op, key, offset, memory, priority, tag, payload_nbytes, ticket)
        with self._lock:
            self._check_open()
            entry = self._entry(key)
            check_span(key, entry.nbytes, offset, nbytes)
            self._operations.place_first(entry, operation)  # so that nothing has happened yet when there is no room
            self._plan(entry, operation, digests)
            may_start = self._operations.admit(entry, operation)
        self._operations.run(entry, operation, may_start=may_start)
        return ticket

    def _plan(self, entry: StoredKey, operation: Operation, digests: Digests | None) -> None:
        """Decide what an operation checks. Called in the order of submission."""
        if entry.checksums is not None:
            operation.check = entry.checksums.plan(operation.op, operation.start, operation.memory, digests)
