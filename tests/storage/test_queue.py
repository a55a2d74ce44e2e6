from __future__ import annotations

import threading

import pytest

from storage.backends.queue import BlockQueue, Transfer
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
    worker = threading.Thread(target=lambda: taken.append(queue.take()))
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
