"""A shard store that survives: what was committed is what a later process finds, whatever happened in between.

Nothing that a commit refers to is ever overwritten. The first write to bytes of a committed generation goes to new
extents; `commit` waits for the drives, then notes in one transaction of the manifest where every key lies now, then
gives the old extents back. Killed before the transaction, a process leaves the old generation; killed after it, the
new one. Keys need at most twice their space.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from storage.align import align_up
from storage.checksums import Checksum
from storage.drives import Drive, StorageOptions, WrapBackend
from storage.durable import DurableFolder, open_durable_drive
from storage.errors import IntegrityError, IoTimeoutError, StorageError, WriteError
from storage.filesystems import sync_data
from storage.manifest import MANIFEST_FILE, CommitPoint, KeyRecord, Manifest
from storage.ordering import Operation
from storage.store import ShardStore
from storage.stripes import Piece
from storage.swapfile import make_directory_error
from storage.transfer import StoredKey
from storage.types import Extent, Op

_SHARE_NBYTES = 1 << 16


class VersionedStore(ShardStore):
    """A ShardStore with generations. Keys, reads and writes are as there; `commit` makes what was written last.

    `close`, or a crash, without a commit goes back to the last generation. A write may need new space, so that
    `submit_write` raises SwapFullError when there is none; what was stored before is intact then.
    """

    def __init__(
        self,
        drives: Sequence[Drive],
        closing: ExitStack,
        manifest: Manifest,
        *,
        checksum: Checksum,
        on_commit_point: CommitPoint,
    ) -> None:
        super().__init__(drives, closing, checksum=checksum)
        self._manifest = manifest
        self._on_commit_point = on_commit_point
        self._fresh: set[tuple[int, int]] = set()  # extents (drive, offset) that no generation refers to
        self._retired: list[Extent] = []  # extents that only the last generation refers to
        self._changed: set[str] = set()
        self._dtypes: dict[str, str] = {}
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
        wrap_backend: WrapBackend | None = None,
        on_commit_point: CommitPoint = lambda _: None,
    ) -> VersionedStore:
        """Open the store in these directories as it was at its last commit, or make one.

        Args:
            paths: directories, one per drive, always in the same order.
            capacity_nbytes: space to reserve on disk; twice that of all keys, if all of them are rewritten at a time.
            on_commit_point: called with a name at every step of a commit, for tests of crashes.

        Raises:
            SwapInUseError: another process uses it; says which.
            IntegrityError: the manifest cannot be read, or the files are not those it belongs to.
            SwapFullError: too little space.
            StorageError: a directory cannot be used, or cannot do what `options.engine` insists on.
            ValueError: no path, or a negative capacity.
        """
        if not paths:
            raise ValueError("a shard store needs at least one directory")
        if capacity_nbytes < 0:
            raise ValueError(f"a shard store of {capacity_nbytes} bytes was asked for; the capacity is not negative")
        options = options or StorageOptions()
        share_nbytes = align_up(-(-capacity_nbytes // len(paths)), _SHARE_NBYTES)
        with ExitStack() as closing:
            folders = [_open_folder(Path(path), rank, run_name, closing) for path in paths]
            manifest = Manifest(folders[0].path / MANIFEST_FILE, len(paths))
            closing.callback(manifest.close)
            records = manifest.load()
            _check_records(manifest, records, len(paths))
            used = [
                [
                    (one.extent.offset, one.extent.nbytes)
                    for record in records
                    for one in record.pieces
                    if one.extent.drive == n
                ]
                for n in range(len(paths))
            ]
            drives = [
                open_durable_drive(
                    folder,
                    f"drive{number}-{manifest.identity}.shards",
                    share_nbytes,
                    used=used[number],
                    options=options,
                    wrap_backend=wrap_backend,
                    closing=closing,
                )
                for number, folder in enumerate(folders)
            ]
            for folder in folders:
                folder.sync()
            store = cls(
                drives,
                closing.pop_all(),
                manifest,
                checksum=Checksum(options.checksum),
                on_commit_point=on_commit_point,
            )
        store._restore(records)
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

    def create(self, key: str, nbytes: int, dtype: str = "") -> None:
        """As in ShardStore; `dtype` is kept for whoever reads the store later."""
        with self._gate:
            super().create(key, nbytes)
            self._dtypes[key] = dtype
            self._changed.add(key)

    def delete(self, key: str) -> None:
        """As in ShardStore; the last generation keeps the key until the next commit."""
        with self._gate:
            super().delete(key)
            self._dtypes.pop(key, None)
            self._changed.add(key)

    def commit(self, step: int, timeout_s: float | None = None) -> int:
        """Make everything that was submitted durable, as one new generation; its number. Other calls wait meanwhile.

        Raises:
            IoTimeoutError: transfers did not end in time. Nothing has changed.
            StorageError: bytes are missing because a write failed, or the manifest cannot be written to. The last
                generation is intact; what was written since is still there, to be completed and committed again.
            WriteError: a drive did not keep what was written; it has to be written again.
            ClosedError: the store is closed.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._gate:
            while True:
                if not self.drain(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                    raise IoTimeoutError(f"commit of step {step}: {len(self.describe_in_flight())} transfers go on")
                with self._lock:
                    self._check_open()
                    if not self._in_flight:
                        return self._commit(step)

    # Parts -----------------------------------------------------------------------------------------------------

    def _restore(self, records: Sequence[KeyRecord]) -> None:
        for record in records:
            checksums = self._make_checksums(record.key, record.nbytes)
            if checksums is not None and record.states:
                try:
                    checksums.restore(record.digests, record.states, record.spans)
                except (ValueError, TypeError) as error:
                    self.close()
                    raise IntegrityError(f"{self._manifest.path}: {error}", key=record.key) from error
                checksums.generation = record.generation
            self._keys[record.key] = StoredKey(record.nbytes, record.pieces, checksums)
            self._dtypes[record.key] = record.dtype

    def _commit(self, step: int) -> int:
        for key, entry in self._keys.items():
            for start, stop, cause in entry.order.lost:
                raise StorageError(
                    f"step {step} cannot be committed: the write of {start} to {stop} of {key!r} failed"
                ) from cause
        self._on_commit_point("start")
        self._sync()
        changed = sorted(self._changed)
        records = [self._record(key, step) for key in changed if key in self._keys]
        try:
            self._manifest.commit(
                step, records, [key for key in changed if key not in self._keys], self._on_commit_point
            )
        except BaseException:
            # Whether the transaction reached the disk cannot be known: what it refers to must not be overwritten.
            self._fresh.clear()
            raise
        self._fresh.clear()
        self._changed.clear()
        retired, self._retired = self._retired, []
        for extent in retired:
            self._drives[extent.drive].file.extents.free(extent.offset)
        self._on_commit_point("freed")
        return self._manifest.generation

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
                self._lose_fresh(failure)
                raise failure from error
            self._on_commit_point(f"synced {drive.file.path.name}")

    def _lose_fresh(self, error: WriteError) -> None:
        for entry in self._keys.values():
            for piece in entry.pieces:
                if self._is_fresh(piece):
                    entry.order.note_write(piece.start, piece.stop, error)

    def _record(self, key: str, step: int) -> KeyRecord:
        entry = self._keys[key]
        digests, states, spans = entry.checksums.dump() if entry.checksums is not None else (b"", b"", "")
        return KeyRecord(
            key,
            entry.nbytes,
            self._dtypes[key],
            self._manifest.generation + 1,
            step,
            tuple(entry.pieces),
            digests,
            states,
            spans,
        )

    def _is_fresh(self, piece: Piece) -> bool:
        return (piece.extent.drive, piece.extent.offset) in self._fresh

    def _allocate(self, drive: int, nbytes: int) -> int:
        offset = super()._allocate(drive, nbytes)
        self._fresh.add((drive, offset))
        return offset

    def _free(self, pieces: Sequence[Piece]) -> None:
        fresh = [piece for piece in pieces if self._is_fresh(piece)]
        self._retired += [piece.extent for piece in pieces if not self._is_fresh(piece)]
        super()._free(fresh)
        self._fresh -= {(piece.extent.drive, piece.extent.offset) for piece in fresh}

    def _place(self, entry: StoredKey, operation: Operation) -> None:
        old_pieces = entry.pieces
        if operation.op is Op.WRITE:
            entry.pieces = self._copy_on_write(old_pieces, operation.start, operation.stop)
            self._changed.add(operation.key)
        super()._place(entry, operation)
        operation.old_pieces = old_pieces
        if entry.checksums is not None and operation.check is not None:
            if operation.op is Op.WRITE:
                entry.checksums.generation = self._manifest.generation + 1
            operation.check.generation = entry.checksums.generation

    def _copy_on_write(self, pieces: Sequence[Piece], start: int, stop: int) -> Sequence[Piece]:
        """The pieces of a key after a write to `start` … `stop`, which must not touch a committed extent."""
        committed = [one for one in pieces if one.start < stop and start < one.stop and not self._is_fresh(one)]
        if not committed:
            return pieces
        replaced = set(committed)
        new: list[Piece] = []
        try:
            for a, b in _join([(max(one.start, start), min(one.stop, stop)) for one in committed]):
                new += self._allocate_pieces(a, b - a)
        except BaseException:
            self._free(new)
            raise
        kept = [one for one in pieces if one not in replaced]
        for piece in committed:
            kept += self._retire(piece, max(piece.start, start), min(piece.stop, stop))
        return tuple(sorted([*kept, *new], key=lambda piece: piece.start))

    def _retire(self, piece: Piece, start: int, stop: int) -> list[Piece]:
        """Bytes `start` to `stop` of a committed piece go when the next generation comes; what stays of it."""
        extents = self._drives[piece.extent.drive].file.extents
        left, middle, right = start - piece.start, stop - start, piece.stop - stop
        drive, offset = piece.extent.drive, piece.extent.offset
        stays = []
        if left:
            extents.split(offset, left)
            stays.append(Piece(piece.start, Extent(drive, offset, left)))
        if right:
            extents.split(offset + left, middle)
            stays.append(Piece(stop, Extent(drive, offset + left + middle, right)))
        self._retired.append(Extent(drive, offset + left, middle))
        return stays


def _open_folder(directory: Path, rank: int, run_name: str, closing: ExitStack) -> DurableFolder:
    try:
        folder = DurableFolder(directory / f"versioned-rank{rank}", run_name)
    except OSError as error:
        raise make_directory_error(directory, error) from error
    closing.callback(folder.close)
    return folder


def _check_records(manifest: Manifest, records: Sequence[KeyRecord], drives: int) -> None:
    for record in records:
        end = 0
        for piece in record.pieces:
            if piece.start != end or not 0 <= piece.extent.drive < drives:
                break
            end = piece.stop
        if end != record.nbytes:
            raise IntegrityError(f"{manifest.path} does not say where all of {record.key!r} lies", key=record.key)


def _join(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
