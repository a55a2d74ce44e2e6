"""Versioned stores: what was committed is found again, whatever happened after it."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.durable import DurableFolder
from storage.errors import (
    ClosedError,
    IntegrityError,
    IoTimeoutError,
    StorageError,
    SwapFullError,
    SwapInUseError,
    WriteError,
)
from storage.manifest import Before
from storage.pool import HostPool
from storage.swapfile import OWNER_FILE
from storage.types import Op, Ticket
from storage.versioned import VersionedStore
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, failure, filled, finish
from tests.storage.versions import OPTIONS, check_extents, get, is_damaged, open_versioned, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionedStore]:
    with_keys = open_versioned(tmp_path)
    yield with_keys
    with_keys.close()


def reopen(store: VersionedStore, folder: Path, drives: int = 1) -> VersionedStore:
    store.close()
    return open_versioned(folder, drives=drives)


def test_what_was_committed_is_found_again(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    assert (store.generation, store.step, store.keys()) == (0, -1, [])
    store.create("blocks.3", 8 * PAGE, "float32")
    store.create("head", 3 * PAGE)
    expected = {"blocks.3": put(store, pool, "blocks.3", 1, 8), "head": put(store, pool, "head", 2, 3)}
    assert store.commit(7) == 1
    store = reopen(store, tmp_path)
    assert (store.generation, store.step, store.keys()) == (1, 7, ["blocks.3", "head"])
    assert (store.dtype_of("blocks.3"), store.dtype_of("head"), store.nbytes_of("head")) == ("float32", "", 3 * PAGE)
    assert {key: get(store, pool, key) for key in expected} == expected
    check_extents(store)
    store.close()


def test_what_was_not_committed_is_gone(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    for key in ("a", "b"):
        store.create(key, 8 * PAGE)
    old = {key: put(store, pool, key, number, 8) for number, key in enumerate(("a", "b"))}
    store.commit(1)
    put(store, pool, "a", 9, 3, first=2)
    store.delete("b")
    store.create("c", PAGE)
    put(store, pool, "c", 10, 1)
    check_extents(store)
    store = reopen(store, tmp_path)
    assert {key: get(store, pool, key) for key in old} == old
    assert store._drives[0].file.extents.used() == [(0, 8 * PAGE), (8 * PAGE, 8 * PAGE)]
    store.close()


def test_parts_of_keys_are_written_elsewhere(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 8 * PAGE)
    expected = bytearray(put(store, pool, "a", 1, 8))
    store.commit(1)
    for turn, (first, pages) in enumerate([(2, 3), (4, 1), (0, 1), (3, 5), (0, 8)], start=2):
        expected[first * PAGE : (first + pages) * PAGE] = put(store, pool, "a", turn, pages, first)
        assert get(store, pool, "a") == expected
        check_extents(store)
        if turn % 2:
            store.commit(turn)
            store = reopen(store, tmp_path)
            assert get(store, pool, "a") == expected
            check_extents(store)
    store.close()


def test_space_is_at_most_doubled(store: VersionedStore, pool: HostPool) -> None:
    store.create("a", 16 * PAGE)
    store.create("b", 16 * PAGE)
    for turn in range(6):
        for key in ("a", "b"):
            put(store, pool, key, turn, 16)
            put(store, pool, key, turn, 7, first=turn)
        store.commit(turn)
        assert store._drives[0].file.extents.capacity_nbytes == 64 * PAGE
        assert sum(nbytes for _, nbytes in store._drives[0].file.extents.used()) == 32 * PAGE


def test_committing_stays_within_the_limit_of_all_files(tmp_path: Path, pool: HostPool) -> None:
    """Twice the keys is enough, whatever order they are written in; less is refused, and nothing is lost."""
    options = replace(OPTIONS, files_nbytes=32 * PAGE)
    with closing(open_versioned(tmp_path, drives=2, capacity_nbytes=32 * PAGE, options=options)) as store:
        content = {}
        for key in ("a", "b"):
            store.create(key, 8 * PAGE)
            content[key] = put(store, pool, key, 1, 8)
        store.commit(1)
        for step in range(2, 6):
            for key in ("a", "b") if step % 2 else ("b", "a"):
                content[key] = put(store, pool, key, step, 8)
            store.commit(step)
        assert {key: get(store, pool, key) for key in content} == content
        store.create("c", 16 * PAGE)
        with pytest.raises(SwapFullError, match="beyond their limit"):
            put(store, pool, "a", 9, 8)
        assert {key: get(store, pool, key) for key in content} == content
        sizes = [os.fstat(drive.file.fd).st_size for drive in store._drives]
        assert sum(sizes) == 32 * PAGE
        check_extents(store)


def test_several_drives(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path, drives=3, capacity_nbytes=16 * MIB)
    store.create("a", 4 * MIB)
    put(store, pool, "a", 1, 4 * MIB // PAGE)
    store.commit(1)
    expected = put(store, pool, "a", 2, 4 * MIB // PAGE)
    store.commit(2)
    store = reopen(store, tmp_path, drives=3)
    assert get(store, pool, "a") == expected
    check_extents(store)
    store.close()
    with pytest.raises(StorageError, match="lies on 3 drives, but 2 were named"):
        open_versioned(tmp_path, drives=2)


def test_damage_is_caught_after_reopening(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 8 * PAGE)
    put(store, pool, "a", 1, 8)
    put(store, pool, "a", 2, 1, first=3)
    store.commit(4)
    path, place = store._drives[0].file.path, store._keys["a"].pieces[0].extent.offset
    store.close()
    data = bytearray(path.read_bytes())
    data[place + 7 * PAGE] ^= 16
    path.write_bytes(data)
    store = open_versioned(tmp_path)
    with pool.lease(8 * PAGE, "x") as lease:
        error = failure(store.submit_read("a", lease.memory, tag=TAG))
        assert isinstance(error, IntegrityError)
        assert (error.key, error.generation, error.path) == ("a", 1, str(path))
        finish(store.submit_read("a", lease.memory[: 3 * PAGE], tag=TAG))
    # Damage beside a partial write outlives the commit and the process.
    put(store, pool, "a", 3, 1, first=5)
    store.commit(5)
    store = reopen(store, tmp_path)
    assert is_damaged(store, pool, "a")
    store.close()


def test_a_commit_with_failed_writes_is_refused(tmp_path: Path, pool: HostPool) -> None:
    faults: list[FaultyBackend] = []

    def wrap(backend: object) -> FaultyBackend:
        faults.append(FaultyBackend(backend))  # type: ignore[arg-type]
        return faults[-1]

    store = open_versioned(tmp_path, wrap_backend=wrap)
    store.create("a", 8 * PAGE)
    old = put(store, pool, "a", 1, 8)
    store.commit(1)
    faults[0].inject(Fault.IO_ERROR, op=Op.WRITE)
    with filled(pool, 8 * PAGE, 2) as lease:
        failure(store.submit_write("a", lease.memory, tag=TAG))
    with pytest.raises(StorageError, match="step 2 cannot be committed: the write of 0 to 32768 of 'a' failed"):
        store.commit(2)
    assert store.generation == 1
    new = put(store, pool, "a", 2, 8)
    store.commit(2)
    assert get(store, pool, "a") == new != old
    check_extents(store)
    store.close()


def test_a_drive_that_does_not_keep_what_was_written(
    store: VersionedStore, tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("a", PAGE)
    put(store, pool, "a", 1, 1)
    store.commit(1)
    put(store, pool, "a", 2, 1)

    def fail(fd: int) -> None:
        raise OSError(5, "EIO")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteError, match="could not be made durable"):
            store.commit(2)
    with pytest.raises(StorageError, match="cannot be committed"):
        store.commit(2)
    new = put(store, pool, "a", 3, 1)
    assert store.commit(2) == 2
    again = reopen(store, tmp_path)
    assert get(again, pool, "a") == new
    again.close()


def test_a_drive_that_loses_what_is_being_written_around(
    tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a write during the commit leaves of a piece is lost too, and so is what that write gave."""
    is_meanwhile = False

    def on_point(name: str) -> None:
        if is_meanwhile and name == "start":
            put(store, pool, "a", 3, 2, first=3)

    store = open_versioned(tmp_path, on_commit_point=on_point)
    store.create("a", 8 * PAGE)
    store.create("volatile", PAGE, is_volatile=True)
    put(store, pool, "a", 1, 8)
    kept = put(store, pool, "volatile", 5, 1)
    store.commit(1)
    put(store, pool, "a", 2, 8)

    def fail(fd: int) -> None:
        raise OSError(5, "EIO")

    is_meanwhile = True
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteError, match="could not be made durable"):
            store.commit(2)
    is_meanwhile = False
    for page in range(8):
        with pool.lease(PAGE, "a") as lease:
            ticket = store.submit_read("a", lease.memory, offset=page * PAGE, tag=TAG)
            assert isinstance(failure(ticket), WriteError)
    for first, pages in ((0, 3), (5, 3), (3, 1)):
        put(store, pool, "a", 4, pages, first=first)
        with pytest.raises(StorageError, match="cannot be committed"):
            store.commit(2)
    put(store, pool, "a", 4, 1, first=4)
    assert get(store, pool, "volatile") == kept
    store.commit(2)
    check_extents(store)
    store.close()


def test_a_write_that_a_drive_has_in_part_when_it_fails_is_lost_at_its_end(
    tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive may have lost its first bytes already, and would not say so again."""
    faults: list[FaultyBackend] = []
    submitted: list[Ticket] = []

    def wrap(backend: Backend) -> FaultyBackend:
        faults.append(FaultyBackend(backend))
        return faults[-1]

    def on_point(name: str) -> None:
        if name == "start" and store.generation and not submitted:  # once
            faults[0].inject(Fault.STUCK, op=Op.WRITE)
            submitted.append(store.submit_write("a", lease.memory[: 2 * PAGE], offset=PAGE, tag=TAG))
            submitted.append(store.submit_write("a", lease.memory[2 * PAGE :], offset=2 * PAGE, tag=TAG))  # is held
            submitted.append(store.submit_write("volatile", lease.memory[:PAGE], tag=TAG))

    def fail(fd: int) -> None:
        raise OSError(5, "EIO")

    store = open_versioned(tmp_path, on_commit_point=on_point, wrap_backend=wrap)
    store.create("a", 4 * PAGE)
    store.create("volatile", PAGE, is_volatile=True)
    put(store, pool, "a", 1, 4)
    store.commit(1)
    with filled(pool, 4 * PAGE, 2) as lease:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail)
            with pytest.raises(WriteError, match="could not be made durable"):
                store.commit(2)
        faults[0].release_stuck()
        assert isinstance(failure(submitted[0]), WriteError)
        finish(submitted[1])
        finish(submitted[2])
        with pytest.raises(StorageError, match="cannot be committed: the write of 4096 to 8192"):
            store.commit(2)
        put(store, pool, "a", 3, 1, first=1)
        store.commit(2)
        assert get(store, pool, "a")[2 * PAGE :] == bytes(lease.memory[2 * PAGE :])
    check_extents(store)
    store.close()


def test_what_an_interrupted_commit_left_unsynced_is_lost_with_the_next_one(
    store: VersionedStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("a", PAGE)
    put(store, pool, "a", 1, 1)

    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    def fail(fd: int) -> None:
        raise OSError(5, "EIO")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.commit(1)
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteError, match="could not be made durable"):
            store.commit(1)
    with pytest.raises(StorageError, match="cannot be committed"):
        store.commit(1)
    new = put(store, pool, "a", 2, 1)
    store.commit(1)
    assert get(store, pool, "a") == new


def test_a_commit_that_the_manifest_refuses(tmp_path: Path, pool: HostPool) -> None:
    is_full = True

    def on_point(name: str) -> None:
        if is_full and name == "before commit":
            raise sqlite3.OperationalError("database or disk is full")

    store = open_versioned(tmp_path, on_commit_point=on_point)
    store.create("a", 4 * PAGE)
    put(store, pool, "a", 1, 4)
    with pytest.raises(StorageError, match=r"generation 1 could not be committed.*disk is full"):
        store.commit(1)
    first = {piece.extent for piece in store._keys["a"].pieces}
    is_full = False
    new = put(store, pool, "a", 2, 4)
    assert first.isdisjoint(piece.extent for piece in store._keys["a"].pieces)  # it may have been committed after all
    check_extents(store)
    store.commit(1)
    check_extents(store)
    store = reopen(store, tmp_path)
    assert (store.generation, get(store, pool, "a")) == (1, new)
    store.close()


def test_no_room_for_a_second_copy(tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_versioned(tmp_path, capacity_nbytes=64 << 10)
    store.create("a", 12 * PAGE)
    old = put(store, pool, "a", 1, 12)
    store.commit(1)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: _Usage())
        with filled(pool, 12 * PAGE, 2) as lease, pytest.raises(SwapFullError, match="only 0 bytes are free"):
            store.submit_write("a", lease.memory, tag=TAG)
    assert get(store, pool, "a") == old
    check_extents(store)
    new = put(store, pool, "a", 2, 12)
    store.commit(2)
    assert get(store, pool, "a") == new
    store.close()


class _Usage:
    free = 0


def test_another_process_is_refused(store: VersionedStore, tmp_path: Path) -> None:
    with pytest.raises(SwapInUseError, match=rf"versioned-rank0 is in use by process {os.getpid()} \(run 'infinity'\)"):
        open_versioned(tmp_path)
    code = (
        "import sys; from pathlib import Path; from storage.versioned import VersionedStore\n"
        "VersionedStore.open([Path(sys.argv[1])], 0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "drive0")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert f"SwapInUseError: {tmp_path}" in ended.stderr
    assert f"in use by process {os.getpid()}" in ended.stderr
    open_versioned(tmp_path, rank=1).close()
    store.close()
    open_versioned(tmp_path).close()


def test_damaged_manifests_are_refused(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", PAGE)
    put(store, pool, "a", 1, 1)
    store.commit(1)
    path, shards = store._manifest.path, store._drives[0].file.path
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE keys SET pieces = '[[0, 0, 4096, 4096]]'")
    db.close()
    with pytest.raises(IntegrityError, match="is damaged: what it says of key 'a'"):
        open_versioned(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(b"x" * len(whole))
    with pytest.raises(IntegrityError, match="cannot be read"):
        open_versioned(tmp_path)
    path.write_bytes(whole)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM store WHERE name = 'identity'")
    db.close()
    with pytest.raises(IntegrityError, match="cannot be read"):
        open_versioned(tmp_path)
    assert shards.exists()


@pytest.mark.parametrize("nbytes", [0, PAGE, None])
def test_files_that_are_missing_or_cut(tmp_path: Path, pool: HostPool, nbytes: int | None) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 2 * PAGE)
    put(store, pool, "a", 1, 2)
    store.commit(1)
    path = store._drives[0].file.path
    store.close()
    if nbytes is None:
        path.unlink()
    else:
        os.truncate(path, nbytes)
    with pytest.raises(IntegrityError, match="missing" if nbytes is None else "do not agree"):
        open_versioned(tmp_path)


def test_descriptors_do_not_grow(store: VersionedStore, pool: HostPool) -> None:
    store.create("a", PAGE)
    put(store, pool, "a", 0, 1)
    store.commit(0)
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(20):
        put(store, pool, "a", turn, 1)
        store.commit(turn)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_store_refuses(store: VersionedStore) -> None:
    store.close()
    with pytest.raises(ClosedError):
        store.commit(1)
    with pytest.raises(ClosedError):
        store.create("a", PAGE)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one directory"):
        VersionedStore.open([], PAGE)
    with pytest.raises(ValueError, match="-1 bytes"):
        VersionedStore.open([tmp_path], -1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot hold swap files"):
        VersionedStore.open([tmp_path / "file"], PAGE)


def test_the_name_of_a_key_that_a_generation_has_is_not_for_a_volatile_one(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", PAGE)
    put(store, pool, "a", 1, 1)
    store.commit(1)
    store.delete("a")
    with pytest.raises(ValueError, match="'a' was deleted since the last commit; commit, then"):
        store.create("a", PAGE, is_volatile=True)
    store.commit(2)
    store.create("a", 2 * PAGE, is_volatile=True)
    expected = put(store, pool, "a", 2, 2)
    store.commit(3)
    assert get(store, pool, "a") == expected
    store = reopen(store, tmp_path)
    assert store.keys() == []
    check_extents(store)
    store.close()


@pytest.mark.parametrize("goes_back_one_more", [False, True])
def test_going_back_while_transfers_go_on_changes_nothing(
    tmp_path: Path, pool: HostPool, goes_back_one_more: bool
) -> None:
    faults: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        faults.append(FaultyBackend(backend))
        return faults[-1]

    store = open_versioned(tmp_path, wrap_backend=wrap)
    store.create("a", PAGE)
    contents = []
    for step in (1, 2):
        contents.append(put(store, pool, "a", step, 1))
        store.commit(step, before=Before.KEEP)
    go_back = store.step_back if goes_back_one_more else store.roll_back
    faults[0].inject(Fault.STUCK)
    with filled(pool, PAGE, 3) as lease:
        ticket = store.submit_write("a", lease.memory, tag=TAG)
        with pytest.raises(IoTimeoutError, match="going back from step 2"):
            go_back(0.01)
        assert (store.generation, store.step) == (2, 2)
        faults[0].release_stuck()
        finish(ticket)
    go_back(WAIT_S)
    assert (store.step, get(store, pool, "a")) == ((1, contents[0]) if goes_back_one_more else (2, contents[1]))
    check_extents(store)
    store.close()


def test_going_back_to_checksums_of_something_else_is_refused(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", PAGE)
    put(store, pool, "a", 1, 1)
    store.commit(1)
    (record,) = store._manifest.load()
    store._manifest.commit(2, [replace(record, digests=record.digests * 2)], [])
    newer = put(store, pool, "a", 2, 1)
    with pytest.raises(IntegrityError, match="checksums of 1 blocks for 'a'"):
        store.roll_back(WAIT_S)
    assert get(store, pool, "a") == newer  # nothing has changed
    store.close()
    with pytest.raises(IntegrityError, match="checksums of 1 blocks for 'a'"):
        open_versioned(tmp_path)


def test_a_closed_store_does_not_go_back(tmp_path: Path) -> None:
    store = open_versioned(tmp_path)
    store.close()
    for go_back in (store.step_back, store.roll_back):
        with pytest.raises(ClosedError):
            go_back(WAIT_S)


def test_a_folder_is_let_go_although_that_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = DurableFolder(tmp_path / "folder", "run")
    owner = (folder.path / OWNER_FILE).read_text()

    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        folder.close()
    assert (folder.path / OWNER_FILE).read_text() == owner  # still readable
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder.path}: could not note that nobody uses it: No space left on device"
    ]
    again = DurableFolder(tmp_path / "folder", "the next run")
    assert json.loads((again.path / OWNER_FILE).read_text())["run"] == "the next run"
    again.close()
