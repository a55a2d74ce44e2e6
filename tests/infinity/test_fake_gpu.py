"""The fake GPU moves real bytes, within its capacity, in modelled time, and logs all of it."""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.errors import DeviceOutOfMemoryError
from infinity.testing import (
    CopyOp,
    FakeGpu,
    FakeRegion,
    VirtualClock,
    VirtualTimeLoop,
    run_virtual,
)
from infinity.testing.fake_pages import PAGE_NBYTES
from tests.leaks import open_files

PAGE = PAGE_NBYTES


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    with FakeGpu(tmp_path / "gpu", 16 * PAGE, clock=VirtualClock()) as gpu:
        yield gpu


def pattern(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray((7 * i + seed) % 251 for i in range(nbytes))


def copies(gpu: FakeGpu) -> list[tuple[CopyOp, str, float, float]]:
    kinds = (CopyOp.UPLOAD, CopyOp.DOWNLOAD)
    return [(entry.op, entry.label, entry.start_s, entry.end_s) for entry in gpu.log if entry.op in kinds]


# Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 12289])
def test_bytes_come_back(gpu: FakeGpu, nbytes: int) -> None:
    region, source, target = gpu.allocate(nbytes, "unit"), pattern(nbytes), bytearray(nbytes)
    gpu.upload(region, memoryview(source))
    gpu.download(region, memoryview(target))
    assert source == target == gpu.read(region)


def test_bytes_are_in_the_file(tmp_path: Path) -> None:
    with FakeGpu(tmp_path / "gpu", "64KiB") as gpu:
        assert os.stat(gpu.path).st_size == 64 * 1024
        gpu.allocate(PAGE, "first")
        gpu.upload(gpu.allocate(10, "second"), memoryview(b"0123456789"))
        assert gpu.path.read_bytes()[PAGE : PAGE + 10] == b"0123456789"
    assert list(tmp_path.iterdir()) == []


def test_file_without_a_name_in_a_directory(tmp_path: Path) -> None:
    with FakeGpu(tmp_path, PAGE) as gpu:
        region = gpu.allocate(3, "unit")
        gpu.upload(region, memoryview(b"abc"))
        assert gpu.read(region) == b"abc"
        assert list(tmp_path.iterdir()) == []
    assert tmp_path.is_dir()


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="never overwrites") as caught:
        FakeGpu(tmp_path / "thesis.txt", PAGE)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_capacity_is_enforced(gpu: FakeGpu) -> None:
    gpu.allocate(10 * PAGE, "blocks.0")
    gpu.allocate(5 * PAGE + 1, "head")
    assert gpu.used_nbytes == 16 * PAGE
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        gpu.allocate(1, "blocks.1")
    for fact in ("blocks.1 needs 4096 bytes", "0 of 65536", "blocks.0 40 KiB", "head 24 KiB"):
        assert fact in str(caught.value)


def test_freed_memory_is_used_again_however_fragmented(gpu: FakeGpu) -> None:
    regions = [gpu.allocate(PAGE, f"unit{i}") for i in range(16)]
    for region in regions[::2]:
        gpu.free(region)
    scattered, source = gpu.allocate(8 * PAGE, "large"), pattern(8 * PAGE)
    gpu.upload(scattered, memoryview(source))
    assert len(scattered.spans) == 8
    assert gpu.read(scattered) == source
    assert gpu.read(scattered, 100, offset_nbytes=PAGE - 50) == source[PAGE - 50 : PAGE + 50]
    for region in (scattered, *regions):
        gpu.free(region)
    assert (gpu.used_nbytes, gpu.peak_nbytes) == (0, 16 * PAGE)
    assert len(gpu.allocate(16 * PAGE, "all").spans) == 1


def test_free_is_idempotent(gpu: FakeGpu) -> None:
    region = gpu.allocate(PAGE, "unit")
    gpu.free(region)
    gpu.free(region)
    assert gpu.used_nbytes == 0
    assert gpu.holders() == {}


def test_freed_memory_cannot_be_used(gpu: FakeGpu) -> None:
    region = gpu.allocate(PAGE, "blocks.3")
    gpu.free(region)
    with pytest.raises(RuntimeError, match=r"'blocks.3' was used after it was freed"):
        gpu.upload(region, memoryview(b"x"))
    with pytest.raises(RuntimeError, match="after it was freed"):
        gpu.read(region, 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (-1, 1), (60, 41)])
def test_copies_stay_in_their_region(gpu: FakeGpu, offset: int, nbytes: int) -> None:
    region = gpu.allocate(100, "unit")
    with pytest.raises(ValueError, match="do not lie in 'unit', which has 100"):
        gpu.upload(region, memoryview(bytes(nbytes)), offset_nbytes=offset)


def test_negative_region_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        gpu.allocate(-1, "unit")


def test_closed_device_says_so(tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path / "gpu", PAGE)
    region = gpu.allocate(1, "unit")
    gpu.close()
    gpu.close()
    with pytest.raises(RuntimeError, match="closed"):
        gpu.allocate(1, "unit")
    with pytest.raises(RuntimeError, match="closed"):
        gpu.upload(region, memoryview(b"x"))


def test_truncated_file_is_an_error_not_garbage(tmp_path: Path) -> None:
    with FakeGpu(tmp_path / "gpu", PAGE) as gpu:
        region = gpu.allocate(PAGE, "unit")
        os.truncate(gpu.path, 10)
        with pytest.raises(OSError, match="truncated"):
            gpu.read(region)


class Shadow:
    """What a device memory must do: regions keep their own bytes and never exceed the capacity."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.content: dict[FakeRegion, bytearray] = {}

    def apply(self, choice: int, size: int, offset: int) -> None:
        if choice == 0 or not self.content:
            blocks = sum(region.block_nbytes for region in self.content)
            try:
                region = self.gpu.allocate(size, f"r{len(self.content)}")
            except DeviceOutOfMemoryError:
                assert blocks + -(-size // PAGE) * PAGE > self.gpu.capacity_nbytes
                return
            self.gpu.write(region, memoryview(bytes(size)))
            self.content[region] = bytearray(size)
        else:
            region = list(self.content)[offset % len(self.content)]
            if choice == 1:
                del self.content[region]
                self.gpu.free(region)
            else:
                start = offset % (region.nbytes + 1)
                data = pattern(min(size, region.nbytes - start), seed=offset)
                self.gpu.upload(region, memoryview(data), offset_nbytes=start)
                self.content[region][start : start + len(data)] = data


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3 * PAGE), st.integers(0, 3 * PAGE)), max_size=25))
def test_regions_never_mix(tmp_path: Path, actions: list[tuple[int, int, int]]) -> None:
    with FakeGpu(tmp_path, 8 * PAGE, clock=VirtualClock()) as gpu:
        shadow = Shadow(gpu)
        for action in actions:
            shadow.apply(*action)
            for region, content in shadow.content.items():
                assert gpu.read(region) == content
            assert gpu.used_nbytes == sum(region.block_nbytes for region in shadow.content) <= gpu.capacity_nbytes


# Time ------------------------------------------------------------------------------------------------------------


def test_copies_take_modelled_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    with FakeGpu(tmp_path, 4 * PAGE, h2d_bytes_per_s=1000, d2h_bytes_per_s=500, latency_s=0.25, clock=clock) as gpu:
        region = gpu.allocate(1000, "unit")
        gpu.upload(region, memoryview(bytes(1000)), "param")
        assert clock.now_s() == 1.25
        gpu.download(region, memoryview(bytearray(1000)), "grad")
        assert clock.now_s() == 3.5
        assert copies(gpu) == [(CopyOp.UPLOAD, "param", 0.0, 1.25), (CopyOp.DOWNLOAD, "grad", 1.25, 3.5)]


def test_started_copies_queue_per_direction_and_overlap_between(tmp_path: Path) -> None:
    clock = VirtualClock()
    with FakeGpu(tmp_path, 4 * PAGE, h2d_bytes_per_s=100, d2h_bytes_per_s=100, clock=clock) as gpu:
        first, second = gpu.allocate(100, "first"), gpu.allocate(100, "second")
        entries = [
            gpu.start_upload(first, memoryview(bytes(100)), "up1"),
            gpu.start_download(second, memoryview(bytearray(100)), "down"),
            gpu.start_upload(second, memoryview(bytes(100)), "up2"),
        ]
        assert clock.now_s() == 0.0
        assert [(entry.start_s, entry.end_s) for entry in entries] == [(0.0, 1.0), (0.0, 1.0), (1.0, 2.0)]
        for entry in (*entries, entries[0]):
            gpu.wait_until(entry.end_s)
        assert clock.now_s() == 2.0


def test_log_holds_every_operation_in_order(gpu: FakeGpu) -> None:
    region = gpu.allocate(PAGE + 1, "unit")
    gpu.upload(region, memoryview(bytes(PAGE)), "param unit")
    gpu.download(region, memoryview(bytearray(10)), "grad unit", offset_nbytes=5)
    gpu.free(region)
    log = [(entry.order, entry.op, entry.label, entry.nbytes) for entry in gpu.log]
    assert log == [
        (0, CopyOp.ALLOCATE, "unit", PAGE + 1),
        (1, CopyOp.UPLOAD, "param unit", PAGE),
        (2, CopyOp.DOWNLOAD, "grad unit", 10),
        (3, CopyOp.FREE, "unit", PAGE + 1),
    ]


def test_the_log_of_a_long_run_keeps_the_newest_operations(tmp_path: Path) -> None:
    with FakeGpu(tmp_path / "gpu", PAGE, clock=VirtualClock(), most_logged=3) as gpu:
        region = gpu.allocate(PAGE, "unit")
        for number in range(5):
            gpu.upload(region, memoryview(bytes(number)), f"upload {number}")
        assert [(entry.order, entry.label) for entry in gpu.log] == [(n, f"upload {n - 1}") for n in (3, 4, 5)]


def test_many_threads(gpu: FakeGpu) -> None:
    failures = []

    def work(number: int) -> None:
        for turn in range(20):
            region, source = gpu.allocate(PAGE, f"thread{number}"), pattern(PAGE, seed=number + turn)
            target = bytearray(PAGE)
            gpu.upload(region, memoryview(source))
            gpu.download(region, memoryview(target))
            gpu.free(region)
            if source != target:
                failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert gpu.used_nbytes == 0
    assert [entry.order for entry in gpu.log] == list(range(8 * 20 * 4))


# The asyncio form --------------------------------------------------------------------------------------------------


def test_async_copies_overlap_only_between_directions(tmp_path: Path) -> None:
    async def main(gpu: FakeGpu) -> float:
        regions = [gpu.allocate(100, f"unit{i}") for i in range(3)]
        async with asyncio.TaskGroup() as group:
            group.create_task(gpu.upload_async(regions[0], memoryview(bytes(100)), "up0"))
            group.create_task(gpu.upload_async(regions[1], memoryview(bytes(100)), "up1"))
            group.create_task(gpu.download_async(regions[2], memoryview(bytearray(100)), "down2"))
        return asyncio.get_running_loop().time()

    with FakeGpu(tmp_path, 4 * PAGE, h2d_bytes_per_s=100, d2h_bytes_per_s=50) as gpu:
        assert run_virtual(main(gpu)) == 2.0
        assert copies(gpu) == [
            (CopyOp.UPLOAD, "up0", 0.0, 1.0),
            (CopyOp.UPLOAD, "up1", 1.0, 2.0),
            (CopyOp.DOWNLOAD, "down2", 0.0, 2.0),
        ]


def test_async_copy_reads_its_source_at_the_end(tmp_path: Path) -> None:
    """A host buffer that is given away too early is noticed: the device gets what lies there then."""

    async def main(gpu: FakeGpu) -> None:
        region, source = gpu.allocate(4, "unit"), bytearray(b"good")
        copy = asyncio.create_task(gpu.upload_async(region, memoryview(source)))
        await asyncio.sleep(0.5)
        source[:] = b"evil"
        await copy
        assert gpu.read(region) == b"evil"

    with FakeGpu(tmp_path, PAGE, h2d_bytes_per_s=4) as gpu:
        run_virtual(main(gpu))


def test_cancelled_copy_moves_nothing(tmp_path: Path) -> None:
    async def main(gpu: FakeGpu) -> None:
        region = gpu.allocate(4, "unit")
        gpu.write(region, memoryview(b"good"))
        copy = asyncio.create_task(gpu.upload_async(region, memoryview(b"evil"), "lost"))
        await asyncio.sleep(0.5)
        copy.cancel()
        await asyncio.wait([copy])
        assert gpu.read(region) == b"good"
        assert copies(gpu) == []
        gpu.free(region)

    with FakeGpu(tmp_path, PAGE, h2d_bytes_per_s=4) as gpu:
        run_virtual(main(gpu))


def test_memory_is_not_freed_under_a_copy(tmp_path: Path) -> None:
    async def main(gpu: FakeGpu) -> None:
        region = gpu.allocate(4, "blocks.1")
        copy = asyncio.create_task(gpu.upload_async(region, memoryview(b"good"), "param"))
        await asyncio.sleep(0.5)
        with pytest.raises(RuntimeError, match=r"blocks.1 was freed during its upload 'param'"):
            gpu.free(region)
        await copy
        gpu.free(region)

    with FakeGpu(tmp_path, PAGE, h2d_bytes_per_s=4) as gpu:
        run_virtual(main(gpu))


def test_copies_that_race_are_refused(tmp_path: Path) -> None:
    async def main(gpu: FakeGpu) -> None:
        region = gpu.allocate(8, "unit")
        copy = asyncio.create_task(gpu.upload_async(region, memoryview(b"1234"), "param"))
        await asyncio.sleep(0.5)
        await gpu.download_async(region, memoryview(bytearray(4)), "elsewhere", offset_nbytes=4)
        assert not copy.done()
        with pytest.raises(RuntimeError, match="download 'grad' races with upload 'param'"):
            await gpu.download_async(region, memoryview(bytearray(4)), "grad", offset_nbytes=3)
        await copy

    with FakeGpu(tmp_path, PAGE, h2d_bytes_per_s=4) as gpu:
        run_virtual(main(gpu))


def test_both_forms_share_a_virtual_clock(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        with FakeGpu(tmp_path, PAGE, h2d_bytes_per_s=4, clock=loop.clock) as gpu:
            region = gpu.allocate(4, "unit")
            await gpu.upload_async(region, memoryview(b"1234"))
            gpu.upload(region, memoryview(b"5678"))
            assert loop.time() == 2.0

    run_virtual(main())


def test_a_file_that_cannot_be_so_large_is_not_left_behind(tmp_path: Path) -> None:
    before = open_files()
    for path in (tmp_path / "gpu", tmp_path):
        with pytest.raises(OSError, match=r"File too large|Invalid argument|No space"):
            FakeGpu(path, (1 << 63) - 4096)
    assert open_files() == before
    assert not list(tmp_path.iterdir())
