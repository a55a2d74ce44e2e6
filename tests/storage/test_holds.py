"""Held keys: what they held stays readable where it was, whatever is written meanwhile; then the room comes back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from storage.checksums import BLOCK_NBYTES
from storage.held import HeldKeys
from storage.holds import Holds
from storage.pool import HostPool
from storage.store import ShardStore
from storage.types import Extent
from tests.storage.helpers import PAGE, TAG, filled, finish
from tests.storage.versions import OPTIONS, check_extents, get, open_versioned, put


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(1024 * PAGE)
    yield made
    made.close()


def held_bytes(held: HeldKeys, key: str) -> bytes:
    source = held.keys[key]
    return b"".join(os.pread(held.fds[d], nbytes, at) for d, at, _, nbytes in source.ranges(0, source.nbytes))


def open_store(kind: str, folder: Path, drives: int) -> ShardStore:
    if kind == "versioned":
        return open_versioned(folder, drives=drives)
    return ShardStore.open([folder / f"drive{number}" for number in range(drives)], 64 * PAGE, options=OPTIONS)


@pytest.mark.parametrize("kind", ["plain", "versioned"])
@pytest.mark.parametrize("drives", [1, 3])
def test_what_is_held_stays_as_it_was(tmp_path: Path, pool: HostPool, kind: str, drives: int) -> None:
    """Random writes of parts, commits and holds that begin and end in any order, against plain dictionaries."""
    choose = random.Random(drives)
    store = open_store(kind, tmp_path, drives)
    present = {}
    for key, pages in (("a", 8), ("b", 16), ("c", 1)):
        store.create(key, pages * PAGE)
        present[key] = put(store, pool, key, 1, pages)  # type: ignore[arg-type]
    holds: list[tuple[HeldKeys, dict[str, bytes]]] = []
    for seed in range(2, 80):
        key = choose.choice(list(present))
        pages = len(present[key]) // PAGE
        first = choose.randrange(pages)
        count = choose.randint(1, pages - first)
        new = put(store, pool, key, seed, count, first)  # type: ignore[arg-type]
        before = present[key]
        present[key] = before[: first * PAGE] + new + before[(first + count) * PAGE :]
        what = choose.random()
        if what < 0.2 and len(holds) < 3:
            holds.append((store.hold(list(present)), dict(present)))
        elif what < 0.4 and holds:
            holds.pop(choose.randrange(len(holds)))[0].close()
        elif what < 0.6 and kind == "versioned":
            store.commit(seed)  # type: ignore[attr-defined]
        for held, expected in holds:
            assert {key: held_bytes(held, key) for key in expected} == expected
    for held, _ in holds:
        held.close()
        held.close()
    assert {key: get(store, pool, key) for key in present} == present  # type: ignore[arg-type]
    check_extents(store)
    store.close()


def test_a_deleted_key_can_still_be_copied(tmp_path: Path, pool: HostPool) -> None:
    with filled(pool, 4 * PAGE, 3) as lease:
        store = open_store("plain", tmp_path, 1)
        store.create("a", 4 * PAGE)
        finish(store.submit_write("a", lease.memory, tag=TAG))
        held = store.hold(["a"])
        store.delete("a")
        store.create("b", 4 * PAGE)
        with filled(pool, 4 * PAGE, 4) as other:
            finish(store.submit_write("b", other.memory, tag=TAG))
        assert held_bytes(held, "a") == bytes(lease.memory)
        held.close()
        check_extents(store)
        store.close()


def test_digests_are_those_of_whole_blocks(tmp_path: Path, pool: HostPool) -> None:
    nbytes = 2 * BLOCK_NBYTES + PAGE
    store = open_store("plain", tmp_path, 1)
    store.create("a", nbytes)
    with filled(pool, nbytes, 5) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        finish(store.submit_write("a", lease.memory[:PAGE], offset=BLOCK_NBYTES, tag=TAG))  # splits the second block
        expected = {
            0: xxhash.xxh3_64_intdigest(lease.memory[:BLOCK_NBYTES]),
            2: xxhash.xxh3_64_intdigest(lease.memory[2 * BLOCK_NBYTES :]),
        }
    with store.hold(["a"]) as held:
        assert {number: held.keys["a"].digest_of(number) for number in range(4)} == {1: None, 3: None, **expected}
    store.close()


def test_what_cannot_be_held(tmp_path: Path) -> None:
    store = open_store("plain", tmp_path, 1)
    with pytest.raises(KeyError, match="no key 'x'"):
        store.hold(["x"])
    assert store.room_nbytes > 64 * PAGE
    store.close()


def test_an_extent_waits_for_its_last_hold() -> None:
    holds = Holds()
    first = holds.hold([Extent(0, 0, 8 * PAGE), Extent(1, 0, PAGE)])
    second = holds.hold([Extent(0, 4 * PAGE, 4 * PAGE)])
    assert holds.covers(Extent(0, 2 * PAGE, PAGE))  # a part that was split off
    assert not holds.covers(Extent(0, 8 * PAGE, PAGE))
    assert not holds.covers(Extent(2, 0, PAGE))
    left = [Extent(0, 0, 4 * PAGE), Extent(0, 4 * PAGE, 4 * PAGE), Extent(0, 8 * PAGE, PAGE)]
    assert holds.keep_back(left) == [left[2]]
    assert holds.let_go(first) == [left[0]]
    assert holds.let_go(first) == []
    assert holds.let_go(second) == [left[1]]


def test_going_back_leaves_what_is_held(tmp_path: Path, pool: HostPool) -> None:
    """Two holds of different moments, both after the commit; the store goes back, and on, before they end."""
    store = open_versioned(tmp_path, drives=2)
    store.create("a", 8 * PAGE)
    committed = put(store, pool, "a", 1, 8)
    store.commit(1)
    second = put(store, pool, "a", 2, 8)
    holds = [(store.hold(["a"]), second)]
    third = put(store, pool, "a", 3, 4, 2)
    holds.append((store.hold(["a"]), second[: 2 * PAGE] + third + second[6 * PAGE :]))
    put(store, pool, "a", 4, 8)
    store.roll_back()
    assert get(store, pool, "a") == committed
    for seed in range(5, 9):
        present = put(store, pool, "a", seed, 8)
        store.commit(seed)
        for held, expected in holds:
            assert held_bytes(held, "a") == expected
    for held, _ in holds:
        held.close()
    assert get(store, pool, "a") == present
    check_extents(store)
    assert sum(report.held_nbytes for report in store.drive_report()) == 8 * PAGE
    store.close()


def test_what_is_held_beyond_what_is_used_is_cut_where_holds_end() -> None:
    holds = Holds()
    holds.hold([Extent(0, 0, 8 * PAGE)])
    second = holds.hold([Extent(0, 4 * PAGE, 8 * PAGE)])
    waiting = holds.begin_again([Extent(0, PAGE, PAGE), Extent(0, 6 * PAGE, PAGE), Extent(1, 0, PAGE)])
    at = [(0, 1), (2, 4), (4, 6), (7, 8), (8, 12)]
    assert waiting == [Extent(0, start * PAGE, (stop - start) * PAGE) for start, stop in at]
    assert holds.let_go(second) == [waiting[-1]]
