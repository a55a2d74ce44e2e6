"""Run folders and processes that end in every way: nothing is left behind, and nothing of a live owner is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.cleanup import find_run_folders, remove_dead
from storage.store import ShardStore

_TIMEOUT_S = 100.0
_OPEN = """
import os, sys
from pathlib import Path
from storage.store import ShardStore, StorageOptions
store = ShardStore.open([Path(sys.argv[1])], 1 << 20, options=StorageOptions(free_margin_nbytes=0))
store.create("a", 4096)
print("open", flush=True)
"""
_WAIT = _OPEN + "sys.stdin.read()\n"


@contextmanager
def _child(script: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has opened a store in `directory`."""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline().strip()
            assert line == "open", child.communicate(timeout=_TIMEOUT_S)[1]
            yield child
        finally:
            child.kill()


def test_killed_owners_folder_is_found_and_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    with _child(_WAIT, tmp_path) as live, _child(_WAIT, tmp_path) as killed:
        assert {folder.pid for folder in find_run_folders(tmp_path)} == {live.pid, killed.pid}
        assert all(folder.is_alive for folder in find_run_folders(tmp_path))
        killed.send_signal(signal.SIGKILL)
        killed.wait(_TIMEOUT_S)

        alive = {folder.pid: folder.is_alive for folder in find_run_folders(tmp_path)}
        assert alive == {live.pid: True, killed.pid: False}
        removed = remove_dead(tmp_path)
        assert [folder.pid for folder in removed] == [killed.pid]
        assert removed[0].nbytes >= 1 << 20

        left = find_run_folders(tmp_path)
        assert [folder.pid for folder in left] == [live.pid]
        assert (left[0].path / "rank0.swap").exists()
        assert remove_dead(tmp_path) == []
        live.communicate(timeout=_TIMEOUT_S)  # the end of its input lets it leave in good order
    assert list(tmp_path.iterdir()) == []


def test_own_folder_is_alive(tmp_path: Path) -> None:
    store = ShardStore.open([tmp_path], 4096)
    try:
        assert [folder.pid for folder in find_run_folders(tmp_path)] == [os.getpid()]
        assert remove_dead(tmp_path) == []
    finally:
        store.close()
    assert find_run_folders(tmp_path) == []


def test_interrupted_process_leaves_no_folder(tmp_path: Path) -> None:
    with _child(_WAIT, tmp_path) as child:
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=_TIMEOUT_S)
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["raise ValueError('on purpose')", "sys.exit(3)", "", "store.close()"])
def test_ended_process_leaves_no_folder(tmp_path: Path, ending: str) -> None:
    with _child(_OPEN + ending + "\n", tmp_path) as child:
        child.communicate(timeout=_TIMEOUT_S)
    assert list(tmp_path.iterdir()) == []


_FORK = (
    _OPEN
    + """
child = os.fork()
if child == 0:
    {ending}
status = os.waitpid(child, 0)[1]
folders = list(Path(sys.argv[1]).iterdir())
print(len(folders), (folders[0] / "rank0.swap").exists(), os.waitstatus_to_exitcode(status), flush=True)
store.close()
"""
)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)", "raise SystemExit(0)"])
def test_forked_child_does_not_remove_its_parents_folder(tmp_path: Path, ending: str) -> None:
    with _child(_FORK.format(ending=ending), tmp_path) as child:
        out, errors = child.communicate(timeout=_TIMEOUT_S)
    assert out.strip() == "1 True 0", errors
    assert list(tmp_path.iterdir()) == []


def test_folder_of_an_owner_with_a_surviving_forked_child_is_dead(tmp_path: Path) -> None:
    """The lock of a killed owner lives on in its forked children (data loaders) until they end too."""
    script = _OPEN + "child = os.fork()\nif child == 0:\n    print('forked', flush=True)\nsys.stdin.read()\n"
    with _child(script, tmp_path) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().strip() == "forked"
        owner.send_signal(signal.SIGKILL)
        assert owner.stdin is not None
        owner.stdin.close()  # the forked child reads the end of the pipe and leaves
        assert owner.stdout.read() == ""  # it has left: nobody holds the other end any more
        owner.wait(_TIMEOUT_S)
    assert len(remove_dead(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_hundred_rounds_leave_descriptors_and_threads_as_they_were(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    ShardStore.open([tmp_path], 4096).close()
    before = count()
    for _ in range(100):
        ShardStore.open([tmp_path, tmp_path], 8192).close()
    assert count() == before
    assert list(tmp_path.iterdir()) == []
