"""The manifest: one transaction per generation."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.errors import IntegrityError, StorageError
from storage.manifest import KeyRecord, Manifest
from storage.stripes import Piece
from storage.types import Extent
from tests.storage.helpers import PAGE


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[Manifest]:
    one = Manifest(tmp_path / "manifest", 2)
    yield one
    one.close()


def record(key: str, generation: int = 1) -> KeyRecord:
    pieces = (Piece(0, Extent(0, 8 * PAGE, PAGE)), Piece(PAGE, Extent(1, 0, 2 * PAGE)))
    return KeyRecord(key, 3 * PAGE, "float32", generation, 7, pieces, b"\x00\xff" * 4, b"\x01", '{"0": []}')


def again(manifest: Manifest) -> Manifest:
    manifest.close()
    return Manifest(manifest.path, 2)


def test_records_come_back(manifest: Manifest) -> None:
    assert (manifest.generation, manifest.step, manifest.load()) == (0, -1, [])
    records = [record(key) for key in ("", "blocks.3'; --", "ä")]
    manifest.commit(7, records, [])
    identity = manifest.identity
    manifest = again(manifest)
    assert (manifest.generation, manifest.step, manifest.identity) == (1, 7, identity)
    assert manifest.load() == records
    manifest.commit(8, [record("ä", 2)], ["", "never there"])
    manifest = again(manifest)
    assert manifest.load() == [records[1], record("ä", 2)]
    manifest.close()


@pytest.mark.parametrize("point", ["begun", "removed", "wrote b", "before commit"])
def test_a_commit_that_fails_changes_nothing(manifest: Manifest, point: str) -> None:
    manifest.commit(1, [record("a")], [])

    def on_point(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manifest.commit(2, [record("b")], ["a"], on_point)
    assert (manifest.generation, manifest.load()) == (1, [record("a")])
    manifest.commit(2, [record("b")], ["a"])
    assert (manifest.generation, manifest.load()) == (2, [record("b")])


def test_a_database_that_cannot_be_written_to(manifest: Manifest) -> None:
    manifest.commit(1, [record("a")], [])
    manifest._db.execute("PRAGMA query_only = ON").close()
    with pytest.raises(StorageError, match=r"generation 2 could not be committed .*readonly"):
        manifest.commit(2, [record("b")], [])
    manifest._db.execute("PRAGMA query_only = OFF").close()
    manifest.commit(2, [record("b")], [])
    assert manifest.load() == [record("a"), record("b")]


@pytest.mark.parametrize(
    "column", ["nbytes", "dtype", "generation", "step", "pieces", "digests", "states", "spans", "check_sum"]
)
def test_a_damaged_row_is_noticed(manifest: Manifest, column: str) -> None:
    manifest.commit(1, [record("a")], [])
    value = "[[0, 0, 0, 4096]]" if column == "pieces" else b"\x01" if column in ("digests", "states") else "5"
    manifest._db.execute("UPDATE keys SET " + column + " = ?", (value * 2 if value == b"\x01" else value,)).close()
    with pytest.raises(IntegrityError, match="is damaged: what it says of key 'a'"):
        manifest.load()


@pytest.mark.parametrize("pieces", ["", "[1]", "[[0]]", "{}x"])
def test_nonsense_is_noticed(manifest: Manifest, pieces: str) -> None:
    manifest.commit(1, [record("a")], [])
    manifest._db.execute("UPDATE keys SET pieces = ?", (pieces,)).close()
    with pytest.raises(IntegrityError, match="cannot be read"):
        manifest.load()


@pytest.mark.parametrize(("name", "value", "kind"), [("format", 2, StorageError), ("step", "x", IntegrityError)])
def test_settings_are_checked(manifest: Manifest, name: str, value: object, kind: type[StorageError]) -> None:
    manifest._db.execute("UPDATE store SET value = ? WHERE name = ?", (value, name)).close()
    with pytest.raises(kind, match="format 2" if name == "format" else "cannot be read"):
        again(manifest)


def test_a_directory_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="cannot be read") as caught:
        Manifest(tmp_path, 1)
    assert isinstance(caught.value.__cause__, sqlite3.Error)
