"""Asynchronous transfers of the kernel, with real ones on a real file; what it refuses is put in between."""

from __future__ import annotations

import errno
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from storage.backends import kernel_aio, probe
from storage.backends.aio import AioBackend
from storage.backends.kernel_aio import KernelAio, address_of, why_not
from storage.backends.probe import Engine, choose_engine
from storage.errors import ClosedError, IntegrityError, IoError, ReadError, ShortIoError, StorageError, SwapFullError
from storage.pool import HostPool
from storage.types import IoRequest, Op, Priority
from tests.storage.helpers import PAGE, WAIT_S, failure, filled, finish, pattern, request, run_threads

_PAGES = 64

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no asynchronous transfers here: {why_not()}")


@pytest.fixture
def fd(tmp_path: Path, can_direct: None) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(pattern(_PAGES * PAGE, seed=1).tobytes())
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


Answer = Callable[[int, int], int]


class OddKernel(KernelAio):
    """Changes how transfers end: `answers` are asked one after the other, with the slot and what the kernel said."""

    def __init__(self, depth: int, answers: Sequence[Answer] = ()) -> None:
        self.answers = list(answers)
        self.most_in_flight = self._in_flight = 0
        self.refusals: list[int] = []
        super().__init__(depth)

    def submit(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        if self.refusals and slots != [self._bell_slot]:
            return [(slots[0], -self.refusals.pop(0)), *super().submit(slots[1:])]
        if slots != [self._bell_slot]:
            self._in_flight += len(slots)
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        return super().submit(slots)

    def wait(self) -> list[tuple[int, int]]:
        ended = super().wait()
        self._in_flight -= len(ended)
        return [(slot, self.answers.pop(0)(slot, result) if self.answers else result) for slot, result in ended]


def _backend(depth: int = 4, block_pages: int = 1, **more: object) -> AioBackend:
    return AioBackend(depth=depth, block_nbytes=block_pages * PAGE, **more)  # type: ignore[arg-type]


def test_bytes_arrive_where_they_belong_whatever_the_blocks(fd: int, pool: HostPool) -> None:
    for depth, block_pages in ((1, 1), (4, 1), (3, 5), (32, 64), (2, 100)):
        backend = _backend(depth, block_pages)
        with filled(pool, _PAGES * PAGE, seed=depth) as written, pool.lease(_PAGES * PAGE, "read") as read:
            finish_all(backend, [request(Op.WRITE, written.memory.toreadonly(), fd=fd)])
            parts = [slice(start * PAGE, (start + 16) * PAGE) for start in range(0, _PAGES, 16)]
            finish_all(backend, [request(Op.READ, read.memory[at], fd=fd, offset=at.start) for at in parts])
            assert read.memory == written.memory
        assert backend.progress == -(-_PAGES // block_pages) + 4 * -(-16 // block_pages)
        backend.close()


def finish_all(backend: AioBackend, requests: Sequence[IoRequest]) -> None:
    for one in requests:
        backend.submit(one)
    for one in requests:
        finish(one.ticket)


def test_no_more_than_so_many_are_in_the_kernel(fd: int, pool: HostPool) -> None:
    kernel = OddKernel(3)
    backend = _backend(3, kernel=kernel)
    with pool.lease(_PAGES * PAGE, "read") as lease:
        finish_all(backend, [request(Op.READ, lease.memory, fd=fd)])
    backend.close()
    assert kernel.most_in_flight == 3


def test_completions_submit_what_comes_next(fd: int, pool: HostPool) -> None:
    """As a load does: nobody wakes the thread, which finds what its own callbacks have submitted."""
    backend = _backend(2)
    ended = threading.Event()
    with pool.lease(PAGE, "read") as lease:

        def go_on(left: int) -> None:
            if not left:
                ended.set()
                return
            read = request(Op.READ, lease.memory, fd=fd)
            read.ticket.add_done_callback(lambda _: go_on(left - 1))
            backend.submit(read)

        go_on(500)
        assert ended.wait(WAIT_S)
        backend.close()
    assert backend.progress == 500


def test_many_threads_submit(fd: int, pool: HostPool) -> None:
    backend = _backend(8)
    with pool.lease(8 * _PAGES * PAGE, "read") as lease:

        def work(number: int) -> None:
            for page in range(_PAGES):
                at = (number * _PAGES + page) * PAGE
                read = request(Op.READ, lease.memory[at : at + PAGE], fd=fd, offset=page * PAGE)
                backend.submit(read)
                if page % 7 == 0:
                    finish(read.ticket)

        run_threads(8, work)
        finish_all(backend, [request(Op.READ, lease.memory[:PAGE], fd=fd, priority=Priority.WRITE)])
        expected = pattern(_PAGES * PAGE, seed=1).tobytes()
        assert all(lease.memory[n * _PAGES * PAGE : (n + 1) * _PAGES * PAGE] == expected for n in range(8))
        backend.close()


def test_a_file_that_is_too_short(fd: int, pool: HostPool) -> None:
    os.truncate(fd, 10 * PAGE)
    backend = _backend(4, 16)
    with pool.lease(16 * PAGE, "read") as lease:
        read = request(Op.READ, lease.memory, fd=fd)
        backend.submit(read)
        error = failure(read.ticket)
        assert isinstance(error, ShortIoError)
        assert (error.offset, error.nbytes) == (10 * PAGE, 6 * PAGE)
        backend.close()


@pytest.mark.parametrize("result", [2 * PAGE + 512, PAGE, 100, -errno.EAGAIN, -errno.EINTR])
def test_what_was_short_or_interrupted_is_resumed(fd: int, pool: HostPool, result: int) -> None:
    backend = _backend(2, 4, kernel=OddKernel(2, [lambda slot, said: result]))
    with pool.lease(16 * PAGE, "read") as lease:
        finish_all(backend, [request(Op.READ, lease.memory, fd=fd)])
        assert lease.memory == pattern(_PAGES * PAGE, seed=1).tobytes()[: 16 * PAGE]
        backend.close()


@pytest.mark.parametrize(("retries", "is_fatal"), [(0, True), (1, False)])
def test_io_errors_are_retried_as_often_as_asked(fd: int, pool: HostPool, retries: int, is_fatal: bool) -> None:
    backend = _backend(2, eio_retries=retries, kernel=OddKernel(2, [lambda slot, said: -errno.EIO]))
    with pool.lease(PAGE, "read") as lease:
        read = request(Op.READ, lease.memory, fd=fd)
        backend.submit(read)
        if is_fatal:
            error = failure(read.ticket)
            assert isinstance(error, ReadError)
            assert error.errno == errno.EIO
        else:
            finish(read.ticket)
        finish_all(backend, [request(Op.READ, lease.memory, fd=fd)])  # later ones are served
        backend.close()


def test_a_full_disk_says_so(fd: int, pool: HostPool) -> None:
    backend = _backend(2, kernel=OddKernel(2, [lambda slot, said: -errno.ENOSPC]))
    with pool.lease(PAGE, "write") as lease:
        write = request(Op.WRITE, lease.memory, fd=fd)
        backend.submit(write)
        assert isinstance(failure(write.ticket), SwapFullError)
        backend.close()


def test_what_the_kernel_does_not_take(fd: int, pool: HostPool) -> None:
    """A file that is not open is refused at once: by the real kernel, between others that it takes."""
    backend = _backend(8)
    with pool.lease(3 * PAGE, "read") as lease:
        parts = [lease.memory[start * PAGE : (start + 1) * PAGE] for start in range(3)]
        reads = [request(Op.READ, part, fd=one) for part, one in zip(parts, (fd, 1 << 20, fd), strict=True)]
        for read in reads:
            backend.submit(read)
        finish(reads[0].ticket)
        finish(reads[2].ticket)
        error = failure(reads[1].ticket)
        assert isinstance(error, ReadError)
        assert error.errno == errno.EBADF
        backend.close()


def test_a_kernel_that_is_busy_is_asked_again(fd: int, pool: HostPool) -> None:
    kernel = OddKernel(2)
    kernel.refusals = [errno.EAGAIN, errno.EAGAIN]
    backend = _backend(2, kernel=kernel)
    with pool.lease(4 * PAGE, "read") as lease:
        finish_all(backend, [request(Op.READ, lease.memory, fd=fd)])
        assert lease.memory == pattern(_PAGES * PAGE, seed=1).tobytes()[: 4 * PAGE]
        backend.close()


def test_checks_are_called_for_every_part_and_fail_the_transfer(fd: int, pool: HostPool) -> None:
    seen: list[tuple[int, int]] = []

    def check(start: int, stop: int) -> None:
        seen.append((start, stop))
        if start == 2 * PAGE:
            raise IntegrityError("damaged")

    backend = _backend(1)
    with pool.lease(4 * PAGE, "read") as lease:
        read = request(Op.READ, lease.memory, fd=fd)
        read.check = check
        backend.submit(read)
        assert isinstance(failure(read.ticket), IntegrityError)
        backend.close()
    assert seen == [(0, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 3 * PAGE)]  # after an error nothing more is started
    assert backend.cost.check_s > 0
    assert backend.cost.python_s > 0


def test_an_error_of_any_kind_reaches_the_ticket(fd: int, pool: HostPool) -> None:
    def broken(start: int, stop: int) -> None:
        raise RuntimeError("a bug")

    backend = _backend()
    with pool.lease(PAGE, "read") as lease:
        read = request(Op.READ, lease.memory, fd=fd)
        read.check = broken
        backend.submit(read)
        assert isinstance(failure(read.ticket), RuntimeError)
        finish_all(backend, [request(Op.READ, lease.memory, fd=fd)])
        backend.close()


class HeldKernel(OddKernel):
    """Tells of nothing until it is let go."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.holds, self.let_go = threading.Event(), threading.Event()

    def wait(self) -> list[tuple[int, int]]:
        ended = super().wait()
        if ended:
            self.holds.set()
            assert self.let_go.wait(WAIT_S)
        return ended


def test_closing_fails_what_waits_and_finishes_what_is_in_service(fd: int, pool: HostPool) -> None:
    kernel = HeldKernel(1)
    backend = _backend(1, kernel=kernel)
    with pool.lease(4 * PAGE, "read") as lease:
        first, cut = (request(Op.READ, lease.memory[: pages * PAGE], fd=fd) for pages in (1, 4))
        backend.submit(first)
        assert kernel.holds.wait(WAIT_S)
        backend.submit(cut)
        closer = threading.Thread(target=backend.close)
        closer.start()
        assert isinstance(failure(cut.ticket), ClosedError)
        kernel.let_go.set()
        finish(first.ticket)
        closer.join(WAIT_S)
        with pytest.raises(ClosedError):
            backend.submit(cut)
        backend.close()
        assert backend.in_flight() == []


def test_closing_gives_a_stuck_device_up(fd: int, pool: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    kernel = HeldKernel(2)
    backend = _backend(2, kernel=kernel, close_timeout_s=0.01)
    with pool.lease(PAGE, "read") as lease:
        stuck = request(Op.READ, lease.memory, fd=fd)
        backend.submit(stuck)
        assert kernel.holds.wait(WAIT_S)
        backend.close()
        assert isinstance(failure(stuck.ticket), ClosedError)
        assert "never ended" in caplog.text
        kernel.let_go.set()
        for thread in threading.enumerate():
            if thread.name == "infinity-io-aio":
                thread.join(WAIT_S)


def test_a_callback_may_close(fd: int, pool: HostPool) -> None:
    backend = _backend()
    with pool.lease(PAGE, "read") as lease:
        read = request(Op.READ, lease.memory, fd=fd)
        closed = threading.Event()
        read.ticket.add_done_callback(lambda _: (backend.close(), closed.set()))
        backend.submit(read)
        assert closed.wait(WAIT_S)
        finish(read.ticket)
    for thread in threading.enumerate():
        if thread.name == "infinity-io-aio":
            thread.join(WAIT_S)


def test_addresses_of_memory_that_may_and_may_not_be_written_to(pool: HostPool) -> None:
    with pool.lease(2 * PAGE, "x") as lease:
        assert address_of(lease.memory) == address_of(lease.memory.toreadonly()) == lease.address
        assert address_of(lease.memory[PAGE:]) == lease.address + PAGE


@pytest.mark.usefixtures("can_direct")
def test_the_engine_is_chosen_by_name_and_never_by_itself(tmp_path: Path) -> None:
    assert choose_engine(tmp_path, "aio") == (Engine.AIO, "asked for, and O_DIRECT works here")
    assert choose_engine(tmp_path, "auto")[0] is Engine.DIRECT


@pytest.mark.usefixtures("can_direct")
def test_where_the_kernel_refuses_the_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "why_not", lambda: "the kernel refuses: Function not implemented")
    with pytest.raises(StorageError, match=r"engine 'aio' was asked for, but the kernel refuses.*Use 'auto'"):
        choose_engine(tmp_path, "aio")
    with pytest.raises(StorageError, match=r"engine 'aio' was asked for, but in .* No such file"):
        choose_engine(tmp_path / "missing", "aio")


def test_other_machines_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "ppc64le")
    assert "not known for ppc64le" in str(why_not())
    with pytest.raises(OSError, match="not known for ppc64le"):
        KernelAio(1)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Linux's" in str(why_not())


def test_too_much_for_the_kernel_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_aio, "_numbers", lambda: (1 << 20, 1 << 20, 1 << 20, 1 << 20))
    assert why_not() == "the kernel refuses: Function not implemented"


def test_an_engine_with_no_room_in_the_kernel_says_which_setting_it_is() -> None:
    too_many = int(Path("/proc/sys/fs/aio-max-nr").read_text()) + 1
    if too_many > 1 << 20:
        pytest.skip("a test would need too much memory for so many transfers as this kernel has room for")
    with pytest.raises(StorageError, match=rf"with {too_many} transfers at a time.*Raise fs\.aio-max-nr"):
        probe.make_backend(Engine.AIO, threads=too_many, block_nbytes=PAGE)


class BrokenKernel(HeldKernel):
    """When it is let go, it breaks."""

    def wait(self) -> list[tuple[int, int]]:
        if super().wait():
            raise OSError(errno.EINVAL, "the context is gone")
        return []


def test_a_kernel_that_breaks_fails_everything_and_what_comes_after(fd: int, pool: HostPool) -> None:
    kernel = BrokenKernel(2)
    backend = _backend(2, kernel=kernel)
    with pool.lease(8 * PAGE, "read") as lease:
        in_service, waits, late = (request(Op.READ, lease.memory, fd=fd) for _ in range(3))
        backend.submit(in_service)
        assert kernel.holds.wait(WAIT_S)
        backend.submit(waits)
        kernel.let_go.set()
        for read in (in_service, waits):
            error = failure(read.ticket)
            assert isinstance(error, IoError)
            assert "the I/O backend of file has ended: [Errno 22] the context is gone" in str(error)
        with pytest.raises(IoError, match="has ended"):
            backend.submit(late)
        assert backend.in_flight() == []
        backend.close()
