"""What the tests of versioned stores share."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from storage.errors import IntegrityError
from storage.meters import DriveMeters
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.versioned import VersionedStore
from storage.versioned_space import VersionedSpace
from tests.storage.helpers import PAGE, TAG, WAIT_S, StepClock, filled, finish
from tests.storage.several import show_speeds

OPTIONS = StorageOptions(block_nbytes=16 * PAGE, threads=2, free_margin_nbytes=0)


def open_versioned(folder: Path, *, drives: int = 1, capacity_nbytes: int = 64 * PAGE, **more: Any) -> VersionedStore:
    paths = [folder / f"drive{number}" for number in range(drives)]
    more.setdefault("options", OPTIONS)
    return VersionedStore.open(paths, capacity_nbytes, **more)


def open_with_speeds(folder: Path, *mib_per_s: int, **more: Any) -> VersionedStore:
    """A store whose drives have shown these speeds, and show no others: its meters' time stands still."""
    store = open_versioned(folder, drives=len(mib_per_s), **more)
    change_speeds(store, *mib_per_s)
    return store


def change_speeds(store: VersionedStore, *mib_per_s: int) -> None:
    clock = StepClock()
    meters = DriveMeters(len(mib_per_s), clock.now_s)
    show_speeds(meters, clock, mib_per_s)
    store._space.meters = store._operations._transfers._meters = meters


def put(store: VersionedStore, pool: HostPool, key: str, seed: int, pages: int, first: int = 0) -> bytes:
    """Write a pattern to pages of a key; what was written."""
    with filled(pool, pages * PAGE, seed) as lease:
        finish(store.submit_write(key, lease.memory, offset=first * PAGE, tag=TAG))
        return bytes(lease.memory)


def get(store: VersionedStore, pool: HostPool, key: str) -> bytes:
    """All bytes of a key."""
    with pool.lease(store.nbytes_of(key), key) as lease:
        finish(store.submit_read(key, lease.memory, tag=TAG))
        return bytes(lease.memory)


def is_damaged(store: VersionedStore, pool: HostPool, key: str) -> bool:
    with pool.lease(store.nbytes_of(key), key) as lease:
        ticket = store.submit_read(key, lease.memory, tag=TAG)
        assert ticket.wait(WAIT_S)
        return isinstance(ticket.exception, IntegrityError)


def check_extents(store: ShardStore) -> None:
    """No extent is shared, and none is leaked: what is allocated is what the keys and the last generation use."""
    retired = store._space.retired if isinstance(store._space, VersionedSpace) else []
    used = sorted((d, *span) for d, drive in enumerate(store._drives) for span in drive.file.extents.used())
    held = [piece.extent for entry in store._keys.values() for piece in entry.pieces] + retired
    assert sorted((one.drive, one.offset, one.nbytes) for one in held) == used
    for entry in store._keys.values():
        assert [piece.start for piece in entry.pieces] == [0, *(piece.stop for piece in entry.pieces)][:-1]
        assert entry.pieces[-1].stop == entry.nbytes
    for one, other in pairwise(used):
        assert one[0] != other[0] or one[1] + one[2] <= other[1]
