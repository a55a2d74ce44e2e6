"""Versioned stores that keep the generation before the last one, for several processes that commit one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.manifest import MANIFEST_FILE, Before, Manifest
from storage.pool import HostPool
from storage.versioned import VersionedStore
from tests.storage.helpers import PAGE, WAIT_S
from tests.storage.versions import check_extents, get, open_versioned, put


def used_nbytes(store: VersionedStore) -> int:
    return sum(nbytes for drive in store._drives for _, nbytes in drive.file.extents.used())


def commit(store: VersionedStore, pool: HostPool, step: int, before: Before = Before.KEEP) -> bytes:
    written = put(store, pool, "a", step, 8)
    store.commit(step, WAIT_S, notes={"run": b"%d" % step}, before=before)
    return written


def test_the_generation_before_is_gone_back_to_once(tmp_path: Path, pool: HostPool) -> None:
    with_key = open_versioned(tmp_path)
    with_key.create("a", 8 * PAGE)
    first = commit(with_key, pool, 1)
    commit(with_key, pool, 2)
    assert used_nbytes(with_key) == 16 * PAGE
    with_key.step_back(WAIT_S)
    assert (with_key.step, with_key.notes(), get(with_key, pool, "a")) == (1, {"run": b"1"}, first)
    assert used_nbytes(with_key) == 8 * PAGE
    check_extents(with_key)
    with pytest.raises(StorageError, match="no generation before 1"):
        with_key.step_back(WAIT_S)
    assert get(with_key, pool, "a") == first
    third = commit(with_key, pool, 3)
    with_key.forget_before()
    assert used_nbytes(with_key) == 8 * PAGE
    check_extents(with_key)
    with_key.close()
    again = open_versioned(tmp_path)
    assert (again.step, get(again, pool, "a")) == (3, third)
    again.close()


def test_a_later_process_goes_back_before_it_opens_the_store(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 8 * PAGE)
    first = commit(store, pool, 1)
    commit(store, pool, 2)
    manifest_path = store.directory / MANIFEST_FILE
    store.close()
    manifest = Manifest(manifest_path, None)
    assert (manifest.notes(), manifest.notes_before()) == ({"run": b"2"}, {"run": b"1"})
    manifest.go_back()
    manifest.close()
    store = open_versioned(tmp_path)
    assert (store.step, get(store, pool, "a")) == (1, first)
    check_extents(store)
    store.close()


def test_another_commit_of_the_same_state_leaves_the_one_before_where_it_is(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 8 * PAGE)
    first = commit(store, pool, 1)
    commit(store, pool, 2)
    edited = commit(store, pool, 2, Before.KEEP_OLDER)
    assert get(store, pool, "a") == edited
    store.step_back(WAIT_S)
    assert (store.step, get(store, pool, "a")) == (1, first)
    check_extents(store)
    store.close()


def test_a_commit_that_forgets_frees_at_once(tmp_path: Path, pool: HostPool) -> None:
    store = open_versioned(tmp_path)
    store.create("a", 8 * PAGE)
    for step in (1, 2, 3):
        commit(store, pool, step, Before.FORGET)
        assert used_nbytes(store) == 8 * PAGE
    with pytest.raises(StorageError, match="keeps no generation"):
        store.step_back(WAIT_S)
    store.close()
