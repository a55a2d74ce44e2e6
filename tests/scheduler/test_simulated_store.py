"""The simulated store: modelled time, order per key, priorities, failures."""

from __future__ import annotations

import asyncio

import pytest

from infinity.testing import SimulatedStore
from storage.errors import ReadError, WriteError
from storage.types import Op, Priority, Ticket, TrafficTag

PAGE = 4096
TAG = TrafficTag("param", 0)


def filled(value: int, pages: int = 1) -> memoryview:
    return memoryview(bytearray([value]) * (pages * PAGE))


def store_of(*keys: str, pages: int = 1, **settings: object) -> SimulatedStore:
    store = SimulatedStore(**settings)  # type: ignore[arg-type]
    for key in keys:
        store.create(key, pages * PAGE)
    return store


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_a_transfer_takes_latency_and_bandwidth() -> None:
    store = store_of("a", pages=2, read_bytes_per_s=PAGE, write_bytes_per_s=2 * PAGE, latency_s=0.25)
    await store.submit_write("a", filled(7, 2), tag=TAG)
    assert now_s() == pytest.approx(1.25)
    memory = filled(0, 2)
    await store.submit_read("a", memory, tag=TAG)
    assert now_s() == pytest.approx(1.25 + 2.25)
    assert memory == filled(7, 2) == store.content("a")
    write, read = store.log
    assert (write.op, write.key, write.nbytes, write.priority, write.tag) == (Op.WRITE, "a", 2 * PAGE, 2, TAG)
    assert (read.submitted_s, read.start_s, read.end_s) == pytest.approx((1.25, 1.25, 3.5))


async def test_reads_and_writes_have_channels_of_their_own() -> None:
    store = store_of("a", "b", read_bytes_per_s=PAGE, write_bytes_per_s=PAGE)
    await Ticket.all_of([store.submit_read("a", filled(0), tag=TAG), store.submit_write("b", filled(1), tag=TAG)])
    assert now_s() == pytest.approx(1.0)


async def test_on_a_shared_channel_they_take_turns() -> None:
    store = store_of("a", "b", "c", is_shared=True, read_bytes_per_s=PAGE, write_bytes_per_s=PAGE)
    tickets = [store.submit_write(key, filled(1), tag=TAG) for key in ("a", "b")]
    tickets.append(store.submit_read("c", filled(0), tag=TAG))
    await Ticket.all_of(tickets)
    assert now_s() == pytest.approx(3.0)
    assert [transfer.key for transfer in store.log] == ["a", "c", "b"]


async def test_one_at_a_time_by_priority_then_as_submitted() -> None:
    store = store_of("a", "b", "c", "d", read_bytes_per_s=PAGE)
    ahead = [store.submit_read(key, filled(0), tag=TAG) for key in ("a", "b", "c")]
    demand = store.submit_read("d", filled(0), priority=Priority.DEMAND, tag=TAG)
    assert store.describe_in_flight() == ["read of a", "read of b", "read of c", "read of d"]
    await demand
    assert [ticket.done for ticket in ahead] == [True, False, False]
    await Ticket.all_of(ahead)
    assert [transfer.key for transfer in store.log] == ["a", "d", "b", "c"]
    assert [transfer.start_s for transfer in store.log] == pytest.approx([0, 1, 2, 3])


async def test_a_read_waits_for_the_writes_before_it() -> None:
    store = store_of("a", write_bytes_per_s=PAGE, read_bytes_per_s=1e9)
    store.submit_write("a", filled(1), tag=TAG)
    first = filled(0)
    reading = store.submit_read("a", first, priority=Priority.DEMAND, tag=TAG)
    last = store.submit_write("a", filled(2), tag=TAG)
    await reading
    assert first == filled(1)
    await last
    assert store.content("a") == filled(2)


async def test_other_parts_of_a_key_are_not_waited_for() -> None:
    store = store_of("a", pages=2, write_bytes_per_s=PAGE, read_bytes_per_s=1e12)
    writing = store.submit_write("a", filled(1), tag=TAG)
    await store.submit_read("a", filled(0), offset=PAGE, tag=TAG)
    assert not writing.done
    await writing


async def test_bytes_move_when_the_transfer_ends() -> None:
    store = store_of("a", write_bytes_per_s=PAGE)
    memory = filled(1)
    ticket = store.submit_write("a", memory, tag=TAG)
    memory[0] = 9  # a buffer used again too early shows up in the store
    await ticket
    assert store.content("a")[0] == 9


async def test_failures_reach_the_waiter_and_change_nothing() -> None:
    wrong = [ReadError("no")]
    store = store_of("a", failure=lambda op, key: wrong.pop() if op is Op.READ and wrong else None)
    memory = filled(3)
    with pytest.raises(ReadError, match="no"):
        await store.submit_read("a", memory, tag=TAG)
    assert memory == filled(3)
    assert (store.log, store.in_flight, store.describe_in_flight()) == ([], 0, [])
    await store.submit_read("a", memory, tag=TAG)
    assert memory == filled(0)


async def test_a_lost_write_is_told_to_readers_until_it_is_overwritten() -> None:
    wrong = [WriteError("disk full")]
    store = store_of("a", failure=lambda op, key: wrong.pop() if op is Op.WRITE and wrong else None)
    with pytest.raises(WriteError):
        await store.submit_write("a", filled(1), tag=TAG)
    with pytest.raises(WriteError, match="disk full"):
        await store.submit_read("a", filled(0), tag=TAG)
    await store.submit_write("a", filled(2), tag=TAG)
    await store.submit_read("a", filled(0), tag=TAG)


async def test_durations_by_function() -> None:
    store = store_of("a", "b", duration_s=lambda op, key, nbytes: 5.0 if key == "b" else nbytes / PAGE)
    await store.submit_read("a", filled(0), tag=TAG)
    await store.submit_read("b", filled(0), tag=TAG)
    assert [transfer.end_s for transfer in store.log] == pytest.approx([1.0, 6.0])


@pytest.mark.parametrize(("offset", "nbytes"), [(1, PAGE), (0, PAGE - 1), (PAGE, PAGE), (0, 2 * PAGE)])
async def test_what_does_not_fit_is_refused(offset: int, nbytes: int) -> None:
    store = store_of("a")
    with pytest.raises(ValueError, match=r"read of a: bytes \d+ to \d+ of 4096"):
        store.submit_read("a", memoryview(bytearray(nbytes)), offset=offset, tag=TAG)
    assert store.in_flight == 0


def test_content_may_be_given() -> None:
    store = SimulatedStore()
    store.create("a", PAGE, bytes([4]) * PAGE)
    assert store.content("a") == filled(4)
