"""A disk that is full in the middle: a clear error, everything else intact, and the store usable afterwards.

RLIMIT_FSIZE stands in for the disk: the kernel refuses to let a file of this process reach further than that.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.backends.probe import probe_direct
from storage.errors import SwapFullError
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Ticket, TrafficTag

_TAG = TrafficTag("param", 0)
_WAIT_S = 100.0
_KEY_NBYTES = 256 << 10
_BLOCK_NBYTES = 64 << 10


@contextmanager
def _disk_ends_at(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(params=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShardStore]:
    """Two keys of 256 KiB in one file: "first" lies before "second"."""
    if request.param == "direct" and (problem := probe_direct(tmp_path)):
        pytest.skip(f"no O_DIRECT in {tmp_path}: {problem}")
    options = StorageOptions(engine=request.param, block_nbytes=_BLOCK_NBYTES, threads=2, free_margin_nbytes=0)
    store = ShardStore.open([tmp_path], 2 * _KEY_NBYTES, options=options)
    store.create("first", _KEY_NBYTES)
    store.create("second", _KEY_NBYTES)
    yield store
    store.close()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(4 << 20)
    yield pool
    pool.close()


def _ended(ticket: Ticket) -> BaseException | None:
    assert ticket.wait(_WAIT_S), f"{ticket} never ended"
    return ticket.exception


def _write(store: ShardStore, pool: HostPool, key: str, data: bytes) -> BaseException | None:
    with pool.lease(len(data), "write") as lease:
        lease.memory[:] = data
        error = _ended(store.submit_write(key, lease.memory, tag=_TAG))
        assert bytes(lease.memory) == data, "the data has to stay in memory, whatever happens"
    return error


def _read(store: ShardStore, pool: HostPool, key: str) -> bytes:
    with pool.lease(_KEY_NBYTES, "read") as lease:
        error = _ended(store.submit_read(key, lease.memory, tag=_TAG))
        if error is not None:
            raise error
        return bytes(lease.memory)


def test_full_disk_in_the_middle_of_a_write(store: ShardStore, pool: HostPool) -> None:
    old, new = os.urandom(_KEY_NBYTES), os.urandom(_KEY_NBYTES)
    assert _write(store, pool, "first", old) is None
    assert _write(store, pool, "second", old) is None
    with _disk_ends_at(_KEY_NBYTES + _KEY_NBYTES // 2):
        error = _write(store, pool, "second", new)
        assert isinstance(error, SwapFullError)
        assert error.errno in (errno.EFBIG, errno.ENOSPC)
        assert error.key == "second"
        assert _KEY_NBYTES + _KEY_NBYTES // 2 <= error.offset < 2 * _KEY_NBYTES
        for word in ("'second'", "rank0.swap", "Free space", "still in memory"):
            assert word in str(error)
        # What was not touched can be read, and what is half old and half new cannot.
        assert _read(store, pool, "first") == old
        with pytest.raises(SwapFullError):
            _read(store, pool, "second")
    # After space was made, the same write succeeds and makes the key good again.
    assert _write(store, pool, "second", new) is None
    assert _read(store, pool, "second") == new
    assert _read(store, pool, "first") == old
    assert store.describe_in_flight() == []


def test_no_room_for_another_key(store: ShardStore, pool: HostPool) -> None:
    data = os.urandom(_KEY_NBYTES)
    assert _write(store, pool, "first", data) is None
    file = next(Path(store._drives[0].file.path).parent.glob("*.swap"))
    size = file.stat().st_size
    with _disk_ends_at(size):
        for _ in range(3):  # a refused attempt takes nothing away from the next
            with pytest.raises(SwapFullError, match=r"rank0\.swap"):
                store.create("third", _KEY_NBYTES)
        assert file.stat().st_size == size
        assert sorted(store.keys()) == ["first", "second"]
        # Room given back can be used without the disk's help.
        store.delete("second")
        store.create("third", _KEY_NBYTES)
    assert _write(store, pool, "third", data[::-1]) is None
    assert _read(store, pool, "third") == data[::-1]
    assert _read(store, pool, "first") == data


def test_no_room_on_the_second_of_two_drives_gives_the_first_one_back(tmp_path: Path, pool: HostPool) -> None:
    """A key that fits on one drive only takes nothing from either."""
    size = 2 << 20
    options = StorageOptions(engine="buffered", block_nbytes=_BLOCK_NBYTES, threads=1, free_margin_nbytes=0)
    store = ShardStore.open([tmp_path / "a", tmp_path / "b"], size, options=options)
    try:
        store.create("small", 4096)  # the first drive has not enough left for its half of the large one
        free = [drive.file.extents.free_nbytes for drive in store._drives]
        with _disk_ends_at(1 << 20), pytest.raises(SwapFullError):
            store.create("large", size)
        assert [drive.file.extents.free_nbytes for drive in store._drives] == free
        store.create("large", size)
        assert store.nbytes_of("large") == size
    finally:
        store.close()


def test_no_room_at_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with _disk_ends_at(1 << 20), pytest.raises(SwapFullError, match=r"rank0\.swap"):
        ShardStore.open([tmp_path / "a", tmp_path / "b"], 8 << 20)
    assert set(os.listdir("/proc/self/fd")) == before
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]


def test_more_than_the_disk_has_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(SwapFullError, match=r"needs \d+ bytes and a margin of \d+, but only \d+ bytes are free"):
        ShardStore.open([tmp_path], 1 << 60)
    assert list(tmp_path.iterdir()) == []
