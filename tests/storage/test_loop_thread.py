"""The thread with an asyncio loop, and its files."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest

from storage.backends.loop_thread import LoopThread, close_files
from tests.storage.helpers import WAIT_S


def test_it_ends_when_its_workers_have_and_takes_no_more_calls() -> None:
    goes_on, called = asyncio.Event(), threading.Event()
    ran_on: list[str] = []

    async def serve() -> None:
        ran_on.append(threading.current_thread().name)
        await goes_on.wait()
        ran_on.append(await asyncio.to_thread(lambda: threading.current_thread().name))

    loop = LoopThread(serve, 2, "infinity-test")
    loop.thread.start()
    loop.call(called.set)
    assert called.wait(WAIT_S)
    assert loop.thread.is_alive()
    loop.call(goes_on.set)
    loop.thread.join(WAIT_S)
    assert not loop.thread.is_alive()
    assert ran_on[:2] == ["infinity-test"] * 2
    assert all(name.startswith("infinity-test_") for name in ran_on[2:])
    loop.call(pytest.fail, "called after the end")


class _File:
    def __init__(self, error: OSError | None) -> None:
        self.is_closed = False
        self._error = error

    async def close(self) -> None:
        self.is_closed = True
        if self._error is not None:
            raise self._error


def test_a_file_that_fails_when_it_is_closed_is_told_and_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    files = {"a": _File(OSError(errno.EIO, "Input/output error")), "b": _File(None)}
    asyncio.run(close_files(files))
    assert [file.is_closed for file in files.values()] == [True, True]
    assert [record.getMessage() for record in caplog.records] == ["closing a: Input/output error"]
