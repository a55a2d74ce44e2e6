"""Versioned stores over drives whose speed changes: shares move, generations stay whole, no extent is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.backends.faulty import Fault, FaultyBackend
from storage.health import DriveState
from storage.pool import HostPool
from storage.types import Op
from storage.versioned import VersionedStore
from tests.storage.helpers import MIB, PAGE
from tests.storage.several import by_drive
from tests.storage.versions import change_speeds, check_extents, get, open_with_speeds, put

_KEYS = ("a", "b", "c")
_NBYTES = 8 * MIB
_PAGES = _NBYTES // PAGE


def write_all(store: VersionedStore, pool: HostPool, seed: int) -> dict[str, bytes]:
    return {key: put(store, pool, key, seed + number, _PAGES) for number, key in enumerate(_KEYS)}


def contents(store: VersionedStore, pool: HostPool) -> dict[str, bytes]:
    return {key: get(store, pool, key) for key in _KEYS}


def start(folder: Path, pool: HostPool, *mib_per_s: int) -> tuple[VersionedStore, dict[str, bytes]]:
    """A store with one generation, whose shares are those of the speeds."""
    store = open_with_speeds(folder, *mib_per_s)
    for key in _KEYS:
        store.create(key, _NBYTES)
    written = write_all(store, pool, 10)
    store.commit(1)
    return store, written


def test_shares_follow_the_speeds_from_generation_to_generation(tmp_path: Path, pool: HostPool) -> None:
    store, written = start(tmp_path, pool, 20, 20)
    assert by_drive(store, "a") == {0: 4 * MIB, 1: 4 * MIB}
    for step, (speeds, shares) in enumerate((((10, 30), (2, 6)), ((30, 10), (6, 2)), ((20, 20), (4, 4))), start=2):
        change_speeds(store, *speeds)
        assert contents(store, pool) == written  # a change of speed alone moves nothing
        written = write_all(store, pool, 10 * step)
        assert [by_drive(store, key) for key in _KEYS] == [dict(enumerate(share * MIB for share in shares))] * 3
        check_extents(store)
        store.commit(step)
        check_extents(store)
        held = sum(report.held_nbytes for report in store.drive_report())
        assert held == 3 * _NBYTES  # what the generation before used is free again
        store.close()
        store = open_with_speeds(tmp_path, *speeds)
        assert (store.step, contents(store, pool)) == (step, written)
        check_extents(store)
    store.close()


def test_what_moved_without_a_commit_is_where_it_was_after_reopening(tmp_path: Path, pool: HostPool) -> None:
    store, old = start(tmp_path, pool, 20, 20)
    change_speeds(store, 10, 70)
    new = write_all(store, pool, 20)
    assert by_drive(store, "a") == {0: MIB, 1: 7 * MIB}
    assert contents(store, pool) == new
    check_extents(store)
    store.close()
    store = open_with_speeds(tmp_path, 10, 70)
    assert contents(store, pool) == old
    assert by_drive(store, "a") == {0: 4 * MIB, 1: 4 * MIB}
    assert sum(report.held_nbytes for report in store.drive_report()) == 3 * _NBYTES
    check_extents(store)
    store.close()


def test_going_back_gives_the_new_places_free(tmp_path: Path, pool: HostPool) -> None:
    store, old = start(tmp_path, pool, 20, 20)
    for turn in range(3):
        change_speeds(store, 10 + 50 * (turn % 2), 70)
        write_all(store, pool, 20)
        store.roll_back()
        assert contents(store, pool) == old
        assert sum(report.held_nbytes for report in store.drive_report()) == 3 * _NBYTES
        check_extents(store)
    store.close()


def test_chunks_of_a_key_move_and_generations_stay_whole(tmp_path: Path, pool: HostPool) -> None:
    """A generation in which half of a key was written lies partly where the one before did."""
    store, written = start(tmp_path, pool, 20, 20)
    change_speeds(store, 10, 70)
    half = _PAGES // 2
    expected = {}
    for number, key in enumerate(_KEYS):
        expected[key] = put(store, pool, key, 50 + number, half) + written[key][half * PAGE :]
    check_extents(store)
    assert contents(store, pool) == expected
    store.commit(2)
    check_extents(store)
    store.close()
    store = open_with_speeds(tmp_path, 70, 10)
    assert contents(store, pool) == expected
    written = write_all(store, pool, 60)
    assert by_drive(store, "b") == {0: 7 * MIB, 1: MIB}
    store.commit(3)
    assert contents(store, pool) == written
    check_extents(store)
    store.close()


@pytest.mark.parametrize(("fault", "state"), [(Fault.IO_ERROR, DriveState.FAILED), (Fault.NO_SPACE, DriveState.FULL)])
def test_what_a_slower_drive_refuses_is_committed_elsewhere(
    tmp_path: Path, pool: HostPool, fault: Fault, state: DriveState
) -> None:
    faults: list[FaultyBackend] = []

    def wrap(backend: object) -> FaultyBackend:
        faults.append(FaultyBackend(backend))  # type: ignore[arg-type]
        return faults[-1]

    store = open_with_speeds(tmp_path, 20, 20, wrap_backend=wrap)
    for key in _KEYS:
        store.create(key, _NBYTES)
    write_all(store, pool, 10)
    store.commit(1)
    change_speeds(store, 10, 30)
    faults[1].inject(fault, op=Op.WRITE, times=None)
    new = write_all(store, pool, 20)
    assert [by_drive(store, key) for key in _KEYS] == [{0: _NBYTES}] * 3
    assert store.drive_report()[1].state is state
    check_extents(store)
    store.commit(2)
    check_extents(store)
    assert store.drive_report()[1].held_nbytes == 0
    store.close()
    store = open_with_speeds(tmp_path, 10, 30)
    assert contents(store, pool) == new
    store.close()
