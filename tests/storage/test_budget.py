from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.budget import Reservation, TierBudget
from storage.errors import CapacityError, ClosedError
from tests.storage.helpers import WAIT_S, run_threads


def test_bytes_are_held_until_released() -> None:
    budget = TierBudget("host", 100)
    first = budget.try_reserve(60, "a")
    assert first is not None
    assert first.done
    assert budget.try_reserve(41, "b") is None
    with budget.request(40, "b"):
        assert budget.holders() == {"a": 60, "b": 40}
        assert budget.free_nbytes == 0
    first.release()
    first.release()
    assert (budget.used_nbytes, budget.peak_nbytes, budget.holders()) == (0, 100, {})


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    budget = TierBudget("host", 100)
    holder = budget.request(60, "holder")
    large = budget.request(80, "large")
    small = budget.request(10, "small")
    assert budget.waiting() == ["large", "small"]
    assert budget.try_reserve(1, "sly") is None
    holder.release()
    assert large.done
    assert small.done


def test_cancelling_lets_the_next_ones_pass() -> None:
    budget = TierBudget("host", 100)
    budget.request(60, "holder")
    large = budget.request(80, "large")
    small = budget.request(10, "small")
    large.cancel()
    assert small.done
    assert large.done
    with pytest.raises(ClosedError, match="large was taken back"):
        large.result()
    large.release()
    assert budget.used_nbytes == 70


def test_what_can_never_be_granted_is_refused_at_once() -> None:
    with pytest.raises(CapacityError, match="unit 3 needs 101 bytes of host, whose limit is 100 bytes"):
        TierBudget("host", 100).request(101, "unit 3")


@pytest.mark.parametrize("method", ["request", "try_reserve"])
def test_negative_sizes_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        getattr(TierBudget("host", 100), method)(-1, "x")
    with pytest.raises(ValueError, match="-5 bytes"):
        TierBudget("host", -5)


def test_a_callback_of_a_grant_may_use_the_budget() -> None:
    budget = TierBudget("host", 100)
    holder = budget.request(100, "holder")
    nested: list[Reservation | None] = []
    waiting = budget.request(50, "waiting")
    waiting.add_done_callback(lambda _: nested.append(budget.try_reserve(50, "nested")))
    holder.release()
    assert nested[0] is not None
    assert budget.used_nbytes == 100


async def test_awaiting_a_grant() -> None:
    budget = TierBudget("host", 100)
    holder = budget.request(100, "holder")
    waiting = budget.request(1, "waiting")
    thread = threading.Thread(target=holder.release)
    thread.start()
    await waiting
    thread.join(WAIT_S)
    assert budget.holders() == {"waiting": 1}


def test_the_limit_holds_between_threads() -> None:
    budget = TierBudget("host", 10)

    def work(number: int) -> None:
        for step in range(200):
            with budget.request(1 + (number + step) % 10, str(number)) as reservation:
                assert reservation.wait(WAIT_S)
                assert budget.used_nbytes <= 10

    run_threads(4, work)
    assert budget.used_nbytes == 0
    assert budget.peak_nbytes <= 10
    assert budget.waiting() == []


class BudgetMachine(RuleBasedStateMachine):
    """Against a model that grants the queue's head, and only the head, whenever it fits."""

    LIMIT = 20

    def __init__(self) -> None:
        super().__init__()
        self.budget = TierBudget("host", self.LIMIT)
        self.held: list[Reservation] = []
        self.queue: list[Reservation] = []

    def used(self) -> int:
        return sum(reservation.nbytes for reservation in self.held)

    def serve(self) -> None:
        while self.queue and self.used() + self.queue[0].nbytes <= self.LIMIT:
            self.held.append(self.queue.pop(0))

    @rule(nbytes=st.integers(0, LIMIT))
    def request(self, nbytes: int) -> None:
        self.queue.append(self.budget.request(nbytes, f"owner {nbytes % 3}"))
        self.serve()

    @rule(nbytes=st.integers(0, LIMIT + 5))
    def try_reserve(self, nbytes: int) -> None:
        reservation = self.budget.try_reserve(nbytes, "try")
        may = not self.queue and self.used() + nbytes <= self.LIMIT
        assert (reservation is not None) == may
        if reservation is not None:
            self.held.append(reservation)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.held.pop(number).release()
        self.serve()

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.queue) - 1))
        self.queue.pop(number).cancel()
        self.serve()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.budget.used_nbytes == self.used() <= self.LIMIT
        assert self.budget.free_nbytes == self.LIMIT - self.used()
        assert self.budget.waiting() == [reservation.owner for reservation in self.queue]
        assert all(reservation.done and reservation.exception is None for reservation in self.held)
        assert not any(reservation.done for reservation in self.queue)
        assert sum(self.budget.holders().values()) == self.used()


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
