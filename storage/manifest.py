"""The durable metadata of a versioned store: which bytes of which file are a key's, and what they should hold.

One SQLite database in WAL mode. A commit is one transaction, so after a crash at any moment it tells either of the
generation before it or of the one it made. Every row carries a checksum of itself: SQLite notices a damaged structure,
but not a damaged number.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import xxhash

from storage.errors import IntegrityError, StorageError
from storage.stripes import Piece
from storage.types import Extent

MANIFEST_FILE = "manifest.sqlite"
_FORMAT = 1
_BUSY_TIMEOUT_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS store (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY, nbytes INTEGER, dtype TEXT, generation INTEGER, step INTEGER,
    pieces TEXT, digests BLOB, states BLOB, spans TEXT, check_sum TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, data BLOB, check_sum TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys_before (
    key TEXT PRIMARY KEY, nbytes INTEGER, dtype TEXT, generation INTEGER, step INTEGER,
    pieces TEXT, digests BLOB, states BLOB, spans TEXT, check_sum TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS notes_before (name TEXT PRIMARY KEY, data BLOB, check_sum TEXT) WITHOUT ROWID;
"""
_COLUMNS = "key, nbytes, dtype, generation, step, pieces, digests, states, spans, check_sum"

CommitPoint = Callable[[str], None]


class Before(Enum):
    """What a commit does with the generation that it replaces."""

    FORGET = "forget"
    KEEP = "keep"  # it can be gone back to, until the next one that is kept
    KEEP_OLDER = "keep older"  # it is forgotten, and the one that was kept before it stays


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as of a generation.

    Attributes:
        dtype: of the elements, in words of the caller; "" if it did not say.
        generation: number of the commit that wrote this.
        step: of the program, at that commit.
        pieces: where the bytes lie, by start.
        digests, states, spans: of its checksums (see `KeyChecksums.dump`); empty without.
    """

    key: str
    nbytes: int
    dtype: str
    generation: int
    step: int
    pieces: tuple[Piece, ...]
    digests: bytes = b""
    states: bytes = b""
    spans: str = ""


class Manifest:
    """The database of one store; its store's lock makes sure that one thread uses it at a time.

    Args:
        path: the database; made when missing.
        drives: number of drives; must be that of the store it was made for. None looks at a manifest that is there.

    Raises:
        IntegrityError: it cannot be read.
        StorageError: it is of another number of drives, or of a newer format.
    """

    def __init__(self, path: Path, drives: int | None) -> None:
        self.path = path
        if drives is None and not path.exists():
            raise self._unreadable(FileNotFoundError("the file is missing"))
        try:
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        try:
            self._db.execute("PRAGMA journal_mode = WAL").close()
            self._db.execute("PRAGMA synchronous = FULL").close()  # a commit that returned is on disk
            self._prepare(drives)
        except sqlite3.Error as error:
            self._db.close()
            raise self._unreadable(error) from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, drives: int | None) -> None:
        self._db.executescript(_SCHEMA)
        if not self._settings() and drives is not None:
            first = {"format": _FORMAT, "identity": secrets.token_hex(8), "drives": drives, "generation": 0, "step": -1}
            self._db.executemany("INSERT OR IGNORE INTO store VALUES (?, ?)", list(first.items()))
        found = self._settings()
        try:
            self.identity = str(found["identity"])
            self.generation, self.step = int(str(found["generation"])), int(str(found["step"]))
            form, count = int(str(found["format"])), int(str(found["drives"]))
        except (KeyError, ValueError) as error:
            raise self._unreadable(error) from error
        self.drives = count
        if form != _FORMAT:
            raise StorageError(f"{self.path} has format {form}; this version reads format {_FORMAT}")
        if drives is not None and count != drives:
            raise StorageError(f"the store of {self.path} lies on {count} drives, but {drives} were named")

    def _settings(self) -> dict[str, object]:
        with closing(self._db.execute("SELECT name, value FROM store")) as rows:
            return dict(rows.fetchall())

    def load(self) -> list[KeyRecord]:
        """Every key of the last committed generation.

        Raises:
            IntegrityError: it cannot be read, or a row is damaged or does not say where all of a key lies.
        """
        try:
            with closing(self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY key")) as rows:
                return [self._record(row) for row in rows.fetchall()]
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def notes(self) -> dict[str, bytes]:
        """What the program noted beside the keys, by name, as of the last committed generation.

        Raises:
            IntegrityError: it cannot be read, or a note is damaged.
        """
        return self._notes("notes")

    def notes_before(self) -> dict[str, bytes]:
        """The same, as of the generation that is kept to be gone back to; nothing when there is none.

        Raises:
            IntegrityError: it cannot be read, or a note is damaged.
        """
        return self._notes("notes_before")

    def _notes(self, table: str) -> dict[str, bytes]:
        try:
            with closing(self._db.execute(f"SELECT name, data, check_sum FROM {table}")) as rows:
                return {str(name): self._note(str(name), data, check_sum) for name, data, check_sum in rows.fetchall()}
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _note(self, name: str, data: object, check_sum: object) -> bytes:
        if not isinstance(data, bytes) or _note_checksum(name, data) != check_sum:
            raise IntegrityError(
                f"{self.path} is damaged: its note {name!r} is not what was committed. Nothing was changed; use a "
                "copy or a checkpoint",
                path=str(self.path),
                key=name,
                generation=self.generation,
            )
        return data

    def commit(
        self,
        step: int,
        changed: Iterable[KeyRecord],
        removed: Iterable[str],
        on_point: CommitPoint = lambda _: None,
        *,
        notes: Mapping[str, bytes] | None = None,
        before: Before = Before.FORGET,
    ) -> None:
        """Make the next generation: all of it, or, when this raises, none of it as far as one can know.

        Args:
            notes: what the program notes with it, by name; names that are left out keep their last note.

        Raises:
            StorageError: the database could not be written to.
        """
        generation = self.generation + 1
        try:
            self._db.execute("BEGIN IMMEDIATE").close()
            on_point("begun")
            if before is Before.KEEP:
                self._keep_before()
            self._db.executemany("DELETE FROM keys WHERE key = ?", [(key,) for key in removed]).close()
            on_point("removed")
            for record in changed:
                row = _row(record)
                marks = ", ".join("?" * len(row))
                self._db.execute(f"INSERT OR REPLACE INTO keys ({_COLUMNS}) VALUES ({marks})", row).close()
                on_point(f"wrote {record.key}")
            noted = [(name, data, _note_checksum(name, data)) for name, data in (notes or {}).items()]
            self._db.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", noted).close()
            on_point("noted")
            values = [(generation, "generation"), (step, "step")]
            self._db.executemany("UPDATE store SET value = ? WHERE name = ?", values).close()
            on_point("before commit")
            self._db.execute("COMMIT").close()
        except BaseException as error:
            self._roll_back()
            if not isinstance(error, sqlite3.Error):
                raise
            raise StorageError(
                f"generation {generation} could not be committed to {self.path}: {error}. The generation before it is "
                "intact, and what was written is still there: free space or repair the drive, and commit again"
            ) from error
        on_point("committed")
        self.generation, self.step = generation, step

    def _keep_before(self) -> None:
        for table in ("keys", "notes"):
            self._db.execute(f"DELETE FROM {table}_before").close()
            self._db.execute(f"INSERT INTO {table}_before SELECT * FROM {table}").close()
        values = [("generation_before", self.generation), ("step_before", self.step)]
        self._db.executemany("INSERT OR REPLACE INTO store VALUES (?, ?)", values).close()

    def go_back(self) -> None:
        """Make the generation that was kept the last one again; the one after it is gone.

        Raises:
            IntegrityError: it cannot be read.
            StorageError: none was kept, or the database could not be written to.
        """
        try:
            found = self._settings()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        if "generation_before" not in found:
            raise StorageError(f"{self.path} keeps no generation before {self.generation} to go back to")
        generation, step = int(str(found["generation_before"])), int(str(found["step_before"]))
        try:
            self._db.execute("BEGIN IMMEDIATE").close()
            for table in ("keys", "notes"):
                self._db.execute(f"DELETE FROM {table}").close()
                self._db.execute(f"INSERT INTO {table} SELECT * FROM {table}_before").close()
                self._db.execute(f"DELETE FROM {table}_before").close()
            values = [(generation, "generation"), (step, "step")]
            self._db.executemany("UPDATE store SET value = ? WHERE name = ?", values).close()
            self._db.execute("DELETE FROM store WHERE name IN ('generation_before', 'step_before')").close()
            self._db.execute("COMMIT").close()
        except sqlite3.Error as error:
            self._roll_back()
            raise StorageError(f"{self.path} could not go back to generation {generation}: {error}") from error
        self.generation, self.step = generation, step

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK").close()

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def _record(self, row: tuple[object, ...]) -> KeyRecord:
        key, nbytes, dtype, generation, step, pieces, digests, states, spans, check_sum = row
        try:
            record = KeyRecord(
                str(key),
                int(str(nbytes)),
                str(dtype),
                int(str(generation)),
                int(str(step)),
                tuple(Piece(start, Extent(*extent)) for start, *extent in json.loads(str(pieces))),
                digests if isinstance(digests, bytes) else b"",
                states if isinstance(states, bytes) else b"",
                str(spans),
            )
        except (ValueError, TypeError) as error:
            raise self._unreadable(error) from error
        if _row(record)[-1] != check_sum:
            raise IntegrityError(
                f"{self.path} is damaged: what it says of key {record.key!r} (generation {record.generation}) is not "
                "what was committed. Nothing was changed; use a copy or a checkpoint",
                path=str(self.path),
                key=record.key,
                generation=record.generation,
            )
        end = 0
        for piece in record.pieces:
            if piece.start != end or not 0 <= piece.extent.drive < self.drives:
                break
            end = piece.stop
        if end != record.nbytes:
            raise IntegrityError(f"{self.path} does not say where all of {record.key!r} lies", key=record.key)
        return record

    def _unreadable(self, error: Exception) -> IntegrityError:
        return IntegrityError(
            f"the manifest {self.path} cannot be read: {error}. Nothing was changed; use a copy or a checkpoint",
            path=str(self.path),
        )


def used_spans(records: Sequence[KeyRecord], drive: int) -> list[tuple[int, int]]:
    """Spans of a drive, as (offset, nbytes), that keys of a generation take."""
    pieces = [piece for record in records for piece in record.pieces if piece.extent.drive == drive]
    return [(piece.extent.offset, piece.extent.nbytes) for piece in pieces]


def _note_checksum(name: str, data: bytes) -> str:
    hasher = xxhash.xxh3_64(name.encode())
    hasher.update(data)
    return hasher.hexdigest()


def _row(record: KeyRecord) -> tuple[object, ...]:
    pieces = json.dumps([(one.start, one.extent.drive, one.extent.offset, one.extent.nbytes) for one in record.pieces])
    numbers = (record.key, record.nbytes, record.dtype, record.generation, record.step)
    hasher = xxhash.xxh3_64(json.dumps([*numbers, pieces, record.spans]).encode())
    hasher.update(record.digests)
    hasher.update(record.states)
    return (*numbers, pieces, record.digests, record.states, record.spans, hasher.hexdigest())
