"""Stores over every backend, and a check after each test that nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import FaultyBackend
from storage.backends.kernel_aio import why_not
from storage.backends.probe import probe_direct
from storage.backends.throttled import Throttle, ThrottledBackend
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from tests.storage.helpers import PAGE, StepClock

MakeStore = Callable[..., ShardStore]

_KINDS = ("direct", "aio", "buffered", "faulty", "throttled")
_SMALL = {"block_nbytes": 16 * PAGE, "threads": 3, "free_margin_nbytes": 0}


def _wrap(kind: str) -> Callable[[Backend], Backend] | None:
    if kind == "faulty":
        return FaultyBackend
    if kind == "throttled":
        return lambda inner: ThrottledBackend(inner, Throttle(1e6, 1e6, 0.001), StepClock())
    return None


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """No thread, descriptor or run folder survives a test."""
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("infinity")]
    assert not left, f"threads left running: {left}"
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert not list(tmp_path.rglob("*.swap"))


@pytest.fixture
def can_direct(tmp_path: Path) -> None:
    """Skip where the temporary folder has no O_DIRECT."""
    if problem := probe_direct(tmp_path):
        pytest.skip(f"no O_DIRECT in {tmp_path}: {problem}")


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A backend by name."""
    if request.param in ("direct", "aio"):
        request.getfixturevalue("can_direct")
    if request.param == "aio" and (problem := why_not()):
        pytest.skip(f"no asynchronous transfers: {problem}")
    return str(request.param)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Opens stores in `tmp_path` with small blocks; closes them."""
    stores: list[ShardStore] = []

    def make(kind: str = "auto", *, drives: int = 1, capacity_nbytes: int = 64 * PAGE, **more: Any) -> ShardStore:
        engine = kind if kind in ("direct", "aio", "buffered") else "auto"
        options = StorageOptions(engine=engine, **_SMALL | more.pop("options", {}))
        paths = [tmp_path / f"drive{number}" for number in range(drives)]
        more.setdefault("wrap_backend", _wrap(kind))
        stores.append(ShardStore.open(paths, capacity_nbytes, options=options, **more))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
        assert store.describe_in_flight() == []


@pytest.fixture
def store(open_store: MakeStore, kind: str) -> ShardStore:
    """An empty store over one drive, once for every backend."""
    return open_store(kind)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """Host memory; every lease must be given back, by name or by `with`."""
    pool = HostPool(64 << 20)
    yield pool
    pool.close()
