"""A process killed (SIGKILL) at every operation and at every step of a commit: the old generation, or the new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from storage.pool import HostPool
from tests.storage import crashing
from tests.storage.helpers import MIB, PAGE, pattern
from tests.storage.several import by_drive
from tests.storage.versions import check_extents, get, open_versioned, put

_ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, point: int) -> tuple[int, list[str]]:
    """Its exit status, and the points it reached."""
    command = [sys.executable, "-m", "tests.storage.crashing", str(folder), str(point)]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert "Error" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout.split("\n")[:-1]


def contents(step: int) -> dict[str, bytes]:
    """What the keys hold in generation 1 or 2."""
    found = {}
    for key, pages in crashing.PAGES.items():
        data = bytearray(pattern(pages * PAGE, crashing.seed(key, 1)).tobytes())
        if step == 2 and key not in crashing.KEPT:
            start = 5 * PAGE if key == "part" else 0
            data[start:] = pattern(pages * PAGE - start, crashing.seed(key, 2)).tobytes()
        found[key] = bytes(data)
    if step == 1:
        found["old"] = pattern(PAGE, 1).tobytes()
    else:
        found["new"] = pattern(2 * PAGE, 2).tobytes()
    return found


@pytest.mark.slow
def test_killed_at_every_point(tmp_path: Path, pool: HostPool) -> None:
    reached: list[str] = []
    for point in range(100):
        folder = tmp_path / str(point)
        store = open_versioned(folder, drives=2, capacity_nbytes=8 << 20)
        crashing.write_first(store, pool)
        store.close()
        status, reached = run(folder, point)
        if status == 0:
            break
        assert status == -9
        store = open_versioned(folder, drives=2, capacity_nbytes=8 << 20)
        is_new = "committed" in reached
        assert store.step == (2 if is_new else 1), reached
        assert {key: get(store, pool, key) for key in sorted(store.keys())} == dict(
            sorted(contents(store.step).items())
        )
        check_extents(store)
        on_first_nbytes = by_drive(store, "spread")[0]
        assert on_first_nbytes < 1.5 * MIB if is_new else on_first_nbytes >= 2 * MIB  # a quarter, or half
        # And it goes on from there.
        latest = put(store, pool, "whole", 7, crashing.PAGES["whole"])
        store.commit(3)
        check_extents(store)
        assert get(store, pool, "whole") == latest
        store.close()
    expected = ["opened", "start", "begun", "removed", "before commit", "committed", "freed", "returned"]
    assert [name for name in reached if name in expected] == expected
    assert len(reached) == point
