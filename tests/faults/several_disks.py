"""Run by `test_several_disks_full` in a mount namespace of its own: stores over small file systems that fill up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from storage.errors import StorageError, SwapFullError
from storage.health import DriveState
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.versioned import VersionedStore
from tests.storage.helpers import MIB, TAG, filled, finish

_OPTIONS = StorageOptions(free_margin_nbytes=0, block_nbytes=MIB, threads=2, calibrate="off")


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("storage").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        # A file system in memory is told of as well.
        if "memory" not in record.getMessage():
            self.lines.append(record.getMessage())


def disk(folder: Path, nbytes: int) -> Path:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)], check=True)
    return folder


def fill(folder: Path, leave_nbytes: int = 0) -> Path:
    path = folder / "somebody else's"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(fd, 0, free - leave_nbytes)
    os.close(fd)
    return path


def write_and_read(store: ShardStore, pool: HostPool, keys: list[str], seed: int) -> None:
    leases = {key: filled(pool, store.nbytes_of(key), seed + number) for number, key in enumerate(keys)}
    for ticket in [store.submit_write(key, lease.memory, tag=TAG) for key, lease in leases.items()]:
        finish(ticket)
    for key, lease in leases.items():
        with pool.lease(len(lease.memory), "read") as target:
            finish(store.submit_read(key, target.memory, tag=TAG))
            assert target.memory == lease.memory
        lease.release()


def opening(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    fill(paths[1], leave_nbytes=4 * MIB)
    store = ShardStore.open(paths, 16 * MIB, options=_OPTIONS)
    (line,) = warnings.lines
    assert str(paths[1]) in line and "the other drives take what has no room there" in line, line
    sizes = [report.capacity_nbytes for report in store.drive_report()]
    assert sum(sizes) == 16 * MIB and 0 < sizes[1] < 4 * MIB, sizes
    for number in range(4):
        store.create(str(number), 4 * MIB)
    write_and_read(store, pool, store.keys(), 1)
    store.close()


def opening_completely_full(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    fill(paths[0])
    store = ShardStore.open(paths, 8 * MIB, options=_OPTIONS)
    assert any(str(paths[0]) in line for line in warnings.lines), warnings.lines
    assert store.drive_report()[-1].capacity_nbytes == 8 * MIB
    store.create("a", 8 * MIB)
    write_and_read(store, pool, ["a"], 1)
    store.close()


def growing(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    store = ShardStore.open(paths, 4 * MIB, options=_OPTIONS)
    store.create("first", 4 * MIB)
    others = fill(paths[1])
    for key in ("second", "third"):
        store.create(key, 4 * MIB)
    write_and_read(store, pool, ["first", "second", "third"], 1)
    (line,) = warnings.lines
    assert f"{paths[1]} takes no new bytes" in line, line
    assert [report.state for report in store.drive_report()] == [DriveState.OPEN, DriveState.CROWDED]
    assert [report.held_nbytes for report in store.drive_report()] == [10 * MIB, 2 * MIB]
    others.unlink()
    store.create("fourth", 4 * MIB)
    write_and_read(store, pool, store.keys(), 5)
    assert [report.held_nbytes for report in store.drive_report()] == [12 * MIB, 4 * MIB]
    assert [report.state for report in store.drive_report()] == [DriveState.OPEN, DriveState.OPEN]
    store.close()


def nowhere(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    store = ShardStore.open(paths, 4 * MIB, options=_OPTIONS)
    store.create("first", 4 * MIB)
    others = [fill(path, leave_nbytes=MIB) for path in paths]
    try:
        store.create("second", 4 * MIB)
    except SwapFullError as error:
        for word in (*(f"{path} has 0 of {2 * MIB} bytes free" for path in paths), f"only {MIB} bytes are free there"):
            assert word in str(error), error
    else:
        raise AssertionError("there was room")
    write_and_read(store, pool, ["first"], 1)
    others[0].unlink()
    store.create("second", 4 * MIB)
    write_and_read(store, pool, ["first", "second"], 2)
    store.close()
    try:
        ShardStore.open(paths, 64 * MIB, options=_OPTIONS)
    except SwapFullError as error:
        assert f"a swap space of {64 * MIB} bytes was asked for" in str(error), error
        assert all(str(path) in str(error) for path in paths), error
    else:
        raise AssertionError("there was room")
    assert [sorted(one.name for one in path.iterdir()) for path in paths] == [[], ["somebody else's"]]


def versioned(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    store = VersionedStore.open(paths, 4 * MIB, options=_OPTIONS)
    store.create("a", 4 * MIB)
    write_and_read(store, pool, ["a"], 1)
    store.commit(1)
    fill(paths[1], leave_nbytes=MIB)
    write_and_read(store, pool, ["a"], 2)  # the second copy goes where there is room
    store.commit(2)
    (line,) = warnings.lines
    assert f"{paths[1] / 'versioned-rank0'} takes no new bytes" in line, line
    store.close()
    store = VersionedStore.open(paths, 0, options=_OPTIONS)
    with filled(pool, 4 * MIB, 2) as expected, pool.lease(4 * MIB, "read") as target:
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == expected.memory
    store.close()


def versioned_completely_full(paths: list[Path], pool: HostPool, warnings: Warnings) -> None:
    """Nothing is left for the manifest in the middle of a run: the commit fails, and succeeds when there is room."""
    store = VersionedStore.open(paths[:1], 8 * MIB, options=_OPTIONS)
    store.create("a", 4 * MIB)
    write_and_read(store, pool, ["a"], 1)
    store.commit(1)
    others = fill(paths[0])
    write_and_read(store, pool, ["a"], 2)  # what was reserved can be written to
    notes = {"large": bytes(MIB)}
    try:
        store.commit(2, notes=notes)
    except StorageError as error:
        for word in ("generation 2 could not be committed", "disk", "full", "free space", "commit again"):
            assert word in str(error), error
    else:
        raise AssertionError("there was room")
    assert (store.generation, store.step) == (1, 1)
    others.unlink()
    assert store.commit(2, notes=notes) == 2
    store.close()
    store = VersionedStore.open(paths[:1], 0, options=_OPTIONS)
    assert (store.step, store.notes()) == (2, notes)
    with filled(pool, 4 * MIB, 2) as expected, pool.lease(4 * MIB, "read") as target:
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == expected.memory
    store.close()


def main(case: str, folder: Path) -> None:
    paths = [disk(folder / name, 32 * MIB) for name in ("a", "b")]
    pool = HostPool(256 * MIB)
    globals()[case](paths, pool, Warnings())
    pool.close(strict=True)
    print(f"{case} done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
