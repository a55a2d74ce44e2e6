"""The I/O loop: messages in order, tickets that always complete, and an end that leaves nothing running."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from infinity.io_loop import IoLoop
from storage.errors import ClosedError, ReadError
from storage.types import Ticket

WAIT_S = 100.0


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop()
    yield loop
    loop.close()


async def nothing() -> None:
    """Ends at once."""


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def settle(io: IoLoop) -> None:
    """Wait until everything that was posted before has run."""
    assert io_ticket(io).wait(WAIT_S)


def io_ticket(io: IoLoop) -> Ticket:
    return io.submit(nothing(), "nothing")


def test_messages_run_in_order_on_the_named_thread(io: IoLoop) -> None:
    seen: list[tuple[int, str]] = []
    for number in range(200):
        io.post(lambda n: seen.append((n, threading.current_thread().name)), number)
    settle(io)
    assert seen == [(number, "infinity-io-loop") for number in range(200)]


def test_its_cpu_time_is_that_of_its_thread(io: IoLoop) -> None:
    before_s = io.cpu_s
    io.post(lambda: sum(range(3_000_000)))
    settle(io)
    settle(io)  # looked at when messages come
    assert before_s + 0.005 < io.cpu_s
    mine_s = time.thread_time()
    sum(range(3_000_000))
    assert time.thread_time() - mine_s > 0.005
    settled_s = io.cpu_s
    settle(io)
    settle(io)
    assert io.cpu_s - settled_s < 0.005  # nobody else's


def test_messages_of_several_threads_keep_each_ones_order(io: IoLoop) -> None:
    seen: list[tuple[int, int]] = []

    def send(sender: int) -> None:
        for number in range(100):
            io.post(seen.append, (sender, number))

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    settle(io)
    assert len(seen) == 400
    for sender in range(4):
        assert [number for who, number in seen if who == sender] == list(range(100))


def test_coroutines_run_on_the_loop(io: IoLoop) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    ticket = io.submit(note(), "note")
    assert ticket.label == "note"
    assert ticket.wait(WAIT_S)
    ticket.result()
    assert loops == [io.loop]


def test_coroutines_wait_for_tickets_of_other_threads(io: IoLoop) -> None:
    transfer = Ticket("transfer")

    async def use() -> None:
        await transfer

    ticket = io.submit(use(), "use")
    settle(io)
    assert not ticket.done
    transfer.set_done()
    assert ticket.wait(WAIT_S)
    ticket.result()


def test_the_ticket_carries_what_went_wrong(io: IoLoop) -> None:
    error = ReadError("cannot read blocks.3")

    async def fail() -> None:
        raise error

    ticket = io.submit(fail(), "demand")
    assert ticket.wait(WAIT_S)
    assert ticket.exception is error
    settle(io)  # the loop goes on


def test_a_message_that_raises_is_logged_and_the_next_ones_run(io: IoLoop, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    seen: list[int] = []
    with caplog.at_level(logging.ERROR):
        io.post(fail)
        io.post(seen.append, 1)
        settle(io)
    assert seen == [1]
    assert "fail at" in caplog.text
    assert "ValueError: a bug" in caplog.text


def test_failures_that_no_ticket_carries_are_reported() -> None:
    """A message that fails is noticed by the engine, not only by the log."""
    failures: list[BaseException] = []
    io = IoLoop(on_failure=failures.append)

    def fail() -> None:
        raise ValueError("a bug")

    io.post(fail)
    settle(io)
    io.close()
    assert [str(error) for error in failures] == ["a bug"]


def test_messages_posted_while_the_loop_is_busy_wake_it_once(io: IoLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up is a system call in which the poster gives up the interpreter's lock."""
    wakes: list[object] = []
    wake = io.loop.call_soon_threadsafe

    def counted(*args: object) -> object:
        wakes.append(args)
        return wake(*args)  # type: ignore[arg-type]

    begun, goes_on = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    io.post(busy)
    assert begun.wait(WAIT_S)
    monkeypatch.setattr(io.loop, "call_soon_threadsafe", counted)
    seen: list[int] = []

    async def submitted() -> None:
        seen.append(100)

    for number in range(50):
        io.post(seen.append, number)
    ticket = io.submit(submitted(), "in its place")
    goes_on.set()
    settle(io)
    assert ticket.wait(WAIT_S)
    assert seen == [*range(50), 100]
    assert len(wakes) <= 3  # of the messages, and of `settle`


# The end ---------------------------------------------------------------------------------------------------------


def test_close_joins_the_thread() -> None:
    io = IoLoop("infinity-io-loop-of-a-test")
    settle(io)
    io.close()
    io.close()
    assert "infinity-io-loop-of-a-test" not in [thread.name for thread in threading.enumerate()]
    assert io.loop.is_closed()


def test_messages_posted_before_the_end_run() -> None:
    io = IoLoop()
    seen: list[int] = []
    for number in range(50):
        io.post(seen.append, number)
    io.close()
    assert seen == list(range(50))


def test_what_still_runs_is_cancelled_and_its_ticket_says_so() -> None:
    io = IoLoop()
    cleaned: list[bool] = []

    async def hold() -> None:
        try:
            await forever()
        finally:
            cleaned.append(True)

    ticket = io.submit(hold(), "demand of blocks.3")
    settle(io)
    io.close()
    assert ticket.done
    with pytest.raises(ClosedError, match=r"demand of blocks\.3 was cancelled because its engine closed"):
        ticket.result()
    assert cleaned == [True]


def test_what_never_started_is_told_too() -> None:
    for _ in range(20):
        io = IoLoop()
        blocked, release = threading.Event(), threading.Event()

        def block(blocked: threading.Event = blocked, release: threading.Event = release) -> None:
            blocked.set()
            release.wait(WAIT_S)

        io.post(block)  # the submission and the end are then taken up in one go
        assert blocked.wait(WAIT_S)
        ticket = io.submit(nothing(), "last demand")
        closing = threading.Thread(target=io.close)
        closing.start()
        release.set()
        closing.join()
        assert ticket.done
        with contextlib.suppress(ClosedError):  # it may just have run
            ticket.result()
    gc.collect()  # a coroutine that was never awaited warns when it is collected


def test_threads_that_wait_are_woken_by_the_end() -> None:
    io = IoLoop()
    ticket = io.submit(forever(), "demand")
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(ticket.wait(WAIT_S)))
    waiting.start()
    io.close()
    waiting.join()
    assert woken == [True]


def test_nothing_is_taken_after_the_end() -> None:
    io = IoLoop()
    io.close()
    coroutine = nothing()
    with pytest.raises(ClosedError, match="demand: the I/O loop is closed"):
        io.submit(coroutine, "demand")
    with pytest.raises(ClosedError, match="the I/O loop is closed"):
        io.post(nothing)  # type: ignore[arg-type]
    del coroutine
    gc.collect()


def test_threads_that_submit_while_it_ends_get_an_answer() -> None:
    for _ in range(10):
        io = IoLoop()
        tickets: list[Ticket] = []
        started = threading.Event()

        def submit(io: IoLoop = io, tickets: list[Ticket] = tickets, started: threading.Event = started) -> None:
            with contextlib.suppress(ClosedError):
                while True:
                    tickets.append(io.submit(nothing(), "demand"))
                    started.set()

        thread = threading.Thread(target=submit)
        thread.start()
        assert started.wait(WAIT_S)
        io.close()
        thread.join()
        assert all(ticket.done for ticket in tickets)
    gc.collect()


def test_cancelled_work_may_still_use_other_threads() -> None:
    io = IoLoop()
    used: list[str] = []

    async def hold() -> None:
        try:
            await forever()
        finally:
            await asyncio.get_running_loop().run_in_executor(None, lambda: used.append("worker"))

    io.submit(hold(), "hold")
    settle(io)
    io.close()
    assert used == ["worker"]


def test_a_thread_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("infinity.io_loop._JOIN_TIMEOUT_S", 0.05)
    io = IoLoop()
    blocked, release = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        release.wait(WAIT_S)

    io.post(block)
    assert blocked.wait(WAIT_S)
    with caplog.at_level(logging.ERROR):
        io.close()
    assert "infinity-io-loop has not ended within 0.05 s" in caplog.text
    release.set()
    thread = next(thread for thread in threading.enumerate() if thread.name == "infinity-io-loop")
    thread.join(WAIT_S)
    io.loop.close()


def test_work_that_does_not_heed_the_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinity.io_loop._JOIN_TIMEOUT_S", 0.05)
    io = IoLoop()
    goes_on = asyncio.Event()

    async def hold() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        await goes_on.wait()

    io.submit(hold(), "hold")
    monkeypatch.setattr(io.loop, "close", lambda: None)  # the test ends the task afterwards
    settle(io)
    with caplog.at_level(logging.ERROR):
        io.close()
    assert "1 tasks of infinity-io-loop do not end and are left behind" in caplog.text
    goes_on.set()
    io.loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(io.loop)))
    monkeypatch.undo()
    io.loop.close()


def test_it_ends_where_a_loop_runs_already() -> None:
    """As in a notebook, whose cells run inside one."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("work")

    async def cell() -> None:
        loop = IoLoop()
        ticket = loop.submit(work(), "work")
        settle(loop)
        loop.close()
        with pytest.raises(ClosedError, match="work was cancelled"):
            ticket.result()
        assert loop.loop.is_closed()

    asyncio.run(cell())
    assert ended == ["work"]
