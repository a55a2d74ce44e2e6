"""Faults at the device, and what a store makes of them."""

from __future__ import annotations

import errno
import gc
import resource
import time
import weakref

import pytest

from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import ClosedError, IntegrityError, IoError, ReadError, ShortIoError, SwapFullError, WriteError
from storage.pool import HostPool
from storage.store import ShardStore
from storage.types import Op
from tests.storage.conftest import MakeStore
from tests.storage.helpers import PAGE, TAG, WAIT_S, assert_like, failure, filled, finish

_NBYTES = 8 * PAGE


@pytest.fixture(params=["direct", "buffered"])
def faulty_store(request: pytest.FixtureRequest, open_store: MakeStore) -> tuple[ShardStore, FaultyBackend]:
    if request.param == "direct":
        request.getfixturevalue("can_direct")
    wrapped: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        wrapped.append(FaultyBackend(backend))
        return wrapped[-1]

    store = open_store(request.param, wrap_backend=wrap)
    store.create("a", _NBYTES)
    return store, wrapped[0]


@pytest.mark.parametrize(
    ("fault", "kind", "number"),
    [
        (Fault.IO_ERROR, WriteError, errno.EIO),
        (Fault.NO_SPACE, SwapFullError, errno.ENOSPC),
        (Fault.SHORT, ShortIoError, None),
    ],
)
def test_a_failed_write_fails_later_reads_until_it_is_repeated(
    faulty_store: tuple[ShardStore, FaultyBackend],
    pool: HostPool,
    fault: Fault,
    kind: type[IoError | SwapFullError],
    number: int | None,
) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source, pool.lease(_NBYTES, "target") as target:
        injection = faults.inject(fault, op=Op.WRITE)
        error = failure(store.submit_write("a", source.memory, tag=TAG))
        assert isinstance(error, kind)
        assert (error.key, error.errno, error.nbytes) == ("a", number, _NBYTES // 2)
        assert error.path.endswith(".swap")
        assert injection.hits == 1
        assert_like(failure(store.submit_read("a", target.memory, tag=TAG)), error)
        finish(store.submit_write("a", source.memory[:PAGE], tag=TAG))
        finish(store.submit_read("a", target.memory[:PAGE], tag=TAG))
        assert_like(failure(store.submit_read("a", target.memory[: 2 * PAGE], tag=TAG)), error)
        finish(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == source.memory


def test_a_read_submitted_behind_a_write_that_fails(
    faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool
) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source, pool.lease(_NBYTES, "target") as target:
        faults.inject(Fault.STUCK, op=Op.WRITE)
        write = store.submit_write("a", source.memory, tag=TAG)
        read = store.submit_read("a", target.memory, tag=TAG)
        faults.inject(Fault.IO_ERROR, op=Op.READ, times=None)  # the read must not even get there
        (stuck,) = faults.stuck()
        error = WriteError(key="a")
        stuck.ticket.set_exception(error)
        assert failure(write) is error
        assert_like(failure(read), error)
        faults.release_stuck()
        assert store.drain(WAIT_S)


def test_a_failed_read_leaves_the_data_alone(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source, pool.lease(_NBYTES, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        faults.inject(Fault.IO_ERROR, op=Op.READ, key="a", skip=1, times=2)
        finish(store.submit_read("a", target.memory, tag=TAG))
        for _ in range(2):
            assert isinstance(failure(store.submit_read("a", target.memory, tag=TAG)), ReadError)
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == source.memory
    assert store.stats.total(Op.READ).operations == 2


def test_other_keys_do_not_notice(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool) -> None:
    store, faults = faulty_store
    store.create("b", _NBYTES)
    with filled(pool, _NBYTES, 1) as source:
        faults.inject(Fault.IO_ERROR, key="a", times=None)
        failure(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_write("b", source.memory, tag=TAG))
        faults.clear()
        finish(store.submit_write("a", source.memory, tag=TAG))


def test_a_stuck_device_answers_late(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source, pool.lease(_NBYTES, "target") as target:
        faults.inject(Fault.STUCK)
        write = store.submit_write("a", source.memory, tag=TAG)
        read = store.submit_read("a", target.memory, tag=TAG)
        assert not store.drain(0)
        assert len(store.describe_in_flight()) == 2
        faults.release_stuck()
        finish(write)
        finish(read)
        assert target.memory == source.memory


def test_closing_ends_what_is_stuck(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source:
        faults.inject(Fault.STUCK)
        tickets = [store.submit_write("a", source.memory, tag=TAG) for _ in range(3)]
        store.close()
        assert [type(ticket.exception) for ticket in tickets] == [ClosedError] * 3
    assert store.describe_in_flight() == []


@pytest.mark.parametrize("op", list(Op))
def test_one_bit_is_wrong(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool, op: Op) -> None:
    store, faults = faulty_store
    with filled(pool, _NBYTES, 1) as source, pool.lease(_NBYTES, "target") as target:
        before = bytes(source.memory)
        faults.inject(Fault.BIT_FLIP, op=op)
        finish(store.submit_write("a", source.memory, tag=TAG))
        error = failure(store.submit_read("a", target.memory, tag=TAG))
        assert isinstance(error, IntegrityError)
        assert (error.key, error.offset, error.nbytes, error.generation) == ("a", 0, _NBYTES, 1)
        assert error.path.endswith("rank0.swap")
        assert source.memory == before
        different = source.array("u1") ^ target.array("u1")
        assert different.sum() == 1
        again = store.submit_read("a", target.memory, tag=TAG)
        if op is Op.READ:
            finish(again)
        else:
            assert isinstance(failure(again), IntegrityError)
        assert (target.memory == before) == (op is Op.READ)  # a damaged file still gives what it holds
        finish(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_read("a", target.memory, tag=TAG))


def test_a_failed_write_does_not_keep_its_memory(open_store: MakeStore, kind: str) -> None:
    store = open_store(kind, capacity_nbytes=_NBYTES)
    store.create("a", _NBYTES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lease = HostPool(_NBYTES).lease(_NBYTES, "x")
    alive = weakref.ref(lease.memory.obj)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, before[1]))
    try:
        error = failure(store.submit_write("a", lease.memory, tag=TAG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error, SwapFullError)
    lease.release()
    del lease
    deadline_s = time.monotonic() + 100
    while alive() is not None and time.monotonic() < deadline_s:  # the thread that told may not have returned yet
        gc.collect()
    assert alive() is None


def test_a_fault_of_one_page_moves_nothing(faulty_store: tuple[ShardStore, FaultyBackend], pool: HostPool) -> None:
    store, faults = faulty_store
    with filled(pool, PAGE, 1) as source, filled(pool, PAGE, 2) as other, pool.lease(PAGE, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        faults.inject(Fault.NO_SPACE)
        error = failure(store.submit_write("a", other.memory, tag=TAG))
        assert isinstance(error, SwapFullError)
        assert error.nbytes == PAGE
        assert_like(failure(store.submit_read("a", target.memory, tag=TAG)), error)
