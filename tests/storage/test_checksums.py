"""Checksums of stored bytes: every damage is caught, whatever parts of a key are written and read."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.backends.direct import DirectBackend
from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.system import SystemCalls
from storage.checksums import BLOCK_NBYTES, KeyChecksums
from storage.errors import IntegrityError, ReadError
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op
from tests.storage.conftest import MakeStore
from tests.storage.helpers import PAGE, TAG, WAIT_S, HeldBackend, failure, filled, finish, request

_BLOCK_PAGES = BLOCK_NBYTES // PAGE
_PAGES = 2 * _BLOCK_PAGES + 5


def flip(store: ShardStore, key: str, offset: int, bit: int = 0) -> None:
    """Flip one bit of a key's bytes on disk, behind the store's back."""
    for piece in store._keys[key].pieces:
        if piece.start <= offset < piece.stop:
            fd = os.open(store._drives[piece.extent.drive].file.path, os.O_RDWR)
            try:
                place = piece.extent.offset + offset - piece.start
                (byte,) = os.pread(fd, 1, place)
                os.pwrite(fd, bytes([byte ^ 1 << bit]), place)
                os.fsync(fd)
            finally:
                os.close(fd)


@pytest.mark.parametrize("offset", [0, 4095, BLOCK_NBYTES - 1, BLOCK_NBYTES, _PAGES * PAGE - 1])
def test_one_flipped_bit_is_caught(store: ShardStore, pool: HostPool, offset: int) -> None:
    nbytes = _PAGES * PAGE
    store.create("blocks.3", nbytes)
    with filled(pool, nbytes, 1) as source, pool.lease(nbytes, "target") as target:
        finish(store.submit_write("blocks.3", source.memory, tag=TAG))
        flip(store, "blocks.3", offset, bit=offset % 8)
        error = failure(store.submit_read("blocks.3", target.memory, tag=TAG))
        assert isinstance(error, IntegrityError)
        number = offset // BLOCK_NBYTES
        block_nbytes = min(BLOCK_NBYTES, nbytes - number * BLOCK_NBYTES)
        assert (error.key, error.offset, error.nbytes) == ("blocks.3", number * BLOCK_NBYTES, block_nbytes)
        page = offset // PAGE * PAGE
        error = failure(store.submit_read("blocks.3", target.memory[:PAGE], offset=page, tag=TAG))
        assert isinstance(error, IntegrityError)
        assert f"{block_nbytes} bytes at {number * BLOCK_NBYTES} of 'blocks.3' (generation 1)" in str(error)
        # The memory holds what was read, the file what it held, and the rest of the key can be read.
        different = source.array("u1")[page : page + PAGE] ^ target.array("u1")[:PAGE]
        assert sorted(set(different.tolist())) == [0, 1 << offset % 8]
        other = (number + 1) % 2 * BLOCK_NBYTES
        finish(store.submit_read("blocks.3", target.memory[:PAGE], offset=other, tag=TAG))


def test_without_checksums_nothing_is_noticed(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store(options={"checksum": "none"})
    store.create("a", PAGE)
    with filled(pool, PAGE, 1) as source, pool.lease(PAGE, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        flip(store, "a", 100)
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory != source.memory


def test_what_was_never_written_is_not_verified(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        finish(store.submit_read("a", lease.memory, tag=TAG))
        finish(store.submit_write("a", lease.memory[:PAGE], offset=2 * PAGE, tag=TAG))
        flip(store, "a", 3 * PAGE)
        finish(store.submit_read("a", lease.memory, tag=TAG))


def test_damage_beside_a_partial_write_is_still_caught(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        flip(store, "a", 7 * PAGE)
        finish(store.submit_write("a", lease.memory[:PAGE], offset=2 * PAGE, tag=TAG))
        finish(store.submit_read("a", lease.memory[:PAGE], offset=2 * PAGE, tag=TAG))
        assert isinstance(failure(store.submit_read("a", lease.memory[:PAGE], tag=TAG)), IntegrityError)
        assert isinstance(failure(store.submit_read("a", lease.memory, tag=TAG)), IntegrityError)
        finish(store.submit_write("a", lease.memory, tag=TAG))
        finish(store.submit_read("a", lease.memory, tag=TAG))


def test_damage_after_a_partial_write_is_caught(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        finish(store.submit_write("a", lease.memory[:PAGE], offset=2 * PAGE, tag=TAG))
        finish(store.submit_read("a", lease.memory, tag=TAG))
        for page in range(8):
            flip(store, "a", page * PAGE)
            error = failure(store.submit_read("a", lease.memory[:PAGE], offset=page * PAGE, tag=TAG))
            assert isinstance(error, IntegrityError)
            flip(store, "a", page * PAGE)
        finish(store.submit_read("a", lease.memory, tag=TAG))


def test_keys_over_several_drives(open_store: MakeStore, pool: HostPool) -> None:
    nbytes = (1 << 22) + 3 * PAGE
    store = open_store(drives=3, capacity_nbytes=nbytes)
    store.create("a", nbytes)
    with filled(pool, nbytes, 1) as source, pool.lease(nbytes, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        for piece in store._keys["a"].pieces:
            for offset in (piece.start, piece.stop - 1):
                finish(store.submit_read("a", target.memory, tag=TAG))
                flip(store, "a", offset)
                assert isinstance(failure(store.submit_read("a", target.memory, tag=TAG)), IntegrityError)
                part = offset // PAGE * PAGE
                error = failure(store.submit_read("a", target.memory[:PAGE], offset=part, tag=TAG))
                assert isinstance(error, IntegrityError)
                flip(store, "a", offset)


def test_an_operation_waits_for_those_that_share_the_spans_it_cuts(open_store: MakeStore, pool: HostPool) -> None:
    held: list[HeldBackend] = []

    def wrap(backend: object) -> HeldBackend:
        held.append(HeldBackend(backend))  # type: ignore[arg-type]
        return held[-1]

    store = open_store(wrap_backend=wrap)
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        whole = store.submit_write("a", lease.memory, tag=TAG)
        held[0].let_go()
        finish(whole)
        first = store.submit_write("a", lease.memory[:PAGE], tag=TAG)
        second = store.submit_write("a", lease.memory[PAGE : 2 * PAGE], offset=PAGE, tag=TAG)
        assert [(one.op, len(one.memory)) for one in held[0].held] == [(Op.READ, 8 * PAGE)]
        for count in (1, 1, 1, 1):
            held[0].wait_for(count)
            held[0].let_go()
        finish(first)
        finish(second)
        # Now every part has its own digest: nothing is read back, and nobody waits for the other.
        store.submit_write("a", lease.memory[:PAGE], tag=TAG)
        store.submit_write("a", lease.memory[PAGE : 2 * PAGE], offset=PAGE, tag=TAG)
        assert [one.op for one in held[0].held] == [Op.WRITE, Op.WRITE]
        held[0].let_go()
        held[0].let_go()
        assert store.drain(WAIT_S)


def test_what_is_read_back_is_counted(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store()
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        for _ in range(3):  # only the first one cuts anything
            finish(store.submit_write("a", lease.memory[: 2 * PAGE], offset=3 * PAGE, tag=TAG))
            finish(store.submit_read("a", lease.memory[: 3 * PAGE], tag=TAG))
    counted = store.stats.total(Op.READ, kind="checksum")
    assert (counted.moved_nbytes, counted.payload_nbytes) == (8 * PAGE, 0)
    assert store.stats.total(Op.READ, kind=TAG.kind).moved_nbytes == 9 * PAGE


def test_a_span_that_cannot_be_read_back(open_store: MakeStore, pool: HostPool) -> None:
    faults: list[FaultyBackend] = []

    def wrap(backend: object) -> FaultyBackend:
        faults.append(FaultyBackend(backend))  # type: ignore[arg-type]
        return faults[-1]

    store = open_store(wrap_backend=wrap)
    store.create("a", 8 * PAGE)
    with filled(pool, 8 * PAGE, 1) as lease:
        finish(store.submit_write("a", lease.memory, tag=TAG))
        faults[0].inject(Fault.IO_ERROR, op=Op.READ)
        finish(store.submit_write("a", lease.memory[:PAGE], tag=TAG))
        finish(store.submit_read("a", lease.memory[:PAGE], tag=TAG))
        assert isinstance(failure(store.submit_read("a", lease.memory, tag=TAG)), ReadError)
        finish(store.submit_write("a", lease.memory, tag=TAG))
        finish(store.submit_read("a", lease.memory, tag=TAG))


_SPANS = st.tuples(st.integers(0, _PAGES - 1), st.integers(1, _PAGES), st.booleans())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(_SPANS, min_size=1, max_size=12), damaged=st.integers(0, _PAGES * PAGE - 1))
def test_any_writes_and_reads_then_one_bit(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, bool]], damaged: int
) -> None:
    options = StorageOptions(block_nbytes=48 * PAGE, threads=3, free_margin_nbytes=0)
    store = ShardStore.open([tmp_path_factory.mktemp("drive")], _PAGES * PAGE, options=options)
    pool = HostPool(64 << 20)
    try:
        store.create("a", _PAGES * PAGE)
        written = [0] * _PAGES
        leases = []
        for number, (first, count, is_write) in enumerate(spans, start=1):
            stop = min(first + count, _PAGES)
            leases.append(filled(pool, (stop - first) * PAGE, number))
            submit = store.submit_write if is_write else store.submit_read
            submit("a", leases[-1].memory, offset=first * PAGE, tag=TAG)
            if is_write:
                written[first:stop] = [number] * (stop - first)
        assert store.drain(WAIT_S)
        assert store.describe_in_flight() == []
        with pool.lease(_PAGES * PAGE, "all") as target:
            finish(store.submit_read("a", target.memory, tag=TAG))
            flip(store, "a", damaged)
            page = damaged // PAGE
            for memory, offset in ((target.memory, 0), (target.memory[:PAGE], page * PAGE)):
                ticket = store.submit_read("a", memory, offset=offset, tag=TAG)
                assert ticket.wait(WAIT_S)
                assert isinstance(ticket.exception, IntegrityError) == bool(written[page])
        for lease in leases:
            lease.release()
    finally:
        store.close()
        pool.close()


def test_a_key_without_writes_takes_little_memory() -> None:
    checksums = KeyChecksums("a", 1 << 30)
    assert len(checksums.digests) * 8 + len(checksums.states) < (1 << 30) / 25_000


@pytest.mark.parametrize(("failures", "retries"), [(0, 0), (1, 1), (2, 2), (1, 0), (3, 2)])
@pytest.mark.parametrize("op", list(Op))
def test_eio_is_tried_again_a_few_times(tmp_path: Path, pool: HostPool, op: Op, failures: int, retries: int) -> None:
    calls = 0

    def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls <= failures:
            raise OSError(errno.EIO, "")
        return len(buffers[0])

    backend = DirectBackend(threads=1, block_nbytes=PAGE, calls=SystemCalls(call, call), eio_retries=retries)
    try:
        with pool.lease(PAGE, "x") as lease:
            one = request(op, lease.memory)
            backend.submit(one)
            if failures <= retries:
                finish(one.ticket)
            else:
                error = failure(one.ticket)
                assert isinstance(error, OSError)
                assert error.errno == errno.EIO
            assert calls == min(failures, retries) + 1
    finally:
        backend.close()
