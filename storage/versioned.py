"""A shard store that survives: what was committed is what a later process finds, whatever happened in between.

Nothing that a commit refers to is ever overwritten. The first write to bytes of a committed generation goes to new
extents; `commit` waits for the drives, then notes in one transaction of the manifest where every key lies now, then
gives the old extents back. Killed before the transaction, a process leaves the old generation; killed after it, the
new one. Keys need at most twice their space.

A commit takes its snapshot of the keys under the store's lock and waits for the drives without it. Transfers go on
meanwhile: what the snapshot refers to counts as committed, so that a write during the commit goes elsewhere.

Volatile keys are for what no later process needs. They are overwritten in place, belong to no generation, and are
gone when the store is opened again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from storage.checksums import Checksum, Digests
from storage.drives import StorageOptions, WrapBackend
from storage.durable import open_durable_drive, open_folder
from storage.errors import IoTimeoutError, StorageError, WriteError
from storage.filesystems import sync_data
from storage.holds import Holds
from storage.key_records import entries_of, record_of
from storage.manifest import MANIFEST_FILE, Before, CommitPoint, KeyRecord, Manifest, used_spans
from storage.ordering import Operation
from storage.reserve import check_arguments, reserve
from storage.store import ShardStore
from storage.transfer import StoredKey
from storage.types import Extent, Op
from storage.versioned_space import VersionedSpace


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a commit is about to make durable, and what its success gives back."""

    step: int
    notes: Mapping[str, bytes]
    records: Sequence[KeyRecord]
    removed: Sequence[str]
    retired: Sequence[Extent]
    before: Before


class VersionedStore(ShardStore):
    """A ShardStore with generations. Keys, reads and writes are as there; `commit` makes what was written last.

    `close`, or a crash, without a commit goes back to the last generation. A write may need new space. When there is
    none, `submit_write` raises SwapFullError, and what was stored before is intact; a write that has to wait for
    transfers of the same key finds out later, and its ticket fails as with every failed write.
    """

    _space: VersionedSpace

    def __init__(
        self,
        space: VersionedSpace,
        closing: ExitStack,
        manifest: Manifest,
        *,
        checksum: Checksum,
        on_commit_point: CommitPoint,
    ) -> None:
        super().__init__(space, closing, checksum=checksum)
        self._manifest = manifest
        self._on_commit_point = on_commit_point
        self._changed: set[str] = set()
        self._volatile: set[str] = set()
        self._dtypes: dict[str, str] = {}
        self._kept: list[Extent] = []  # that only the generation before the last one refers to
        self._unsynced = Holds()  # what commits refer to and the drives have not been seen to keep yet
        self._gate = threading.RLock()  # keys are made, deleted and committed one at a time

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
        on_commit_point: CommitPoint = lambda _: None,
    ) -> VersionedStore:
        """Open the store in these directories as it was at its last commit, or make one.

        Args:
            paths: directories, one per drive, always in the same order.
            capacity_nbytes: space to reserve on disk; twice that of all keys, if all of them are rewritten at a time.
            speeds: as in ShardStore.
            on_commit_point: called with a name at every step of a commit, for tests of crashes.

        Raises:
            SwapInUseError: another process uses it; says which.
            IntegrityError: the manifest cannot be read, or the files are not those it belongs to.
            SwapFullError: too little space.
            StorageError: a directory cannot be used, or cannot do what `options.engine` insists on.
            ValueError: as in ShardStore.
        """
        options = options or StorageOptions()
        given = check_arguments(paths, capacity_nbytes, speeds, options.files_nbytes)
        with ExitStack() as closing:
            folders = [open_folder(Path(path), rank, run_name, closing) for path in paths]
            manifest = Manifest(folders[0].path / MANIFEST_FILE, len(paths))
            closing.callback(manifest.close)
            records = manifest.load()
            drives = [
                open_durable_drive(
                    folder,
                    f"drive{number}-{manifest.identity}.shards",
                    0,
                    used=used_spans(records, number),
                    options=options,
                    wrap_backend=wrap_backend,
                    closing=closing,
                )
                for number, folder in enumerate(folders)
            ]
            reserve(drives, capacity_nbytes, given)
            for folder in folders:
                folder.sync()
            store = cls(
                VersionedSpace(drives, given, options=options),
                closing.pop_all(),
                manifest,
                checksum=Checksum(options.checksum),
                on_commit_point=on_commit_point,
            )
        try:
            store._take_up(records)
        except BaseException:
            store.close()
            raise
        return store

    @property
    def generation(self) -> int:
        """Number of the last commit; 0 when there was none."""
        return self._manifest.generation

    @property
    def step(self) -> int:
        """The step given to the last commit; -1 when there was none."""
        return self._manifest.step

    def dtype_of(self, key: str) -> str:
        """What `create` was told."""
        with self._lock:
            self._entry(key)
            return self._dtypes.get(key, "")

    @property
    def directory(self) -> Path:
        """The folder of the manifest."""
        return self._manifest.path.parent

    def notes(self) -> dict[str, bytes]:
        """What the last commit noted, by name.

        Raises:
            IntegrityError: a note is damaged.
        """
        with self._gate:
            return self._manifest.notes()

    def create(self, key: str, nbytes: int, dtype: str = "", *, is_volatile: bool = False) -> None:
        """As in ShardStore.

        Args:
            dtype: kept for whoever reads the store later.
            is_volatile: no commit keeps it, and writes overwrite it in place.

        Raises:
            ValueError: as in ShardStore; or a volatile key has the name of one that was deleted since the last commit.
        """
        with self._gate:
            if is_volatile and key in self._changed and key not in self._keys:
                raise ValueError(f"key {key!r} was deleted since the last commit; commit, then it may become volatile")
            super().create(key, nbytes)
            with self._lock:
                if is_volatile:
                    self._volatile.add(key)
                else:
                    self._dtypes[key] = dtype
                    self._changed.add(key)

    def delete(self, key: str) -> None:
        """As in ShardStore; the last generation keeps the key until the next commit."""
        with self._gate:
            super().delete(key)
            with self._lock:
                if key in self._volatile:
                    self._volatile.discard(key)
                    return
                self._dtypes.pop(key, None)
                self._changed.add(key)

    def commit(
        self,
        step: int,
        timeout_s: float | None = None,
        *,
        notes: Mapping[str, bytes] | None = None,
        before: Before = Before.FORGET,
    ) -> int:
        """Make every write that was submitted durable, as one new generation; its number.

        Reads and writes may go on meanwhile; other commits wait, and so do `create` and `delete`.

        Args:
            notes: what the program notes with it, by name; names that are left out keep their last note.
            before: whether the generation before can be gone back to, also by a later process. Its bytes take space
                until `forget_before`.

        Raises:
            IoTimeoutError: writes did not end in time. Nothing has changed.
            StorageError: bytes are missing because a write failed, or the manifest cannot be written to. The last
                generation is intact; what was written since is still there, to be completed and committed again.
            WriteError: a drive did not keep what was written; it has to be written again.
            ClosedError: the store is closed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._gate:
            while True:
                with self._lock:
                    self._check_open()
                    writes = [
                        operation.ticket
                        for operation in self._operations.in_flight
                        if operation.op is Op.WRITE and operation.key not in self._volatile
                    ]
                    if not writes:
                        snapshot = self._snapshot(step, notes or {}, before)
                        break
                for ticket in writes:
                    if not ticket.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                        raise IoTimeoutError(
                            f"commit of step {step}: {len(writes)} writes have not ended within {timeout_s} s. The "
                            "drive is stuck or far too slow; check it, or allow more time (nvme.io_timeout_s)"
                        )
            self._commit(snapshot)
            return self._manifest.generation

    def forget_before(self) -> None:
        """Nobody will go back further than the last commit: give back what only the one before it needs."""
        with self._lock:
            kept, self._kept = self._kept, []
            if kept:
                self._space.free_retired(kept)

    def step_back(self, timeout_s: float | None = None) -> None:
        """Go back to the generation that the last commit kept, before `forget_before`; otherwise as `roll_back`.

        Raises:
            StorageError: none was kept; nothing has changed.
            IoTimeoutError, IntegrityError, ClosedError: as `roll_back`.
        """
        with self._gate:
            self._come_to_rest(timeout_s)
            self._manifest.go_back()
            self._take_up(self._manifest.load())

    def roll_back(self, timeout_s: float | None = None) -> None:
        """Go back to the last commit: every key is as it was then, what came later is gone. Volatile keys stay.

        Nothing may be submitted meanwhile.

        Raises:
            IoTimeoutError: transfers did not end in time; nothing has changed.
            IntegrityError: the manifest cannot be read any more; nothing has changed.
            ClosedError: the store is closed.
        """
        with self._gate:
            self._come_to_rest(timeout_s)
            self._take_up(self._manifest.load())

    # Parts -----------------------------------------------------------------------------------------------------

    def _come_to_rest(self, timeout_s: float | None) -> None:
        with self._lock:
            self._check_open()
        if not self.drain(timeout_s):
            raise IoTimeoutError(
                f"going back from step {self.step}: transfers have not ended within {timeout_s} s. The drive is stuck "
                "or far too slow; check it, or allow more time (nvme.io_timeout_s)"
            )

    def _take_up(self, records: Sequence[KeyRecord]) -> None:
        """Make the keys those of a generation."""
        restored = entries_of(records, self._checksum, self._manifest.path)
        with self._lock:
            self._check_open()
            self._keys = {key: entry for key, entry in self._keys.items() if key in self._volatile}
            volatile = [piece for entry in self._keys.values() for piece in entry.pieces]
            self._space.go_back([piece for record in records for piece in record.pieces], volatile)
            self._keys |= restored
            self._dtypes = {record.key: record.dtype for record in records}
            self._changed, self._kept, self._unsynced = set(), [], Holds()

    def _snapshot(self, step: int, notes: Mapping[str, bytes], before: Before) -> _Snapshot:
        """Note what is to be committed; from now on nobody overwrites it. Called under the lock; no write is in flight.

        Raises:
            StorageError: bytes are missing.
        """
        for key, entry in self._keys.items():
            if key in self._volatile:
                continue
            for start, stop, cause in entry.order.lost:
                raise StorageError(
                    f"step {step} cannot be committed: the write of {start} to {stop} of {key!r} failed"
                ) from cause
        changed, self._changed = sorted(self._changed), set()
        generation = self._manifest.generation + 1
        records = [
            record_of(key, self._keys[key], dtype=self._dtypes[key], generation=generation, step=step)
            for key in changed
            if key in self._keys
        ]
        removed = [key for key in changed if key not in self._keys]
        # What is fresh belongs to a key that was made or written since the last commit.
        kept = [piece for record in records for piece in record.pieces]
        self._unsynced.hold([piece.extent for piece in kept if self._space.is_fresh(piece)])
        retired = self._space.seal([piece for key in self._volatile for piece in self._keys[key].pieces])
        return _Snapshot(step, notes, records, removed, retired, before)

    def _commit(self, snapshot: _Snapshot) -> None:
        """Make a snapshot the last generation; if that fails, what it refers to is kept for the next commit."""
        try:
            self._on_commit_point("start")
            self._sync()
            self._manifest.commit(
                snapshot.step,
                snapshot.records,
                snapshot.removed,
                self._on_commit_point,
                notes=snapshot.notes,
                before=snapshot.before,
            )
        except BaseException:
            # Whether the transaction reached the disk cannot be known: what it refers to must not be overwritten, so
            # it is not fresh any more, and what the generation before refers to is not given back.
            with self._lock:
                self._changed |= {record.key for record in snapshot.records} | set(snapshot.removed)
                self._space.retired = [*snapshot.retired, *self._space.retired]
            raise
        with self._lock:
            if snapshot.before is Before.FORGET:
                self._space.free_retired(snapshot.retired)
            else:
                self._kept += snapshot.retired
        self._on_commit_point("freed")

    def _sync(self) -> None:
        for drive in self._drives:
            try:
                sync_data(drive.file.fd)
            except OSError as error:
                # The kernel forgets which pages it could not write: asking again would say that all is well.
                failure = WriteError(
                    f"{drive.file.path} could not be made durable: {os.strerror(error.errno or 0)}. What was written "
                    "since the last commit has to be written again",
                    path=str(drive.file.path),
                    errno=error.errno,
                )
                self._lose(failure)
                raise failure from error
            self._on_commit_point(f"synced {drive.file.path.name}")
        with self._lock:
            self._unsynced = Holds()

    def _lose(self, error: WriteError) -> None:
        """Nobody knows what is left of what was written since the last commit, also of what was while this one ran.

        A write that is in flight now may have given the drive bytes that it has lost already.
        """
        with self._lock:
            keys = self._keys.keys() - self._volatile
            for entry in map(self._keys.__getitem__, keys):
                for piece in entry.pieces:
                    if self._space.is_fresh(piece) or self._unsynced.covers(piece.extent):
                        entry.order.note_write(piece.start, piece.stop, error)
            self._operations.doubt_writes(keys, error)
            self._unsynced = Holds()

    def _plan(self, entry: StoredKey, operation: Operation, digests: Digests | None) -> None:
        super()._plan(entry, operation, digests)
        if operation.op is Op.WRITE and operation.key not in self._volatile:
            self._changed.add(operation.key)
        if entry.checksums is not None and operation.check is not None:
            if operation.op is Op.WRITE:
                entry.checksums.generation = self._manifest.generation + 1
            operation.check.generation = entry.checksums.generation
