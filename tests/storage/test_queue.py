from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from storage.backends.queue import BlockQueue, Seat, Transfer, read_aheads_per_write
from storage.errors import ClosedError
from storage.types import Op, Priority
from tests.storage.helpers import WAIT_S, request

_MEMORY = memoryview(bytearray(100))


def _put(queue: BlockQueue, op: Op, priority: Priority, nbytes: int = 10) -> object:
    made = request(op, _MEMORY[:nbytes], priority=priority)
    queue.put(made)
    return made


def _take(queue: BlockQueue) -> tuple[Transfer, int, int]:
    block = queue.take_nowait()
    assert block is not None
    return block


def test_a_transfer_is_cut_into_blocks() -> None:
    queue = BlockQueue(40)
    assert queue.put(request(Op.READ, _MEMORY)) == 3
    blocks = [_take(queue) for _ in range(3)]
    assert [(start, stop) for _, start, stop in blocks] == [(0, 40), (40, 80), (80, 100)]
    assert queue.take_nowait() is None
    assert [queue.block_done(transfer, None) for transfer, _, _ in blocks] == [False, False, True]
    assert queue.requests() == []


def test_blocks_of_the_next_transfer_follow_while_the_first_is_served() -> None:
    queue = BlockQueue(40)
    for _ in range(2):
        _put(queue, Op.READ, Priority.READ_AHEAD, 40)
    first, second = _take(queue), _take(queue)
    assert first[0] is not second[0]
    assert len(queue.requests()) == 2


def test_what_somebody_waits_for_goes_first() -> None:
    queue = BlockQueue(10)
    write = _put(queue, Op.WRITE, Priority.WRITE)
    ahead = _put(queue, Op.READ, Priority.READ_AHEAD)
    demand = _put(queue, Op.READ, Priority.DEMAND)
    assert [_take(queue)[0].request for _ in range(3)] == [demand, ahead, write]


def test_a_demand_overtakes_the_blocks_of_a_long_transfer() -> None:
    queue = BlockQueue(10)
    ahead = _put(queue, Op.READ, Priority.READ_AHEAD, 100)
    assert _take(queue)[0].request is ahead
    demand = _put(queue, Op.READ, Priority.DEMAND)
    assert [_take(queue)[0].request for _ in range(2)] == [demand, ahead]


@pytest.mark.parametrize(("priority", "most"), [(Priority.READ_AHEAD, 8), (Priority.DEMAND, 64)])
def test_endless_reads_do_not_hold_a_write_up_for_ever(priority: Priority, most: int) -> None:
    queue = BlockQueue(10)
    write = _put(queue, Op.WRITE, Priority.WRITE)
    reads = 0
    _put(queue, Op.READ, priority)
    while _take(queue)[0].request is not write:
        reads += 1
        _put(queue, Op.READ, priority)
    assert reads == most


def test_a_failed_block_ends_the_transfer_when_the_others_out_have_ended() -> None:
    queue = BlockQueue(10)
    failing = _put(queue, Op.READ, Priority.READ_AHEAD, 100)
    after = _put(queue, Op.READ, Priority.READ_AHEAD)
    transfer = _take(queue)[0]
    _take(queue)
    error = OSError("first")
    assert not queue.block_done(transfer, error)
    assert _take(queue)[0].request is after
    assert queue.block_done(transfer, OSError("second"))
    transfer.complete()
    assert transfer.request is failing
    assert transfer.request.ticket.exception is error


def test_closing_wakes_the_workers_and_ends_what_waits() -> None:
    queue = BlockQueue(10)
    taken: list[object] = []
    worker = threading.Thread(target=lambda: taken.append(queue.take(queue.sit_down())))
    worker.start()
    assert queue.close() == []
    worker.join(WAIT_S)
    assert taken == [None]
    with pytest.raises(ClosedError):
        queue.put(request(Op.READ, _MEMORY))


def test_closing_leaves_a_block_in_service_to_its_worker() -> None:
    queue = BlockQueue(10)
    _put(queue, Op.READ, Priority.READ_AHEAD, 20)
    waiting = _put(queue, Op.READ, Priority.READ_AHEAD)
    transfer = _take(queue)[0]
    assert [ended.request for ended in queue.close()] == [waiting]
    assert queue.abandon() == [transfer]
    assert queue.block_done(transfer, None)
    assert isinstance(transfer.error, ClosedError)


# Pacing of writes ------------------------------------------------------------------------------------------------


def _reads_before_a_write(queue: BlockQueue, priority: Priority) -> int:
    """How many of an endless stream of reads go before a write that waits."""
    reads = 0
    _put(queue, Op.READ, priority)
    while (transfer := _take(queue)[0]).request.op is Op.READ:
        assert queue.block_done(transfer, None)
        reads += 1
        _put(queue, Op.READ, priority)
    return reads


@pytest.mark.parametrize(
    ("held", "ahead", "demand"), [(1, 16, 64), (2, 16, 64), (3, 8, 64), (5, 3, 64), (8, 1, 8), (20, 1, 8)]
)
def test_writes_yield_until_the_memory_they_hold_is_needed(held: int, ahead: int, demand: int) -> None:
    for priority, most in ((Priority.READ_AHEAD, ahead), (Priority.DEMAND, demand)):
        queue = BlockQueue(10, write_memory_nbytes=100)
        for _ in range(held):
            _put(queue, Op.WRITE, Priority.WRITE)
        assert queue.write_pressure == held / 10
        assert _reads_before_a_write(queue, priority) == most


def test_a_write_holds_its_memory_until_it_has_ended() -> None:
    queue = BlockQueue(10, write_memory_nbytes=100)
    _put(queue, Op.WRITE, Priority.WRITE, 20)
    _put(queue, Op.READ, Priority.WRITE, 20)
    blocks = [_take(queue) for _ in range(4)]
    assert queue.write_pressure == 0.2
    for transfer, _, _ in blocks:
        queue.block_done(transfer, None)
    assert queue.write_pressure == 0
    _put(queue, Op.WRITE, Priority.WRITE, 20)
    assert queue.block_done(_take(queue)[0], OSError("refused"))
    assert queue.write_pressure == 0
    _put(queue, Op.WRITE, Priority.WRITE)
    queue.close()
    assert queue.write_pressure == 0


def test_pressure_only_ever_speeds_writes_up() -> None:
    reads = [read_aheads_per_write(percent / 100) for percent in range(150)]
    assert reads == sorted(reads, reverse=True)
    assert (reads[0], reads[-1]) == (16, 1)
    assert read_aheads_per_write(None) == 8


def test_a_write_that_is_waited_for_goes_like_a_demand() -> None:
    queue = BlockQueue(10)
    other = _put(queue, Op.WRITE, Priority.WRITE)
    ahead = _put(queue, Op.READ, Priority.READ_AHEAD)
    wanted = request(Op.WRITE, _MEMORY[:20], priority=Priority.WRITE)
    wanted.key = "wanted"
    queue.put(wanted)
    queue.promote("wanted")
    queue.promote("unknown")
    assert [_take(queue)[0].request for _ in range(4)] == [wanted, wanted, ahead, other]


def test_a_promoted_write_that_fails_leaves_the_queue() -> None:
    queue = BlockQueue(10, write_memory_nbytes=100)
    _put(queue, Op.WRITE, Priority.WRITE, 30)
    transfer = _take(queue)[0]
    queue.promote("key")
    assert queue.block_done(transfer, OSError("refused"))
    assert queue.take_nowait() is None
    assert (queue.requests(), queue.write_pressure) == ([], 0)


# Waking workers --------------------------------------------------------------------------------------------------


class _Sleeper:
    """A worker that takes one block."""

    def __init__(self, queue: BlockQueue) -> None:
        self.taken: list[object] = []
        self._thread = threading.Thread(target=self._run, args=(queue,))
        self._thread.start()

    def _run(self, queue: BlockQueue) -> None:
        self.taken.append(queue.take(queue.sit_down()))

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def _until(condition: Callable[[], bool]) -> None:
    never = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if condition():
            return
        never.wait(0.001)
    raise AssertionError("it never came to that")


def _until_idle(queue: BlockQueue, count: int) -> None:
    _until(lambda: len(queue._idle) == count)


def _complete_one(queue: BlockQueue, seat: Seat) -> None:
    """What a worker does before it completes a ticket."""
    _put(queue, Op.READ, Priority.READ_AHEAD)
    block = queue.take(seat)
    assert block is not None
    assert queue.block_done(block[0], None, seat)


def test_a_worker_takes_what_its_completion_submits_and_wakes_others_for_the_rest() -> None:
    queue = BlockQueue(10)
    seat = queue.sit_down()
    sleeper = _Sleeper(queue)
    _until_idle(queue, 1)
    queue._idle.remove(asleep := queue._idle[0])  # as if there were nobody, for the first
    _complete_one(queue, seat)
    queue._idle.append(asleep)
    mine = _put(queue, Op.READ, Priority.READ_AHEAD)
    assert queue._idle == [asleep]
    other = _put(queue, Op.READ, Priority.READ_AHEAD)
    sleeper.join()
    block = queue.take(seat)
    assert block is not None
    assert isinstance(sleeper.taken[0], tuple)
    assert {block[0].request, sleeper.taken[0][0].request} == {mine, other}


def test_a_worker_that_submits_a_long_transfer_wakes_others_for_all_but_one_block() -> None:
    queue = BlockQueue(10)
    seat = queue.sit_down()
    _complete_one(queue, seat)
    sleepers = [_Sleeper(queue) for _ in range(3)]
    _until_idle(queue, 3)
    _put(queue, Op.READ, Priority.READ_AHEAD, 30)
    _until_idle(queue, 1)
    assert queue.take(seat) is not None
    _until(lambda: sum(len(sleeper.taken) for sleeper in sleepers) == 2)
    assert queue.close() == []
    for sleeper in sleepers:
        sleeper.join()
    assert sum(sleeper.taken[0] is not None for sleeper in sleepers) == 2


def test_a_thread_that_only_submits_wakes_a_worker_for_every_block() -> None:
    queue = BlockQueue(10)
    sleepers = [_Sleeper(queue) for _ in range(2)]
    _until_idle(queue, 2)
    _put(queue, Op.READ, Priority.READ_AHEAD, 20)
    for sleeper in sleepers:
        sleeper.join()
        assert sleeper.taken[0] is not None
