"""Every fault at every operation of a scripted workload: nothing wrong is ever read, and nothing is lost for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import IntegrityError, IoError, StorageError, SwapFullError
from storage.pool import HostPool
from storage.store import ShardStore
from storage.types import IoRequest, Ticket
from storage.versioned import VersionedStore
from tests.storage.helpers import PAGE, TAG, WAIT_S, StepClock, filled
from tests.storage.versions import OPTIONS, check_extents, get, open_versioned

_PAGES = 70  # of each key: more than one block of checksums
# (write or read, key, first page, pages); commits come after some of them.
_SCRIPT = [
    ("write", "a", 0, _PAGES),
    ("write", "b", 0, _PAGES),
    ("read", "a", 0, _PAGES),
    ("commit", "", 0, 0),
    ("write", "a", 3, 9),
    ("read", "a", 10, 5),
    ("write", "a", 60, 10),
    ("read", "a", 0, _PAGES),
    ("read", "b", 63, 2),
    ("commit", "", 0, 0),
    ("write", "b", 0, _PAGES),
    ("read", "b", 0, _PAGES),
    ("commit", "", 0, 0),
]
_EXPECTED = (IoError, SwapFullError, IntegrityError)


class Workload:
    """Runs the script; repeats what fails, as an engine that goes on would."""

    def __init__(self, store: ShardStore, faults: FaultyBackend, pool: HostPool) -> None:
        self.store = store
        self.faults = faults
        self.pool = pool
        self.content = {key: bytearray(_PAGES * PAGE) for key in ("a", "b")}
        self.errors: list[BaseException] = []

    def run(self) -> None:
        for key in self.content:
            self.store.create(key, _PAGES * PAGE)
        for number, (verb, key, first, pages) in enumerate(_SCRIPT):
            if verb == "commit":
                self.commit(number)
            elif verb == "write":
                self.write(key, number, first, pages)
            else:
                self.read(key, first, pages)

    def commit(self, number: int) -> None:
        if isinstance(self.store, VersionedStore):
            self.store.commit(number)
            check_extents(self.store)

    def write(self, key: str, seed: int, first: int, pages: int) -> None:
        with filled(self.pool, pages * PAGE, seed) as lease:
            self.content[key][first * PAGE : (first + pages) * PAGE] = lease.memory
            for _ in range(2):
                if self.end(self.store.submit_write(key, lease.memory, offset=first * PAGE, tag=TAG)):
                    return
        raise AssertionError("a write failed twice")

    def read(self, key: str, first: int, pages: int) -> None:
        span = slice(first * PAGE, (first + pages) * PAGE)
        with self.pool.lease(pages * PAGE, "read") as lease:
            for _ in range(2):
                if self.end(self.store.submit_read(key, lease.memory, offset=first * PAGE, tag=TAG)):
                    assert lease.memory == self.content[key][span]
                    return
        # What is on the disk is wrong, and the store knows: the program has the data elsewhere and writes it again.
        self.repair(key)
        self.read(key, first, pages)

    def repair(self, key: str) -> None:
        with self.pool.lease(_PAGES * PAGE, "repair") as lease:
            lease.memory[:] = self.content[key]
            assert self.end(self.store.submit_write(key, lease.memory, tag=TAG))

    def end(self, ticket: Ticket) -> bool:
        while not ticket.wait(0.01):
            self.faults.release_stuck()  # a request behind a read-back may be the stuck one
        if ticket.exception is not None:
            assert isinstance(ticket.exception, _EXPECTED), ticket
            self.errors.append(ticket.exception)
        return ticket.exception is None


def count_requests(open_one: Callable[[Callable[[Backend], Backend]], ShardStore], pool: HostPool) -> int:
    requests = 0

    def count(request: IoRequest) -> bool:
        nonlocal requests
        requests += 1
        return False

    faults: list[FaultyBackend] = []
    store = open_one(lambda backend: remember(faults, backend))
    faults[0].inject(Fault.IO_ERROR, when=count)
    Workload(store, faults[0], pool).run()
    store.close()
    return requests


def remember(faults: list[FaultyBackend], backend: Backend) -> FaultyBackend:
    faults.append(FaultyBackend(backend, StepClock()))
    return faults[-1]


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("is_versioned", [False, True])
def test_every_fault_at_every_operation(tmp_path: Path, pool: HostPool, fault: Fault, is_versioned: bool) -> None:
    folders = iter(range(1000))

    def open_one(wrap: Callable[[Backend], Backend]) -> ShardStore:
        folder = tmp_path / str(next(folders))
        if is_versioned:
            return open_versioned(folder, wrap_backend=wrap)
        return ShardStore.open([folder], 2 * _PAGES * PAGE, options=OPTIONS, wrap_backend=wrap)

    total = count_requests(open_one, pool)
    assert total >= len(_SCRIPT) - 3
    for number in range(total):
        faults: list[FaultyBackend] = []
        store = open_one(lambda backend, faults=faults: remember(faults, backend))  # type: ignore[misc]
        injection = faults[0].inject(fault, skip=number)
        workload = Workload(store, faults[0], pool)
        workload.run()
        assert injection.hits == 1
        assert store.drain(WAIT_S)
        if not is_versioned:
            for key, data in workload.content.items():
                workload.read(key, 0, _PAGES)
                assert len(data) == _PAGES * PAGE
            store.close()
            continue
        store.close()
        check_reopened(store, workload, pool, tmp_path / str(number + 1))


def check_reopened(store: ShardStore, workload: Workload, pool: HostPool, folder: Path) -> None:
    """A versioned store after the last commit: all right, or known to be damaged."""
    again = open_versioned(folder)
    check_extents(again)
    for key, data in workload.content.items():
        try:
            assert get(again, pool, key) == data
        except StorageError as error:
            assert isinstance(error, IntegrityError)
            assert not workload.errors  # damage that nothing has read yet
    again.close()
