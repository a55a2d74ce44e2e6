"""Parts that come out of swap files: which digests are taken from the store, and what is read back instead."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity.checkpoint.block_rows import Joined, rows_of
from infinity.checkpoint.format import DamagedCheckpointError, FileEntry
from infinity.checkpoint.pace import SHARE, Pace
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.part_reader import PartFileReader
from infinity.checkpoint.shard_file import MemorySource, Part, ShardFile, StoredRun, StoredSource
from infinity.checkpoint.tensor_file import TensorSpan
from infinity.errors import CheckpointError
from storage.checksums import BLOCK_NBYTES
from storage.copying import CopyMethod, RangeCopier
from storage.drives import StorageOptions
from storage.errors import IntegrityError
from storage.held import HeldKeys
from storage.pool import HostPool
from storage.store import ShardStore
from tests.mounts import mounting
from tests.storage.helpers import PAGE, TAG, filled, finish

_BLOCK_PAGES = BLOCK_NBYTES // PAGE
PAGES = 5 * _BLOCK_PAGES + 3


class Sharing(RangeCopier):
    """Says that it has shared what it copies: what file systems with shared blocks do, where there is none."""

    def copy(self, source: int, offset: int, target: int, target_offset: int, nbytes: int) -> CopyMethod:
        super().copy(source, offset, target, target_offset, nbytes)
        return CopyMethod.REFLINK


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(2 * PAGES * PAGE)
    yield made
    made.close()


def stored(folder: Path, pool: HostPool, writes: list[tuple[int, int]], checksum: str = "xxh3") -> ShardStore:
    """A store with a key that was written in parts: (first page, pages)."""
    options = StorageOptions(checksum=checksum, free_margin_nbytes=0)
    store = ShardStore.open([folder], PAGES * PAGE, options=options)
    store.create("key", PAGES * PAGE)
    for seed, (first, count) in enumerate(writes):
        with filled(pool, count * PAGE, seed) as lease:
            finish(store.submit_write("key", lease.memory, offset=first * PAGE, tag=TAG))
    return store


def bytes_in(held: HeldKeys, start: int, stop: int) -> bytes:
    return b"".join(os.pread(held.fds[d], size, at) for d, at, _, size in held.keys["key"].ranges(start, stop))


def flip_in(store: ShardStore, start: int) -> None:
    """Flip a bit of a byte of the key, on the drive."""
    with store.hold(["key"]) as held:
        ((drive, at, _, _),) = held.keys["key"].ranges(start, start + 1)
        path = store.drive_report()[drive].directory
    (swap,) = Path(path).glob("infinity-*/*.swap")
    fd = os.open(swap, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


def copied(
    path: Path, store: ShardStore, pages: list[int], first_page: int = 0, copier: RangeCopier | None = None
) -> tuple[PartFileWriter, FileEntry, bytes]:
    """Parts of so many pages, out of the key from a page on, in a file; and what they have to be."""
    parts = {f"part{number}": (torch.uint8, (count * PAGE,)) for number, count in enumerate(pages)}
    lead_nbytes = BLOCK_NBYTES - first_page * PAGE % BLOCK_NBYTES
    writer = PartFileWriter(path, parts, [Joined(tuple(parts), lead_nbytes)])
    with store.hold(["key"]) as held:
        expected = bytes_in(held, first_page * PAGE, (first_page + sum(pages)) * PAGE)
        writer.copy("part0", held, "key", first_page * PAGE, copier or Sharing(), Pace())
    writer.read_back(Pace())
    return writer, writer.finish(), expected


def check_reads(path: Path, entry: FileEntry, pages: list[int], expected: bytes) -> None:
    with PartFileReader(path, entry) as reader:
        assert reader.verify() == len(expected)
        choose = random.Random(1)
        start = 0
        for number, count in enumerate(pages):
            content = expected[start : start + count * PAGE]
            for _ in range(5):
                first = choose.randrange(len(content))
                into = torch.empty(choose.randint(1, len(content) - first), dtype=torch.uint8)
                reader.read(f"part{number}", first, into)
                assert into.numpy().tobytes() == content[first : first + into.numel()]
            start += count * PAGE


@pytest.mark.parametrize("seed", range(6))
def test_digests_of_the_store_are_those_of_the_bytes(tmp_path: Path, pool: HostPool, seed: int) -> None:
    """Whatever was written in parts, wherever the parts begin: what is known is taken, only the rest is read."""
    choose = random.Random(seed)
    writes = [(0, PAGES)]
    for _ in range(seed):
        first = choose.randrange(PAGES)
        writes.append((first, choose.randint(1, PAGES - first)))
    store = stored(tmp_path, pool, writes)
    first_page = choose.choice([0, 0, _BLOCK_PAGES, choose.randrange(1, 2 * _BLOCK_PAGES)])
    pages = [choose.randint(1, _BLOCK_PAGES), choose.randint(1, 2 * _BLOCK_PAGES), choose.randint(1, _BLOCK_PAGES)]
    if seed == 1:
        pages[-1] = PAGES - first_page - sum(pages[:-1])  # to the end of the key
    writer, entry, expected = copied(tmp_path / "file", store, pages, first_page)
    check_reads(tmp_path / "file", entry, pages, expected)
    start, stop = first_page * PAGE, first_page * PAGE + len(expected)
    unknown = 0
    with store.hold(["key"]) as held:
        for number in range(start // BLOCK_NBYTES, -(-stop // BLOCK_NBYTES)):
            first, last = number * BLOCK_NBYTES, min((number + 1) * BLOCK_NBYTES, PAGES * PAGE)
            inside = min(last, stop) - max(first, start)
            if inside < last - first or held.keys["key"].digest_of(number) is None:
                unknown += inside
    assert writer.read_back_nbytes == unknown
    assert seed or unknown < len(expected)
    store.close()


def test_whole_keys_are_shared_without_a_read(tmp_path: Path, pool: HostPool) -> None:
    """Fields of a record that begin anywhere in its blocks, and its end, which fills no block."""
    store = stored(tmp_path, pool, [(0, PAGES)])
    pages = [70, 71, PAGES - 141]
    writer, entry, expected = copied(tmp_path / "file", store, pages)
    assert writer.read_back_nbytes == 0
    check_reads(tmp_path / "file", entry, pages, expected)
    store.close()


@pytest.mark.parametrize(("checksum", "copier"), [("none", Sharing()), ("xxh3", RangeCopier(()))])
def test_what_is_not_known_or_not_shared_is_read_back(
    tmp_path: Path, pool: HostPool, checksum: str, copier: RangeCopier
) -> None:
    store = stored(tmp_path, pool, [(0, PAGES)], checksum)
    writer, entry, expected = copied(tmp_path / "file", store, [PAGES], copier=copier)
    assert writer.read_back_nbytes == PAGES * PAGE
    check_reads(tmp_path / "file", entry, [PAGES], expected)
    store.close()


def test_damage_in_what_is_copied_ends_the_copy(tmp_path: Path, pool: HostPool) -> None:
    store = stored(tmp_path, pool, [(0, PAGES)])
    flip_in(store, BLOCK_NBYTES + 5)
    with pytest.raises(IntegrityError, match=f"{BLOCK_NBYTES} bytes at {BLOCK_NBYTES} of 'key', copied to .*checksums"):
        copied(tmp_path / "file", store, [PAGES], copier=RangeCopier(()))
    store.close()


def test_damage_in_what_is_shared_is_found_by_whoever_reads_it(tmp_path: Path, pool: HostPool) -> None:
    """The checkpoint has the digests of what was written, so damage of before can never pass for the state."""
    store = stored(tmp_path, pool, [(0, PAGES)])
    flip_in(store, BLOCK_NBYTES + 5)
    _, entry, _ = copied(tmp_path / "file", store, [70, PAGES - 70])
    where = (
        rf"bytes {BLOCK_NBYTES - 70 * PAGE} to .*" if BLOCK_NBYTES > 70 * PAGE else ".* of 'part0' and bytes 0 to .*"
    )
    with PartFileReader(tmp_path / "file", entry) as reader:
        with pytest.raises(DamagedCheckpointError, match=where + "of 'part1' have the wrong checksum"):
            reader.verify()
        reader.read("part0", 0, torch.empty(BLOCK_NBYTES, dtype=torch.uint8))
    with filled(pool, PAGES * PAGE, 9) as lease, pytest.raises(IntegrityError):
        finish(store.submit_read("key", lease.memory, tag=TAG))
    store.close()


def test_damage_in_a_block_of_several_writes_is_found_when_it_is_read_back(tmp_path: Path, pool: HostPool) -> None:
    """No digest is that of the block, but each write has one."""
    store = stored(tmp_path, pool, [(0, PAGES), (10, 3)])
    flip_in(store, 11 * PAGE + 7)
    with pytest.raises(IntegrityError, match=f"{BLOCK_NBYTES} bytes at 0 of 'key'"):
        copied(tmp_path / "file", store, [PAGES])
    store.close()


def test_blocks_that_are_really_shared(tmp_path: Path, pool: HostPool) -> None:
    """What is written to the swap file afterwards is not in the checkpoint, which is read after the hold has ended."""
    with mounting(tmp_path) as make:
        point = make("xfs")
        store = stored(point / "swap", pool, [(0, PAGES), (3, 5)])
        copier = RangeCopier()
        writer = PartFileWriter(point / "file", {"a": (torch.uint8, (PAGES * PAGE,))}, [Joined(("a",))])
        with store.hold(["key"]) as held:
            expected = bytes_in(held, 0, PAGES * PAGE)
            assert writer.copy("a", held, "key", 0, copier, Pace())
        assert copier.nbytes == {CopyMethod.REFLINK: PAGES * PAGE}
        with filled(pool, PAGES * PAGE, 77) as lease:
            finish(store.submit_write("key", lease.memory, tag=TAG))
        writer.read_back(Pace())
        assert writer.read_back_nbytes == BLOCK_NBYTES
        with PartFileReader(point / "file", writer.finish()) as reader:
            assert reader.verify() == PAGES * PAGE
            into = torch.empty(PAGES * PAGE, dtype=torch.uint8)
            reader.read("a", 0, into)
            assert into.numpy().tobytes() == expected
        store.close()


def test_a_file_whose_shared_blocks_were_not_read_cannot_be_finished(tmp_path: Path, pool: HostPool) -> None:
    store = stored(tmp_path, pool, [(0, PAGES), (3, 5)])
    writer = PartFileWriter(tmp_path / "file", {"a": (torch.uint8, (PAGES * PAGE,))}, [Joined(("a",))])
    with store.hold(["key"]) as held:
        writer.copy("a", held, "key", 0, Sharing(), Pace())
    with pytest.raises(CheckpointError, match="was not written"):
        writer.finish()
    store.close()


def test_rows_that_cannot_be_are_refused() -> None:
    spans = {"a": TensorSpan(torch.uint8, (PAGE,), 0), "b": TensorSpan(torch.uint8, (PAGE,), 2 * PAGE)}
    with pytest.raises(ValueError, match="'a', 'b' do not lie behind one another"):
        rows_of(spans, [Joined(("a", "b"))])
    for joined in (Joined(("a", "c")), Joined(()), Joined(("a",), 0), Joined(("a",), BLOCK_NBYTES + 1)):
        with pytest.raises(ValueError, match="there is no row of"):
            rows_of(spans, [joined])


def test_parts_are_joined_as_they_lie_in_their_keys() -> None:
    memory = MemorySource("lease", memoryview(bytes(PAGE)))
    sources: list[StoredSource | MemorySource] = [
        *(StoredSource("one", PAGE), StoredSource("one", 2 * PAGE)),
        *(memory, StoredSource("one", 3 * PAGE)),
        *(StoredSource("two", 4 * PAGE), StoredSource("two", 6 * PAGE)),
    ]
    parts = [Part(str(number), torch.uint8, PAGE, source) for number, source in enumerate(sources)]
    runs = ShardFile("file", parts, dict).stored_runs()
    assert [(run.joined, run.source) for run in runs] == [
        (Joined(("0", "1"), BLOCK_NBYTES - PAGE), sources[0]),
        (Joined(("3",), BLOCK_NBYTES - 3 * PAGE), sources[3]),
        (Joined(("4",), BLOCK_NBYTES - 4 * PAGE), sources[4]),
        (Joined(("5",), BLOCK_NBYTES - 6 * PAGE), sources[5]),
    ]
    assert StoredRun.of(parts[:1]).joined == Joined(("0",), BLOCK_NBYTES - PAGE)


def test_rests_are_in_proportion_and_end_when_somebody_waits() -> None:
    now_s, worked = 0.0, []
    pace = Pace(lambda: worked.append(1), lambda: now_s)
    pace.begin()
    pace.rest()  # no time has passed: nothing to rest from
    assert (pace.rests, len(worked)) == (1, 1)
    now_s = 1000.0  # of work: the rest would last for most of an hour
    hurrying = threading.Timer(0.05, pace.hurry)
    hurrying.start()
    pace.rest()
    hurrying.join()
    now_s = 5000.0
    pace.rest()
    assert (pace.rests, len(worked)) == (2, 3)
    assert SHARE > 1
