"""A key of a versioned store as its manifest notes it, there and back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from storage.checksums import Checksum, KeyChecksums
from storage.errors import IntegrityError
from storage.manifest import KeyRecord
from storage.transfer import StoredKey


def record_of(key: str, entry: StoredKey, *, dtype: str, generation: int, step: int) -> KeyRecord:
    """What is noted of a key, on which no write is in flight."""
    digests, states, spans = entry.checksums.dump() if entry.checksums is not None else (b"", b"", "")
    return KeyRecord(key, entry.nbytes, dtype, generation, step, tuple(entry.pieces), digests, states, spans)


def entries_of(records: Iterable[KeyRecord], checksum: Checksum, manifest: Path) -> dict[str, StoredKey]:
    """The keys of a generation, by name.

    Args:
        checksum: whether they are guarded from now on.
        manifest: that tells of them, for errors.

    Raises:
        IntegrityError: noted checksums are not those of a key of this size.
    """
    return {record.key: _entry_of(record, checksum, manifest) for record in records}


def _entry_of(record: KeyRecord, checksum: Checksum, manifest: Path) -> StoredKey:
    checksums = KeyChecksums(record.key, record.nbytes) if checksum is Checksum.XXH3 else None
    if checksums is not None and record.states:
        try:
            checksums.restore(record.digests, record.states, record.spans)
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{manifest}: {error}", path=str(manifest), key=record.key) from error
        checksums.generation = record.generation
    return StoredKey(record.nbytes, record.pieces, checksums)
