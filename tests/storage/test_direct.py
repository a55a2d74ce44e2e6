"""The workers of the direct backend, on system calls of the test's own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from storage.backends.direct import DirectBackend
from storage.backends.system import SystemCalls
from storage.errors import ClosedError, ReadError
from storage.types import Op, Priority
from tests.storage.helpers import PAGE, WAIT_S, failure, finish, request


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * PAGE))
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


class Gate:
    """Reads that wait until the test opens the gate, and count how many wait."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.inside = 0
        self._changed = threading.Condition()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._changed:
            self.inside += 1
            self._changed.notify_all()
        assert self.open.wait(WAIT_S)
        return os.preadv(fd, buffers, offset)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.inside >= count, WAIT_S)

    def calls(self) -> SystemCalls:
        return SystemCalls(preadv=self.preadv)


def _memory(pages: int) -> memoryview:
    return memoryview(bytearray(pages * PAGE))


def test_blocks_of_one_transfer_are_at_the_device_together(fd: int) -> None:
    gate = Gate()
    backend = DirectBackend(threads=4, block_nbytes=PAGE, calls=gate.calls())
    read = request(Op.READ, _memory(4), fd=fd)
    backend.submit(read)
    gate.wait_for(4)
    assert backend.in_flight() == [read]
    gate.open.set()
    finish(read.ticket)
    assert backend.progress == 4
    assert backend.in_flight() == []
    backend.close()


def test_blocks_of_several_transfers_are_at_the_device_together(fd: int) -> None:
    gate = Gate()
    backend = DirectBackend(threads=4, block_nbytes=PAGE, calls=gate.calls())
    reads = [request(Op.READ, _memory(1), fd=fd, offset=number * PAGE) for number in range(4)]
    for read in reads:
        backend.submit(read)
    gate.wait_for(4)
    gate.open.set()
    for read in reads:
        finish(read.ticket)
    backend.close()


def test_closing_finishes_the_blocks_in_service_and_fails_the_rest(fd: int) -> None:
    gate = Gate()
    backend = DirectBackend(threads=1, block_nbytes=PAGE, calls=gate.calls())
    last, cut, waiting = (request(Op.READ, _memory(pages), fd=fd) for pages in (1, 2, 1))
    backend.submit(last)
    gate.wait_for(1)
    backend.submit(cut)
    backend.submit(waiting)
    closer = threading.Thread(target=backend.close)
    closer.start()
    assert isinstance(failure(waiting.ticket), ClosedError)  # while the device still works on the first
    assert isinstance(failure(cut.ticket), ClosedError)
    assert not last.ticket.done
    gate.open.set()
    finish(last.ticket)
    closer.join(WAIT_S)
    with pytest.raises(ClosedError):
        backend.submit(waiting)
    backend.close()


def test_closing_gives_a_stuck_device_up(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    backend = DirectBackend(threads=2, block_nbytes=PAGE, calls=gate.calls(), close_timeout_s=0.01)
    stuck = request(Op.READ, _memory(1), fd=fd)
    backend.submit(stuck)
    gate.wait_for(1)
    backend.close()
    assert isinstance(failure(stuck.ticket), ClosedError)
    assert "never ended" in caplog.text
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name.startswith("infinity-io"):
            thread.join(WAIT_S)


def test_an_error_of_any_kind_reaches_the_ticket(fd: int) -> None:
    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise MemoryError("no room for the arguments")

    backend = DirectBackend(threads=1, block_nbytes=PAGE, calls=SystemCalls(preadv=broken))
    read = request(Op.READ, _memory(2), fd=fd)
    backend.submit(read)
    assert isinstance(failure(read.ticket), MemoryError)
    after = request(Op.WRITE, _memory(2), fd=fd)
    backend.submit(after)
    finish(after.ticket)
    backend.close()


def test_a_real_error_of_the_system() -> None:
    backend = DirectBackend(threads=1, block_nbytes=PAGE)
    read = request(Op.READ, _memory(1), fd=-1, priority=Priority.DEMAND)
    backend.submit(read)
    assert isinstance(failure(read.ticket), ReadError)
    backend.close()


def test_cpu_time_is_told_by_what_it_was_spent_on(fd: int) -> None:
    """The check computes, the call waits: their CPU time is told apart, and of every block."""

    def compute(start: int, stop: int) -> None:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.01:
            continue

    backend = DirectBackend(threads=1, block_nbytes=16 * PAGE)
    os.truncate(fd, 64 * PAGE)
    read = request(Op.READ, _memory(64), fd=fd)
    read.check = compute
    backend.submit(read)
    finish(read.ticket)
    backend.close()
    cost = backend.cost
    assert cost.operations == backend.progress == 4
    assert cost.check_s >= 0.04
    assert 0 < cost.python_s < cost.check_s
    assert 0 < cost.system_s < cost.check_s
    assert cost.python_s_per_operation == cost.python_s / 4
    assert (cost - cost).operations == 0


def test_of_small_blocks_one_in_some_stands_for_the_others(fd: int) -> None:
    checked: list[tuple[int, int]] = []

    def compute(start: int, stop: int) -> None:
        checked.append((start, stop))
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.001:
            continue

    backend = DirectBackend(threads=1, block_nbytes=PAGE)
    read = request(Op.READ, _memory(16), fd=fd)
    read.check = compute
    backend.submit(read)
    finish(read.ticket)
    backend.close()
    assert len(checked) == backend.cost.operations == 16
    assert backend.cost.check_s >= 0.016


def test_what_somebody_begins_to_wait_for_goes_first(fd: int) -> None:
    gate = Gate()
    backend = DirectBackend(threads=1, block_nbytes=PAGE, calls=gate.calls())
    order: list[str] = []
    requests = [request(Op.READ, _memory(1), fd=fd) for _ in range(3)]
    for number, read in enumerate(requests):
        read.key = f"key {number}"
        read.ticket.add_done_callback(lambda _, key=read.key: order.append(key))  # type: ignore[misc]
        backend.submit(read)
    gate.wait_for(1)
    backend.promote("key 2")
    gate.open.set()
    for read in requests:
        finish(read.ticket)
    backend.close()
    assert order == ["key 0", "key 2", "key 1"]


def test_a_system_without_threads_gets_back_those_that_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        DirectBackend(threads=3, block_nbytes=PAGE)
    assert [thread.is_alive() for thread in started] == [False, False]
