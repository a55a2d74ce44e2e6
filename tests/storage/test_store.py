"""What every store promises, over every backend."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest

from storage import transfer
from storage.backends.base import Backend
from storage.errors import ClosedError, ShortIoError, StorageError, SwapFullError
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Priority, TrafficTag
from tests.storage.conftest import MakeStore
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, HeldBackend, failure, filled, finish, pattern, run_threads

_UNALIGNED = [1, 511, 512, 513, 4095, 4097, 4096 + 512, MIB - 1, MIB + 1, MIB + 512]


@pytest.mark.parametrize("pages", [1, 2, 15, 16, 17, 48, 65])
def test_what_is_written_is_read(store: ShardStore, pool: HostPool, pages: int) -> None:
    nbytes = pages * PAGE
    store.create("a", nbytes)
    with filled(pool, nbytes, 1) as source, pool.lease(nbytes, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == source.memory


def test_parts_of_a_key(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 40 * PAGE)
    with filled(pool, 40 * PAGE, 1) as source, pool.lease(24 * PAGE, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_write("a", source.memory[: 2 * PAGE], offset=10 * PAGE, tag=TAG))
        finish(store.submit_read("a", target.memory, offset=8 * PAGE, tag=TAG))
        expected = pattern(40 * PAGE, 1)
        expected[10 * PAGE : 12 * PAGE] = expected[: 2 * PAGE]
        assert np.array_equal(target.array("u1"), expected[8 * PAGE : 32 * PAGE])


def test_keys_do_not_touch_each_other(store: ShardStore, pool: HostPool) -> None:
    sizes = {f"k{number}": (number + 1) * PAGE for number in range(8)}
    leases = {key: filled(pool, nbytes, number) for number, (key, nbytes) in enumerate(sizes.items())}
    for key, nbytes in sizes.items():
        store.create(key, nbytes)
    for ticket in [store.submit_write(key, lease.memory, tag=TAG) for key, lease in leases.items()]:
        finish(ticket)
    for number, (key, nbytes) in enumerate(sizes.items()):
        with pool.lease(nbytes, "target") as target:
            finish(store.submit_read(key, target.memory, priority=Priority.DEMAND, tag=TAG))
            assert np.array_equal(target.array("u1"), pattern(nbytes, number))
        leases[key].release()
    assert store.keys() == list(sizes)
    assert store.nbytes_of("k3") == 4 * PAGE


def test_many_threads_use_one_store(store: ShardStore, pool: HostPool) -> None:
    for number in range(4):
        store.create(str(number), 4 * PAGE)

    def work(number: int) -> None:
        with pool.lease(4 * PAGE, str(number)) as lease:
            for turn in range(12):
                lease.array("u1")[:] = 16 * number + turn
                finish(store.submit_write(str(number), lease.memory, tag=TAG))
                lease.array("u1")[:] = 0
                finish(store.submit_read(str(number), lease.memory, tag=TAG))
                assert (lease.array("u1") == 16 * number + turn).all()

    run_threads(4, work)
    assert store.stats.total(Op.READ).operations == 48


@pytest.mark.parametrize("nbytes", [0, -PAGE, *_UNALIGNED])
def test_keys_of_ragged_size_are_refused(store: ShardStore, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"'blocks.3' has {nbytes} bytes"):
        store.create("blocks.3", nbytes)
    assert store.keys() == []


@pytest.mark.parametrize("nbytes", [0, *_UNALIGNED])
def test_transfers_of_ragged_size_are_refused(open_store: MakeStore, pool: HostPool, nbytes: int) -> None:
    store = open_store("buffered", capacity_nbytes=4 * MIB)
    store.create("blocks.3", 2 * MIB)
    with pool.lease(2 * MIB, "x") as lease:
        for submit in (store.submit_read, store.submit_write):
            with pytest.raises(ValueError, match=rf"{nbytes} bytes for key 'blocks.3'"):
                submit("blocks.3", lease.memory[:nbytes], tag=TAG)


@pytest.mark.parametrize("offset", [1, 511, 512, 4095, 4097, 6144])
def test_ragged_offsets_and_addresses_are_refused(open_store: MakeStore, pool: HostPool, offset: int) -> None:
    store = open_store("buffered")
    store.create("blocks.3", 4 * PAGE)
    with pool.lease(4 * PAGE, "x") as lease:
        with pytest.raises(ValueError, match=f"offset {offset} of key 'blocks.3'"):
            store.submit_read("blocks.3", lease.memory[:PAGE], offset=offset, tag=TAG)
        with pytest.raises(ValueError, match=r"'blocks\.3' starts at address"):
            store.submit_write("blocks.3", lease.memory[offset : offset + PAGE], tag=TAG)


def test_spans_outside_a_key_are_refused(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store("buffered")
    store.create("a", 2 * PAGE)
    with pool.lease(4 * PAGE, "x") as lease:
        for offset, pages in [(0, 3), (PAGE, 2), (2 * PAGE, 1), (-PAGE, 1)]:
            with pytest.raises(ValueError, match="leaves key 'a', which has 8192 bytes"):
                store.submit_read("a", lease.memory[: pages * PAGE], offset=offset, tag=TAG)
    assert store.describe_in_flight() == []


def test_memory_that_cannot_be_used_is_refused(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store("buffered")
    store.create("a", PAGE)
    with pool.lease(2 * PAGE, "x") as lease:
        with pytest.raises(ValueError, match="cannot be written to"):
            store.submit_read("a", lease.memory[:PAGE].toreadonly(), tag=TAG)
        with pytest.raises(ValueError, match="not contiguous"):
            store.submit_write("a", lease.memory[::2], tag=TAG)
        finish(store.submit_write("a", lease.memory[:PAGE].toreadonly(), tag=TAG))
        finish(store.submit_write("a", lease.memory[:PAGE].cast("i"), tag=TAG))
    assert store.stats.total(Op.WRITE).moved_nbytes == 2 * PAGE


def test_unknown_and_double_keys(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store("buffered")
    store.create("a", PAGE)
    with pytest.raises(ValueError, match="'a' exists already"):
        store.create("a", PAGE)
    with pool.lease(PAGE, "x") as lease, pytest.raises(KeyError, match="no key 'b'"):
        store.submit_read("b", lease.memory, tag=TAG)
    with pytest.raises(KeyError, match="no key 'b'"):
        store.delete("b")


def test_space_of_deleted_keys_is_used_again(open_store: MakeStore) -> None:
    store = open_store("buffered", capacity_nbytes=16 * PAGE)
    file = store._drives[0].file
    for turn in range(20):
        store.create(f"k{turn}", 16 * PAGE)
        store.delete(f"k{turn}")
    assert os.fstat(file.fd).st_size == 16 * PAGE
    assert file.extents.free_nbytes == 16 * PAGE


def test_a_key_in_flight_cannot_be_deleted(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", PAGE)
    with pool.lease(PAGE, "x") as lease:
        ticket = store.submit_write("a", lease.memory, tag=TAG)
        with pytest.raises(ValueError, match="in flight"):
            store.delete("a")
        held[0].let_go()
        finish(ticket)
    store.delete("a")
    assert store.keys() == []


def test_who_waits_for_a_read_waits_for_the_write_before_it(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", PAGE)
    with pool.lease(PAGE, "x") as lease:
        tickets = [store.submit_write("a", lease.memory, tag=TAG), store.submit_read("a", lease.memory, tag=TAG)]
        assert held[0].promoted == []
        tickets.append(store.submit_read("a", lease.memory, priority=Priority.DEMAND, tag=TAG))
        assert held[0].promoted == ["a"]
        for _ in tickets:
            held[0].wait_for(1)
            held[0].let_go()
        for ticket in tickets:
            finish(ticket)
        tickets = [store.submit_write("a", lease.memory, tag=TAG) for _ in range(2)]
        tickets.append(store.submit_read("a", lease.memory, priority=Priority.DEMAND, tag=TAG))
        for priority in (Priority.WRITE, Priority.DEMAND, Priority.DEMAND):  # the second was not with the backend yet
            held[0].wait_for(1)
            assert held[0].held[0].priority is priority
            held[0].let_go()
        for ticket in tickets:
            finish(ticket)
    assert store.cost.operations == 6


def test_whoever_begins_to_wait_for_a_key_has_its_transfers_go_first(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", PAGE)
    store.promote("a")
    assert held[0].promoted == []  # nothing is being moved
    with pytest.raises(KeyError, match="no key 'b'"):
        store.promote("b")
    with pool.lease(PAGE, "x") as lease:
        tickets = [store.submit_write("a", lease.memory, tag=TAG), store.submit_read("a", lease.memory, tag=TAG)]
        store.promote("a")
        assert held[0].promoted == ["a"]
        for priority in (Priority.WRITE, Priority.DEMAND):  # the second was not with the backend yet
            held[0].wait_for(1)
            assert held[0].held[0].priority is priority
            held[0].let_go()
        for ticket in tickets:
            finish(ticket)


def test_more_than_the_capacity_makes_the_file_longer(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store("auto", capacity_nbytes=16 * PAGE)
    store.create("a", 16 * PAGE)
    store.create("b", 4 * PAGE)
    with filled(pool, 4 * PAGE, 1) as lease:
        finish(store.submit_write("b", lease.memory, tag=TAG))
    assert os.fstat(store._drives[0].file.fd).st_size == 20 * PAGE


@pytest.mark.parametrize("drives", [2, 3])
def test_keys_spread_over_drives(open_store: MakeStore, pool: HostPool, drives: int) -> None:
    store = open_store("auto", drives=drives, capacity_nbytes=8 * MIB, options={"block_nbytes": MIB // 2})
    nbytes = 4 * MIB + PAGE
    store.create("a", nbytes)
    assert [drive.file.extents.free_nbytes < drive.file.extents.capacity_nbytes for drive in store._drives] == (
        [True] * drives
    )
    with filled(pool, nbytes, 3) as source, pool.lease(nbytes, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == source.memory
        middle = slice(MIB, 3 * MIB)  # crosses from one drive to the next
        finish(store.submit_read("a", target.memory[: 2 * MIB], offset=MIB, tag=TAG))
        assert target.memory[: 2 * MIB] == source.memory[middle]
    assert store.stats.total(Op.WRITE).operations == 1
    by_drive = store.nbytes_by_drive("a", 0, nbytes)
    assert sum(by_drive.values()) == nbytes
    assert sorted(by_drive) == list(range(drives))
    assert sum(store.nbytes_by_drive("a", MIB, MIB + PAGE).values()) == PAGE
    assert not store.nbytes_by_drive("b", 0, PAGE)
    store.delete("a")
    assert all(drive.file.extents.largest_free_nbytes == drive.file.extents.capacity_nbytes for drive in store._drives)


def test_traffic_is_counted_by_tag(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 2 * PAGE)
    with pool.lease(2 * PAGE, "x") as lease:
        finish(store.submit_write("a", lease.memory, tag=TrafficTag("param", 3), payload_nbytes=5000))
        finish(store.submit_read("a", lease.memory[:PAGE], tag=TrafficTag("state", 4)))
    written = store.stats.total(Op.WRITE, kind="param", step=3)
    assert (written.moved_nbytes, written.payload_nbytes, written.operations) == (2 * PAGE, 5000, 1)
    assert written.seconds > 0
    assert store.stats.total(Op.READ, kind="state").moved_nbytes == PAGE
    assert sum(store.stats.latency_histogram(Op.READ).values()) == 1


def test_progress_grows_with_blocks(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 48 * PAGE)
    with pool.lease(48 * PAGE, "x") as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
    assert store.progress == 3


def test_what_is_in_flight_can_be_told(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held), options={"checksum": "none"})
    store.create("blocks.3", 2 * PAGE)
    with pool.lease(2 * PAGE, "x") as lease:
        write = store.submit_write("blocks.3", lease.memory, tag=TAG)
        read = store.submit_read("blocks.3", lease.memory[:PAGE], offset=PAGE, tag=TAG)
        first, second = store.describe_in_flight()
        assert first.startswith("write of blocks.3 (8192 bytes at 0): at offset 0 of /")
        assert second == "read of blocks.3 (4096 bytes at 4096): held behind an earlier one"
        assert not store.drain(0)
        held[0].let_go()
        held[0].wait_for(1)
        held[0].let_go()
        assert store.drain(WAIT_S)
        finish(write)
        finish(read)
    assert store.describe_in_flight() == []


def test_conflicting_operations_are_held_and_others_are_not(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", 4 * PAGE)
    with pool.lease(4 * PAGE, "x") as lease:
        part = [lease.memory[number * PAGE : (number + 1) * PAGE] for number in range(4)]
        store.submit_write("a", part[0], offset=0, tag=TAG)
        store.submit_read("a", part[1], offset=0, tag=TAG)  # held
        store.submit_write("a", part[2], offset=2 * PAGE, tag=TAG)
        store.submit_read("a", part[3], offset=3 * PAGE, tag=TAG)
        assert [(one.op, one.offset) for one in held[0].held] == [
            (Op.WRITE, 0),
            (Op.WRITE, 2 * PAGE),
            (Op.READ, 3 * PAGE),
        ]
        for _ in range(3):
            held[0].let_go()
        held[0].wait_for(1)
        assert held[0].held[0].op is Op.READ
        held[0].let_go()
        assert store.drain(WAIT_S)


def test_what_was_given_up_may_end_once_more(
    open_store: MakeStore, pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupted submission gives its operation up after a while; the drive may complete it later all the same."""
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", PAGE)
    with filled(pool, PAGE, 1) as lease:
        ticket = store.submit_write("a", lease.memory, tag=TAG)
        ((operation, entry),) = store._operations.in_flight.items()
        store._operations._ended(entry, operation, InterruptedError("Ctrl-C"))
        assert isinstance(failure(ticket), InterruptedError)
        late = held[0].held[0].ticket
        held[0].let_go()
        finish(late)
        again = store.submit_write("a", lease.memory, tag=TAG)
        held[0].wait_for(1)
        held[0].let_go()
        finish(again)
    assert isinstance(failure(ticket), InterruptedError)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert store.held_nbytes == PAGE


def test_a_long_chain_that_fails_at_once_does_not_nest(open_store: MakeStore, pool: HostPool) -> None:
    class Refusing(HeldBackend):
        has_one = False

        def submit(self, request: object) -> None:
            if self.has_one:
                raise ClosedError("gone")
            self.has_one = True
            super().submit(request)  # type: ignore[arg-type]

    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held, Refusing))
    store.create("a", PAGE)
    with pool.lease(PAGE, "x") as lease:
        tickets = [store.submit_write("a", lease.memory, tag=TAG) for _ in range(1500)]
        held[0].held.pop().ticket.set_done()
        assert [type(failure(ticket)) for ticket in tickets[1:]] == [ClosedError] * 1499
        finish(tickets[0])


def test_closing_fails_what_is_queued(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []
    store = open_store("buffered", wrap_backend=_hold(held))
    store.create("a", PAGE)
    with pool.lease(PAGE, "x") as lease:
        tickets = [store.submit_write("a", lease.memory, tag=TAG) for _ in range(3)]
        store.close()
        assert all(ticket.done and ticket.exception is not None for ticket in tickets)
        assert isinstance(tickets[1].exception, ClosedError)


def test_a_closed_store_refuses(store: ShardStore, pool: HostPool, tmp_path: Path) -> None:
    store.create("a", PAGE)
    store.close()
    store.close()
    with pool.lease(PAGE, "x") as lease, pytest.raises(ClosedError, match="closed"):
        store.submit_read("a", lease.memory, tag=TAG)
    with pytest.raises(ClosedError):
        store.create("b", PAGE)
    assert list(tmp_path.glob("drive*/*")) == []


def test_nothing_is_left_when_closing_with_work_in_flight(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 48 * PAGE)
    with filled(pool, 48 * PAGE, 1) as lease:
        tickets = [store.submit_write("a", lease.memory, tag=TAG) for _ in range(10)]
        store.close()
        assert all(ticket.done for ticket in tickets)
        assert all(isinstance(ticket.exception, ClosedError | None) for ticket in tickets)


def test_too_little_space_says_need_and_have(open_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(SwapFullError, match=r"needs \d+ bytes and a margin of 0, but only \d+ bytes are free"):
        open_store("auto", drives=2, capacity_nbytes=1 << 60)
    assert list(tmp_path.glob("drive*/*")) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot hold swap files"):
        ShardStore.open([tmp_path / "file"], PAGE)


def test_a_wrapper_that_fails_leaves_nothing(open_store: MakeStore, tmp_path: Path) -> None:
    def broken(backend: Backend) -> Backend:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        open_store("auto", wrap_backend=broken)
    assert list(tmp_path.glob("drive*/*")) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fast"}, "engine is 'fast'; it must be one of auto, direct, buffered"),
        ({"block_nbytes": 0}, "block_nbytes is 0"),
        ({"block_nbytes": 4097}, "block_nbytes is 4097"),
        ({"threads": 0}, "threads is 0"),
        ({"free_margin_nbytes": -1}, "free_margin_nbytes is -1"),
        ({"checksum": "md5"}, "checksum is 'md5'; it must be one of xxh3, none"),
        ({"eio_retries": -1}, "eio_retries is -1"),
    ],
)
def test_options_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StorageOptions(**settings)  # type: ignore[arg-type]


def test_open_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one directory"):
        ShardStore.open([], PAGE)
    with pytest.raises(ValueError, match="-1 bytes"):
        ShardStore.open([tmp_path], -1)


def test_a_swap_file_that_somebody_cut(open_store: MakeStore, kind: str, pool: HostPool) -> None:
    store = open_store(kind)
    store.create("a", 4 * PAGE)
    with filled(pool, 4 * PAGE, 1) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        os.truncate(store._drives[0].file.path, PAGE)
        error = failure(store.submit_read("a", lease.memory, tag=TAG))
        assert isinstance(error, ShortIoError)
        assert (error.offset, error.nbytes, error.key) == (PAGE, 3 * PAGE, "a")


def test_descriptors_and_threads_do_not_grow_with_use(store: ShardStore, pool: HostPool) -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def turn() -> None:
        with pool.lease(32 * PAGE, "x") as lease:
            for number in range(8):
                key = str(number)
                store.create(key, 4 * PAGE)
                store.submit_write(key, lease.memory[number * 4 * PAGE :][: 4 * PAGE], tag=TAG)
            assert store.drain(WAIT_S)
            for number in range(8):
                store.delete(str(number))

    for _ in range(5):
        turn()  # until every worker of the buffered backend has its file open
    before = used()
    for _ in range(10):
        turn()
    descriptors, threads = used()
    assert descriptors <= before[0] + store_workers(store)
    assert threads <= before[1] + store_workers(store)


def store_workers(store: ShardStore) -> int:
    """How many workers may still open their first file: the buffered backend makes threads when it needs them."""
    return 0 if store.engine_name.startswith("direct") else 3


def test_one_descriptor_per_swap_file(open_store: MakeStore, can_direct: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = open_store("direct", drives=2)
    assert len(os.listdir("/proc/self/fd")) - before == 2 * 2  # swap file and lock
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_in_memory(pool: HostPool) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm that can be written to")
    with TemporaryDirectory(dir="/dev/shm") as folder:
        store = ShardStore.open([Path(folder)], MIB, options=StorageOptions(free_margin_nbytes=0))
        store.create("a", MIB)
        with filled(pool, MIB, 1) as source, pool.lease(MIB, "target") as target:
            finish(store.submit_write("a", source.memory, tag=TAG))
            finish(store.submit_read("a", target.memory, tag=TAG))
            assert target.memory == source.memory
        store.close()
        assert os.listdir(folder) == []


def test_the_engine_is_named_with_its_reason(open_store: MakeStore, tmp_path: Path) -> None:
    assert open_store("buffered").engine_name == f"buffered (asked for) in {tmp_path / 'drive0'}"


@pytest.mark.usefixtures("can_direct")
def test_auto_chooses_direct_and_says_so(open_store: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="storage"):
        assert open_store("auto").engine_name.startswith("direct (O_DIRECT works here) in ")
    assert len([record for record in caplog.records if "direct" in record.getMessage()]) == 1


def _hold(held: list[HeldBackend], kind: type[HeldBackend] = HeldBackend):  # type: ignore[no-untyped-def]
    def wrap(backend: Backend) -> Backend:
        held.append(kind(backend))
        return held[-1]

    return wrap


def test_no_memory_for_what_is_read_back_fails_the_transfer_and_no_other(
    open_store: MakeStore, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[HeldBackend] = []

    def wrap(backend: Backend) -> Backend:
        backends.append(HeldBackend(backend))
        return backends[-1]

    def refuse(fileno: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    store = open_store(wrap_backend=wrap)
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as written, pool.lease(8 * PAGE, "read") as read:
        write = store.submit_write("a", written.memory, tag=TAG)
        behind = store.submit_read("a", read.memory[:PAGE], offset=PAGE, tag=TAG)  # the rest of its block is needed
        monkeypatch.setattr(transfer, "mmap", SimpleNamespace(mmap=refuse))
        backends[0].let_go()
        finish(write)
        assert isinstance(failure(behind), OSError)
        at_once = store.submit_read("a", read.memory[:PAGE], offset=PAGE, tag=TAG)
        assert isinstance(failure(at_once), OSError)
        monkeypatch.undo()
        whole = store.submit_read("a", read.memory, tag=TAG)
        backends[0].let_go()
        finish(whole)
        assert read.memory == written.memory
    assert store.drain(0.0)
