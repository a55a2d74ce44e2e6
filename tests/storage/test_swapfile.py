"""Run folders and swap files, with real processes as owners."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.cleanup import find_run_folders, remove_dead
from storage.errors import SwapFullError
from storage.pool import HostPool
from storage.store import ShardStore
from storage.swapfile import OWNER_FILE, RunFolder, SwapFile
from tests.storage.conftest import MakeStore
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, filled, finish

_ROOT = Path(__file__).parents[2]

# Opens a store, writes to it without end, and tells when the first bytes are on disk.
_OWNER = """
import sys
from pathlib import Path
from storage.pool import HostPool
from storage.store import ShardStore
from storage.types import TrafficTag

store = ShardStore.open([Path(sys.argv[1])], 1 << 20)
store.create("a", 1 << 20)
lease = HostPool(1 << 20).lease(1 << 20, "a")
while True:
    ticket = store.submit_write("a", lease.memory, tag=TrafficTag("param", 0))
    ticket.wait(None)
    print("ready", flush=True)
    {then}
"""


@contextmanager
def owner(folder: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with a store in `folder`, which has written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER.replace("{then}", then or "sys.stdin.readline()"), str(folder)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_a_killed_owner_is_found_and_removed_and_a_live_one_is_not(open_store: MakeStore, tmp_path: Path) -> None:
    folder = tmp_path / "drive0"
    open_store("auto")
    (mine,) = find_run_folders(folder)
    assert (mine.pid, mine.is_alive) == (os.getpid(), True)
    with owner(folder) as process, owner(folder) as living:
        process.kill()
        process.wait(WAIT_S)
        states = {found.pid: found.is_alive for found in find_run_folders(folder)}
        assert states == {os.getpid(): True, process.pid: False, living.pid: True}
        (removed,) = remove_dead(folder)
        assert removed.pid == process.pid
        assert removed.nbytes >= MIB
        assert remove_dead(folder) == []
        assert {found.pid for found in find_run_folders(folder)} == {os.getpid(), living.pid}
    assert len(remove_dead(folder)) == 1


@pytest.mark.parametrize("then", ["", "pass"], ids=["idle", "busy"])
def test_an_interrupted_owner_leaves_nothing(tmp_path: Path, then: str) -> None:
    with owner(tmp_path, then) as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_S)
        assert "KeyboardInterrupt" in stderr
        assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["sys.exit(0)", "raise RuntimeError('boom')"])
def test_an_owner_that_ends_without_closing_leaves_nothing(tmp_path: Path, then: str) -> None:
    with owner(tmp_path, then) as process:
        process.communicate(timeout=WAIT_S)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_its_parents_files_alone(open_store: MakeStore, pool: HostPool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "test")
    file = SwapFile(folder.path / "rank0.swap", PAGE, direct=False, free_margin_nbytes=0)
    child = os.fork()
    if not child:
        file.close()
        folder.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert file.path.exists()
    assert find_run_folders(tmp_path)[0].is_alive
    file.close()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_our_making_are_looked_at(tmp_path: Path) -> None:
    for name in ("infinity-data", "infinity-12-xyz", "other", "infinity-99999999-0123abcd.bak"):
        (tmp_path / name).mkdir()
    elsewhere = tmp_path / "other" / "infinity-1-00000000"
    elsewhere.mkdir()
    (tmp_path / "infinity-1-0123abcd").symlink_to(elsewhere)
    assert find_run_folders(tmp_path) == []
    assert remove_dead(tmp_path) == []


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"pid": "x", "boot_id": "", "started": 0}'])
def test_a_folder_whose_owner_cannot_be_told_is_left_alone(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "infinity-99999999-0123abcd"
    folder.mkdir()
    if content is not None:
        (folder / OWNER_FILE).write_text(content)
    assert remove_dead(tmp_path) == []
    (found,) = find_run_folders(tmp_path)
    assert (found.pid, found.is_alive) == (None, True)


@pytest.mark.parametrize(
    ("change", "is_alive"),
    [({}, True), ({"boot_id": "another"}, False), ({"started": 1.0}, False), ({"pid": 2**22 + 1}, False)],
    ids=["same process", "earlier boot", "pid used again", "no such process"],
)
def test_without_the_lock_the_process_decides(tmp_path: Path, change: dict[str, object], is_alive: bool) -> None:
    made = RunFolder(tmp_path, "test")
    copy = tmp_path / "infinity-1-0123abcd"
    shutil.copytree(made.path, copy)
    owner_file = copy / OWNER_FILE
    owner_file.write_text(json.dumps(json.loads(owner_file.read_text()) | change))
    found = {one.path: one.is_alive for one in find_run_folders(tmp_path)}
    assert found == {made.path: True, copy: is_alive}
    assert [one.path for one in remove_dead(tmp_path)] == ([] if is_alive else [copy])
    made.remove()


def test_the_lock_decides_where_the_process_cannot_be_seen(tmp_path: Path) -> None:
    made = RunFolder(tmp_path, "test")
    owner_file = made.path / OWNER_FILE
    owner_file.write_text(owner_file.read_text().replace(f'"pid": {os.getpid()}', '"pid": 99999999'))
    assert find_run_folders(tmp_path)[0].is_alive
    assert remove_dead(tmp_path) == []
    made.remove()


def test_space_is_reserved_at_once(tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "x", 3 * MIB, direct=False, free_margin_nbytes=0)
    assert os.stat(file.path).st_size == 3 * MIB
    assert os.stat(file.path).st_blocks * 512 >= 3 * MIB
    file.close()
    file.close()
    assert not file.path.exists()


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """The system refuses to make any file longer than this (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refused_reservation_leaves_nothing(tmp_path: Path) -> None:
    with file_limit(MIB), pytest.raises(SwapFullError, match="reserving 2097152 bytes"):
        ShardStore.open([tmp_path], 2 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_growth_leaves_data_and_store_as_they_were(open_store: MakeStore, kind: str, pool: HostPool) -> None:
    store = open_store(kind, capacity_nbytes=MIB)
    with filled(pool, MIB, 1) as source, pool.lease(MIB, "target") as target:
        store.create("a", MIB)
        finish(store.submit_write("a", source.memory, tag=TAG))
        with file_limit(MIB), pytest.raises(SwapFullError) as caught:
            store.create("b", MIB)
        assert caught.value.errno is not None
        assert store.keys() == ["a"]
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == source.memory
        store.create("b", MIB)  # there is room again
        finish(store.submit_write("b", source.memory, tag=TAG))


def test_a_device_that_is_full_at_last(open_store: MakeStore, kind: str, pool: HostPool) -> None:
    """A write the system itself refuses: the file was made longer by hand beyond what may be written."""
    store = open_store(kind, capacity_nbytes=2 * MIB)
    with filled(pool, MIB, 1) as first, filled(pool, MIB, 2) as second, pool.lease(MIB, "target") as target:
        for key in ("a", "b"):
            store.create(key, MIB)
        finish(store.submit_write("a", first.memory, tag=TAG))
        with file_limit(MIB):
            ticket = store.submit_write("b", second.memory, tag=TAG)
            assert ticket.wait(WAIT_S)
        assert isinstance(ticket.exception, SwapFullError)
        assert ticket.exception.key == "b"
        finish(store.submit_read("a", target.memory, tag=TAG))
        assert target.memory == first.memory
        finish(store.submit_write("b", second.memory, tag=TAG))
        finish(store.submit_read("b", target.memory, tag=TAG))
        assert target.memory == second.memory
