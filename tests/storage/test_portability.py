"""Systems without what only Linux has: everything can be imported, and a store works through the page cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What Python lacks on macOS, and preadv, which it lacks on older ones.
_PROGRAM = """
import ctypes, mmap, os, sys
for name in ("O_DIRECT", "preadv", "pwritev", "posix_fallocate", "posix_fadvise", "fdatasync", "sched_getaffinity"):
    delattr(os, name)
for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
from pathlib import Path
from storage import filesystems, statx
filesystems._MOUNTINFO = Path("/nonexistent")
statx.ctypes.CDLL = lambda *names, **more: object()  # a C library without statx
from storage.backends.probe import probe_direct
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import TrafficTag
from storage.versioned import VersionedStore
import infinity.bench.target, infinity.bench.machine, infinity.doctor.directories

folder = Path(sys.argv[1])
assert probe_direct(folder) == "this system has no O_DIRECT"
assert infinity.bench.machine.describe_machine()["cores"]
options = StorageOptions(free_margin_nbytes=0)
with HostPool(1 << 20).lease(8192, "x") as lease:
    lease.memory[:] = bytes(range(256)) * 32
    for store in (
        ShardStore.open([folder / "scratch"], 1 << 20, options=options),
        VersionedStore.open([folder / "kept"], 1 << 20, options=options),
    ):
        store.create("key", 8192)
        for ticket in (
            store.submit_write("key", lease.memory, tag=TrafficTag("x", 0)),
            store.submit_read("key", lease.memory, tag=TrafficTag("x", 0)),
        ):
            assert ticket.wait(100)
            ticket.result()
        assert bytes(lease.memory) == bytes(range(256)) * 32
        if isinstance(store, VersionedStore):
            store.commit(0)
        print(store.engine_name.split(" in ")[0])
        store.close()
with infinity.bench.target.open_target(folder, 64 << 20) as target:
    target.sync()
    target.drop_cache()
"""


def test_without_linux(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["buffered (this system has no O_DIRECT)"] * 2
