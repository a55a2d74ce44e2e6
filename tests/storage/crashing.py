"""The program that the crash tests kill: opens a versioned store, writes a generation, and dies where it is told to.

    python crashing.py FOLDER STEP POINT

STEP is the generation to write over what is there. POINT counts: the process kills itself (SIGKILL) at that one of its
points, which are every operation of the workload and every step of the commit. It prints each point as it reaches it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from storage.pool import HostPool
from storage.versioned import VersionedStore
from tests.storage.helpers import TAG, filled, finish
from tests.storage.versions import change_speeds, open_versioned, put

PAGES = {"whole": 9, "part": 70, "spread": 1056, "same": 3}
KEPT = ("same",)


def seed(key: str, step: int) -> int:
    return 1000 * step + len(key)


def write_first(store: VersionedStore, pool: HostPool) -> None:
    """Generation 1."""
    for key, pages in PAGES.items():
        store.create(key, pages * 4096, "float32")
        put(store, pool, key, seed(key, 1), pages)
    store.create("old", 4096)
    put(store, pool, "old", 1, 1)
    store.commit(1)


def main(folder: str, last_point: str) -> None:
    count = 0

    def point(name: str) -> None:
        nonlocal count
        print(name, flush=True)
        if count == int(last_point):
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    store = open_versioned(Path(folder), drives=2, capacity_nbytes=8 << 20, on_commit_point=point)
    change_speeds(store, 10, 30)  # since generation 1, which lies on both drives alike: what is written moves
    pool = HostPool(64 << 20)
    point("opened")
    for key, pages in PAGES.items():
        if key not in KEPT:
            first = 5 if key == "part" else 0
            put(store, pool, key, seed(key, 2), pages - first, first)
            point(f"written {key}")
    with filled(pool, PAGES["whole"] * 4096, seed("whole", 2)) as lease:
        ticket = store.submit_write("whole", lease.memory, tag=TAG)
        point("in flight")
        finish(ticket)
    store.delete("old")
    store.create("new", 2 * 4096)
    put(store, pool, "new", 2, 2)
    point("made")
    store.commit(2)
    point("returned")
    put(store, pool, "whole", seed("whole", 3), PAGES["whole"])
    point("written after it")
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
