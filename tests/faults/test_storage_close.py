"""Closing a store in every state: bounded, every ticket completed, nothing left running that can be ended."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from storage.backends.direct import DirectBackend
from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.system import SystemCalls
from storage.errors import ClosedError
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Ticket, TrafficTag

_TAG = TrafficTag("grad", 3)
_WAIT_S = 100.0
_NBYTES = 64 << 10


class Gate:
    """System calls that wait until the gate opens, as on a device that does not answer."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def calls(self) -> SystemCalls:
        return SystemCalls(preadv=self._read, pwritev=self._write)

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return len(buffers[0])

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return len(buffers[0])

    def _pass(self) -> None:
        self.entered.release()
        assert self.opened.wait(_WAIT_S)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(4 << 20)
    yield pool
    pool.close()


def _failure(ticket: Ticket) -> BaseException | None:
    assert ticket.wait(_WAIT_S), f"{ticket} never ended"
    return ticket.exception


def _open_gated(directory: Path, gate: Gate, close_timeout_s: float, threads: int = 1) -> ShardStore:
    backends: list[DirectBackend] = []

    def wrap(inner: object) -> DirectBackend:
        inner.close()  # type: ignore[attr-defined]
        backend = DirectBackend(
            threads=threads, block_nbytes=_NBYTES, calls=gate.calls(), close_timeout_s=close_timeout_s
        )
        backends.append(backend)
        return backend

    options = StorageOptions(engine="buffered", free_margin_nbytes=0)
    return ShardStore.open([directory], 16 * _NBYTES, options=options, wrap_backend=wrap)


def test_call_in_service_ends_well_and_the_queue_fails(tmp_path: Path, pool: HostPool) -> None:
    gate = Gate()
    store = _open_gated(tmp_path, gate, close_timeout_s=_WAIT_S)
    for key in "abc":
        store.create(key, _NBYTES)
    with pool.lease(_NBYTES, "test") as lease:
        tickets = [store.submit_read(key, lease.memory, tag=_TAG) for key in "abc"]
        assert gate.entered.acquire(timeout=_WAIT_S)
        closing = threading.Thread(target=store.close)
        closing.start()
        assert isinstance(_failure(tickets[1]), ClosedError)  # while the first is still in the kernel
        assert isinstance(_failure(tickets[2]), ClosedError)
        assert not tickets[0].done
        gate.opened.set()
        closing.join(_WAIT_S)
        assert not closing.is_alive()
        assert _failure(tickets[0]) is None
    assert store.describe_in_flight() == []
    assert list(tmp_path.iterdir()) == []


def test_call_that_never_returns_does_not_hold_up_close(
    tmp_path: Path, pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    store = _open_gated(tmp_path, gate, close_timeout_s=0.0)
    store.create("stuck", _NBYTES)
    with pool.lease(_NBYTES, "test") as lease, caplog.at_level(logging.ERROR):
        first = store.submit_read("stuck", lease.memory, tag=_TAG)
        held = store.submit_write("stuck", lease.memory, tag=_TAG)
        assert gate.entered.acquire(timeout=_WAIT_S)
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("infinity-io")]
        store.close()
        error = _failure(first)
        assert isinstance(error, ClosedError)
        assert "stuck" in str(error)
        assert isinstance(_failure(held), ClosedError)
        assert "never ended" in caplog.text
        assert store.describe_in_flight() == []
        gate.opened.set()  # a late answer changes nothing
        for worker in workers:
            worker.join(_WAIT_S)
        assert first.exception is error
    assert list(tmp_path.iterdir()) == []


def _open_faulty(directory: Path, engine: str) -> tuple[ShardStore, FaultyBackend]:
    backends: list[FaultyBackend] = []

    def wrap(inner: object) -> FaultyBackend:
        backends.append(FaultyBackend(inner))  # type: ignore[arg-type]
        return backends[-1]

    options = StorageOptions(engine=engine, block_nbytes=_NBYTES, threads=2, free_margin_nbytes=0)
    return ShardStore.open([directory], 16 * _NBYTES, options=options, wrap_backend=wrap), backends[0]


@pytest.mark.parametrize("engine", ["auto", "buffered"])
def test_stuck_write_and_everything_held_behind_it_fail(tmp_path: Path, pool: HostPool, engine: str) -> None:
    store, faulty = _open_faulty(tmp_path, engine)
    store.create("a", _NBYTES)
    faulty.inject(Fault.STUCK, op=Op.WRITE)
    with pool.lease(_NBYTES, "test") as lease:
        stuck = store.submit_write("a", lease.memory, tag=_TAG)
        held = [store.submit_read("a", lease.memory, tag=_TAG), store.submit_write("a", lease.memory, tag=_TAG)]
        assert not store.drain(0.0)
        assert len(store.describe_in_flight()) == 3
        store.close()
        assert all(isinstance(_failure(ticket), ClosedError) for ticket in [stuck, *held])
    assert store.drain(0.0)
    assert list(tmp_path.iterdir()) == []


def test_long_chain_behind_a_stuck_write_fails_without_deep_recursion(tmp_path: Path, pool: HostPool) -> None:
    store, faulty = _open_faulty(tmp_path, "buffered")
    store.create("a", _NBYTES)
    faulty.inject(Fault.STUCK)
    with pool.lease(_NBYTES, "test") as lease:
        tickets = [store.submit_write("a", lease.memory, tag=_TAG) for _ in range(500)]
        store.close()
        assert all(isinstance(_failure(ticket), ClosedError) for ticket in tickets)


def test_everything_after_close_is_refused(tmp_path: Path, pool: HostPool) -> None:
    store, faulty = _open_faulty(tmp_path, "buffered")
    store.create("a", _NBYTES)
    store.close()
    store.close()
    with pool.lease(_NBYTES, "test") as lease:
        with pytest.raises(ClosedError, match="closed"):
            store.submit_read("a", lease.memory, tag=_TAG)
        with pytest.raises(ClosedError, match="closed"):
            store.submit_write("a", lease.memory, tag=_TAG)
    with pytest.raises(ClosedError, match="closed"):
        store.create("b", _NBYTES)
    faulty.close()


def test_close_from_many_threads_while_others_submit(tmp_path: Path, pool: HostPool) -> None:
    """Whatever was accepted completes; what comes later is refused; nobody hangs."""
    store, _ = _open_faulty(tmp_path, "auto")
    for key in "abcd":
        store.create(key, _NBYTES)
    accepted: list[Ticket] = []
    started = threading.Barrier(6)

    def submit(key: str) -> None:
        with pool.lease(_NBYTES, key) as lease:
            mine: list[Ticket] = []
            started.wait(_WAIT_S)
            try:
                for _ in range(200):
                    mine.append(store.submit_write(key, lease.memory, tag=_TAG))
            except ClosedError:
                mine.append(Ticket.completed())
            accepted.extend(mine)
            assert Ticket.all_of(mine).wait(_WAIT_S)

    def close() -> None:
        started.wait(_WAIT_S)
        store.close()

    threads = [threading.Thread(target=submit, args=(key,)) for key in "abcd"]
    threads += [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
        assert not thread.is_alive()
    assert accepted
    assert all(ticket.exception is None or isinstance(ticket.exception, ClosedError) for ticket in accepted)
    assert list(tmp_path.iterdir()) == []


def test_ticket_awaited_on_a_loop_that_is_gone_does_not_end_the_worker(tmp_path: Path, pool: HostPool) -> None:
    store, faulty = _open_faulty(tmp_path, "auto")
    store.create("a", _NBYTES)
    faulty.inject(Fault.STUCK)
    with pool.lease(_NBYTES, "test") as lease:
        lease.memory[:] = os.urandom(_NBYTES)
        stuck = store.submit_write("a", lease.memory, tag=_TAG)

        async def give_up() -> None:
            async with asyncio.timeout(0):
                await stuck

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        faulty.release_stuck()  # completes in a worker thread, whose listener's loop is closed
        assert _failure(stuck) is None
        assert _failure(store.submit_read("a", lease.memory, tag=_TAG)) is None
    store.close()


@pytest.mark.parametrize("engine", ["auto", "buffered"])
def test_completion_callback_may_close_the_store(
    tmp_path: Path, pool: HostPool, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`close` waits for its workers, and must not wait for the one that it runs on."""
    store, _ = _open_faulty(tmp_path, engine)
    store.create("a", _NBYTES)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("infinity-io")]
    runs_on: list[threading.Thread] = []

    def close(_: Ticket) -> None:
        runs_on.append(threading.current_thread())
        store.close()

    with pool.lease(_NBYTES, "test") as lease:
        ticket = store.submit_write("a", lease.memory, tag=_TAG)
        ticket.add_done_callback(close)
        assert _failure(ticket) is None
        for worker in workers:
            worker.join(_WAIT_S)
            assert not worker.is_alive()
    assert len(runs_on) == 1
    assert caplog.text == ""
    assert list(tmp_path.iterdir()) == []


def test_close_in_a_callback_waits_for_the_other_workers(
    tmp_path: Path, pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the file would be closed under a system call, and its number might be another file's by then."""
    gates = [Gate(), Gate()]
    turn = iter(gates)
    chooser = threading.Lock()

    class OneGateEach(Gate):
        def _pass(self) -> None:
            with chooser:
                gate = next(turn)
            gate._pass()

    store = _open_gated(tmp_path, OneGateEach(), close_timeout_s=_WAIT_S, threads=2)
    store.create("a", _NBYTES)
    store.create("b", _NBYTES)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("infinity-io")]
    closing, closed = threading.Event(), threading.Event()

    def close(_: Ticket) -> None:
        closing.set()
        store.close()
        closed.set()

    with pool.lease(_NBYTES, "a") as first, pool.lease(_NBYTES, "b") as second:
        tickets = [
            store.submit_read("a", first.memory, tag=_TAG),
            store.submit_read("b", second.memory, tag=_TAG),
        ]
        for gate in gates:
            assert gate.entered.acquire(timeout=_WAIT_S)
        for ticket in tickets:  # whichever ends first closes the store
            ticket.add_done_callback(lambda ticket: None if closing.is_set() else close(ticket))
        gates[0].opened.set()
        assert closing.wait(_WAIT_S)
        fd = store._drives[0].file.fd
        assert not closed.is_set()
        os.fstat(fd)  # still open: the other call is in the kernel
        gates[1].opened.set()
        assert closed.wait(_WAIT_S)
        assert all(_failure(ticket) is None for ticket in tickets)
        for worker in workers:
            worker.join(_WAIT_S)
    assert caplog.text == ""
