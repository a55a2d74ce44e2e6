"""A hundred thousand operations leave nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import psutil
import pytest

from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.versioned import VersionedStore
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, finish
from tests.storage.versions import open_versioned

_OPERATIONS = 100_000
_BATCH = 50
_KEY_PAGES = 16


def used() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes of memory of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), psutil.Process().memory_info().rss


def turn(store: ShardStore, memory: memoryview, number: int) -> None:
    """One batch: whole keys and parts of them, written and read."""
    tickets = []
    for one in range(_BATCH):
        key = str((number + one) % 8)
        offset, pages = (0, _KEY_PAGES) if one % 3 == 0 else ((number + one) % 8 * PAGE, 1 + one % 8)
        submit = store.submit_write if one % 2 else store.submit_read
        tickets.append(submit(key, memory[offset : offset + pages * PAGE], offset=offset, tag=TAG))
    assert store.drain(WAIT_S)
    for ticket in tickets:
        finish(ticket)
    if isinstance(store, VersionedStore) and number % 20 == 0:
        store.commit(number)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["direct", "aio", "buffered", "versioned"])
def test_a_hundred_thousand_operations(
    request: pytest.FixtureRequest, tmp_path: Path, pool: HostPool, kind: str
) -> None:
    if kind in ("direct", "aio"):
        request.getfixturevalue("can_direct")
    store: ShardStore
    if kind == "versioned":
        store = open_versioned(tmp_path)
    else:
        options = StorageOptions(engine=kind, threads=2, free_margin_nbytes=0)
        store = ShardStore.open([tmp_path], MIB, options=options)
    try:
        with pool.lease(_KEY_PAGES * PAGE, "x") as lease:
            for key in range(8):
                store.create(str(key), _KEY_PAGES * PAGE)
                finish(store.submit_write(str(key), lease.memory, tag=TAG))
            warm_up = 10_000 // _BATCH
            for number in range(warm_up):
                turn(store, lease.memory, number)
            before = used()
            for number in range(_OPERATIONS // _BATCH):
                turn(store, lease.memory, warm_up + number)
            descriptors, threads, rss_nbytes = used()
        assert (descriptors, threads) == before[:2]
        assert rss_nbytes <= before[2] + 4 * MIB
    finally:
        store.close()
