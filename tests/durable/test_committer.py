"""The committer: no thread waits for the writes of a step, and what cannot be committed any more is told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from infinity.durable.committer import CommitState, Committer
from infinity.observe.stalls import StallClock
from storage.errors import ClosedError, WriteError
from storage.types import Ticket
from storage.versioned import VersionedStore
from tests.interrupting import CtrlC
from tests.storage.versions import open_versioned

WAIT_S = 100.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionedStore]:
    opened = open_versioned(tmp_path)
    yield opened
    opened.close()


def committer(store: VersionedStore, thread: ThreadPoolExecutor, told: list[BaseException]) -> Committer:
    stalls = StallClock(WAIT_S, lambda: store.progress, lambda: "")
    return Committer(store, thread, stalls, io_timeout_s=WAIT_S, on_failure=told.append)


def test_writes_that_have_not_landed_keep_no_thread(store: VersionedStore, thread: ThreadPoolExecutor) -> None:
    """They take as long as the drives do; a stuck one is the training thread's to notice, which bounds its waits."""
    commits = committer(store, thread, [])
    first, second = Ticket("update of blocks.0"), Ticket("update of blocks.1")
    commits.begin(1, {}, [first, second])
    first.set_done()
    assert thread.submit(lambda: "free").result(WAIT_S) == "free"
    assert (commits.state, store.step) == (CommitState.COMMITTING, -1)
    second.set_done()
    commits.wait()
    assert (commits.state, store.step, commits.commits) == (CommitState.IDLE, 1, 1)


def test_a_write_that_failed_fails_the_commit(store: VersionedStore, thread: ThreadPoolExecutor) -> None:
    told: list[BaseException] = []
    commits = committer(store, thread, told)
    write = Ticket("update of blocks.0")
    commits.begin(1, {}, [write])
    write.set_exception(failure := WriteError("the drive is gone"))
    with pytest.raises(WriteError, match="the drive is gone"):
        commits.wait()
    assert (commits.state, told, store.step) == (CommitState.FAILED, [failure], -1)
    commits.recover()
    commits.begin(2, {}, [])
    commits.wait()
    assert store.step == 2


def test_writes_that_land_after_the_end_are_not_committed(store: VersionedStore, thread: ThreadPoolExecutor) -> None:
    told: list[BaseException] = []
    commits = committer(store, thread, told)
    write = Ticket("update of blocks.0")
    commits.begin(3, {}, [write])
    thread.shutdown()
    write.set_done()
    with pytest.raises(ClosedError, match="step 3 was not committed: the engine was closed before"):
        commits.wait()
    assert (commits.state, len(told), store.step) == (CommitState.FAILED, 1, -1)


def test_wherever_ctrl_c_comes_a_commit_has_begun_or_it_has_not(
    store: VersionedStore, thread: ThreadPoolExecutor
) -> None:
    commits, told = committer(store, thread, []), 0
    for number in count():
        with CtrlC(number) as ctrl_c:
            commits.begin(number, {"which": str(number).encode()}, [Ticket.completed(), Ticket.completed()])
        commits.wait()
        assert commits.state is CommitState.IDLE
        has_begun = store.step == number
        told += has_begun
        assert commits.commits == told
        assert store.notes().get("which", b"").decode() == (str(store.step) if told else "")
        if not ctrl_c.has_come:
            break
        assert has_begun or store.step < number
    assert has_begun
    assert 1 < told < number


def test_a_failed_commit_that_was_interrupted_is_told_once(store: VersionedStore, thread: ThreadPoolExecutor) -> None:
    failed = Ticket("update of blocks.0")
    failed.set_exception(WriteError("the drive is gone"))
    for number in count():
        told: list[BaseException] = []
        commits = committer(store, thread, told)
        with CtrlC(number) as ctrl_c:
            commits.begin(1, {}, [failed])
        commits.settle()
        assert len(told) == (commits.state is CommitState.FAILED)
        commits.recover()
        commits.begin(number, {}, [])
        commits.wait()
        assert store.step == number
        if not ctrl_c.has_come:
            break
    assert told
