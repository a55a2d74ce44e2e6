from __future__ import annotations

import asyncio
import threading

import pytest

from storage.types import Priority, Ticket
from tests.storage.helpers import WAIT_S, run_threads


def test_priorities_order() -> None:
    assert sorted([Priority.WRITE, Priority.DEMAND, Priority.READ_AHEAD]) == [0, 1, 2]


def test_a_ticket_starts_open() -> None:
    ticket = Ticket("read of x")
    assert not ticket.done
    assert ticket.exception is None
    assert not ticket.wait(0)
    with pytest.raises(RuntimeError, match="read of x is not done"):
        ticket.result()
    assert "pending" in repr(ticket)


def test_only_the_first_completion_counts() -> None:
    ticket = Ticket()
    ticket.set_done()
    ticket.set_exception(ValueError("late"))
    ticket.result()
    failed = Ticket()
    failed.set_exception(ValueError("first"))
    failed.set_done()
    with pytest.raises(ValueError, match="first"):
        failed.result()


def test_completing_from_many_threads_calls_back_once() -> None:
    ticket = Ticket()
    calls: list[Ticket] = []
    ticket.add_done_callback(calls.append)
    run_threads(8, lambda _: ticket.set_done())
    assert calls == [ticket]


def test_many_threads_wait_for_one_ticket() -> None:
    ticket = Ticket()
    waiting = threading.Barrier(5)

    def wait(number: int) -> None:
        waiting.wait(WAIT_S)
        if number == 4:
            ticket.set_done()
        assert ticket.wait(WAIT_S)

    run_threads(5, wait)


def test_callbacks_run_in_the_completing_thread_or_at_once() -> None:
    ticket = Ticket()
    names: list[str] = []
    ticket.add_done_callback(lambda _: names.append(threading.current_thread().name))
    thread = threading.Thread(target=ticket.set_done, name="completer")
    thread.start()
    thread.join(WAIT_S)
    ticket.add_done_callback(lambda _: names.append(threading.current_thread().name))
    assert names == ["completer", threading.current_thread().name]


def test_a_broken_callback_keeps_nobody_from_their_turn(caplog: pytest.LogCaptureFixture) -> None:
    ticket = Ticket("read of x")
    calls: list[Ticket] = []
    ticket.add_done_callback(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    ticket.add_done_callback(calls.append)
    ticket.set_done()
    assert calls == [ticket]
    assert "read of x" in caplog.text


def test_all_of_nothing_is_done() -> None:
    assert Ticket.all_of([]).done
    assert Ticket.completed("x").done


def test_all_of_waits_for_everything_and_carries_the_first_failure() -> None:
    parts = [Ticket(str(number)) for number in range(3)]
    joined = Ticket.all_of(parts, "joined")
    parts[2].set_exception(ValueError("first"))
    parts[0].set_exception(ValueError("second"))
    assert not joined.done
    parts[1].set_done()
    with pytest.raises(ValueError, match="first"):
        joined.result()


async def test_awaiting_a_ticket_of_another_thread() -> None:
    ticket = Ticket()
    thread = threading.Thread(target=ticket.set_done)
    waiter = asyncio.ensure_future(_await(ticket))
    await asyncio.sleep(0)
    thread.start()
    await asyncio.wait_for(waiter, WAIT_S)
    thread.join(WAIT_S)


async def test_awaiting_raises_what_the_ticket_carries() -> None:
    ticket = Ticket()
    waiters = [asyncio.ensure_future(_await(ticket)) for _ in range(2)]
    await asyncio.sleep(0)
    ticket.set_exception(ValueError("why"))
    for waiter in waiters:
        with pytest.raises(ValueError, match="why"):
            await waiter


async def test_awaiting_a_ready_ticket_does_not_give_way() -> None:
    turns: list[str] = []
    asyncio.get_running_loop().call_soon(turns.append, "other")
    await Ticket.completed()
    assert turns == []


async def test_a_cancelled_wait_leaves_the_ticket_alone() -> None:
    ticket = Ticket()
    waiter = asyncio.ensure_future(_await(ticket))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    ticket.set_done()
    await ticket


def test_completing_after_the_loop_has_closed() -> None:
    ticket = Ticket()

    async def give_up() -> None:
        waiter = asyncio.ensure_future(_await(ticket))
        await asyncio.sleep(0)
        waiter.cancel()

    asyncio.run(give_up())
    ticket.set_done()
    assert ticket.done


async def _await(ticket: Ticket) -> None:
    await ticket
