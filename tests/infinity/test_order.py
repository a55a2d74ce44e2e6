"""The access order is a prediction: right after one repetition, cheap when wrong, never an error."""

from collections.abc import Callable, Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.order import Access, AccessOrder, Mode, Phase


def f(unit: int) -> Access:
    return Access(Phase.FORWARD, unit)


def b(unit: int) -> Access:
    return Access(Phase.BACKWARD, unit)


def forward(*units: int) -> list[Access]:
    return [f(unit) for unit in units]


def backward(*units: int) -> list[Access]:
    return [b(unit) for unit in units]


def run(order: AccessOrder, accesses: Iterable[Access], mode: Mode = Mode.TRAIN) -> list[bool]:
    order.begin(mode)
    return [order.record(access) for access in accesses]


def expected_next(order: AccessOrder) -> Access:
    trace, position = order.upcoming()
    return trace[position % len(trace)]


ITERATION = forward(0, 1, 2, 3) + backward(3, 2, 1, 0)


def test_guess_is_module_order_and_back() -> None:
    order = AccessOrder([2, 0, 1])
    order.begin(Mode.TRAIN)
    assert order.upcoming() == (tuple(forward(2, 0, 1) + backward(1, 0, 2)), 0)
    order.begin(Mode.EVAL)
    assert order.upcoming() == (tuple(forward(2, 0, 1)), 0)


def test_a_backward_that_is_no_mirror_is_predicted_from_the_first() -> None:
    """A unit around others begins its backward before them: the guess says so, and the first backward keeps to it."""
    order = AccessOrder(range(4), [3, 1, 2, 0])
    for _ in range(3):
        assert all(run(order, forward(0, 1, 2, 3) + backward(3, 1, 2, 0)))


def test_plain_iterations_are_predicted_from_the_first() -> None:
    order = AccessOrder(range(4))
    for _ in range(3):
        assert all(run(order, ITERATION))
    assert (order.hits, order.misses) == (24, 0)


def test_position_follows_every_access() -> None:
    order = AccessOrder(range(4))
    order.begin(Mode.TRAIN)
    for number, access in enumerate(ITERATION):
        assert order.upcoming()[1] == number
        assert expected_next(order) == access
        order.record(access)
    trace, position = order.upcoming()
    assert position == len(trace)
    assert expected_next(order) == f(0)


def test_upcoming_is_not_changed_by_what_follows() -> None:
    order = AccessOrder(range(2))
    before = order.upcoming()
    run(order, forward(1, 0))
    run(order, forward(1, 0))
    assert before == ((f(0), f(1), b(1), b(0)), 0)


def test_other_order_is_learned_in_one_iteration() -> None:
    order = AccessOrder(range(4))
    other = forward(3, 1, 0, 2) + backward(0, 2, 1, 3)
    assert not all(run(order, other))
    assert all(run(order, other))


def test_accumulation_repeats_the_iteration() -> None:
    order = AccessOrder(range(4))
    for _ in range(4):
        assert all(run(order, ITERATION))


@pytest.mark.parametrize("n_forwards", [2, 3])
def test_several_forwards_then_one_backward(n_forwards: int) -> None:
    order = AccessOrder(range(3))
    both = backward(2, 1, 0) * n_forwards

    def step() -> bool:
        hits = [run(order, forward(0, 1, 2)) for _ in range(n_forwards)]
        hits.append([order.record(access) for access in both])
        return all(map(all, hits))

    step()
    assert all(step() for _ in range(4))


def test_evaluation_does_not_disturb_training() -> None:
    order = AccessOrder(range(4))
    train, evaluate = forward(1, 0, 2, 3) + backward(3, 2, 1, 0), forward(3, 2)
    run(order, train)
    for _ in range(2):
        run(order, evaluate, Mode.EVAL)
    assert all(run(order, train))
    assert all(run(order, evaluate, Mode.EVAL))
    assert all(run(order, train))


def test_evaluation_between_forward_and_backward() -> None:
    order = AccessOrder(range(3))
    assert all(run(order, forward(0, 1, 2)))
    assert all(run(order, forward(0, 1, 2), Mode.EVAL))
    assert order.mode is Mode.EVAL
    assert all(order.record(access) for access in backward(2, 1, 0))
    assert order.mode is Mode.TRAIN


def test_repeated_units() -> None:
    order = AccessOrder(range(3))
    repeated = forward(0, 1, 1, 1, 2, 1) + backward(1, 2, 1, 1, 1, 0)
    run(order, repeated)
    assert all(run(order, repeated))


def test_recomputation_in_backward() -> None:
    order = AccessOrder(range(3))
    recomputed = [*forward(0, 1, 2), b(2), f(1), b(1), f(0), b(0)]
    run(order, recomputed)
    assert all(run(order, recomputed))


def test_skipped_unit_costs_one_miss() -> None:
    order = AccessOrder(range(5))
    hits = run(order, forward(0, 1, 3, 4))
    assert hits == [True, True, False, True]


def test_inserted_access_costs_one_miss() -> None:
    order = AccessOrder(range(5))
    assert run(order, forward(0, 1, 0, 2, 3)) == [True, True, False, True, True]


def test_inserted_access_that_is_also_expected_later() -> None:
    order = AccessOrder(range(6))
    assert run(order, forward(0, 5, 1, 2, 3)) == [True, False, False, True, True]


def test_second_backward_finds_its_place() -> None:
    order = AccessOrder(range(3))
    run(order, forward(0, 1, 2) + backward(2, 1, 0))
    assert [order.record(access) for access in backward(2, 1, 0)] == [False, True, True]


def test_alternating_iterations_cost_one_miss_each() -> None:
    order = AccessOrder(range(4))
    one, other = forward(0, 1, 3) + backward(3, 1, 0), forward(0, 2, 3) + backward(3, 2, 0)
    for iteration in (one, other):
        run(order, iteration)
    for iteration in (one, other) * 3:
        assert run(order, iteration).count(False) == 1


def test_failed_iteration_does_not_shorten_the_next() -> None:
    order = AccessOrder(range(4))
    run(order, ITERATION)
    run(order, ITERATION[:6])
    assert all(run(order, ITERATION))


def test_backward_that_always_ends_early_is_learned() -> None:
    order = AccessOrder(range(4))
    frozen_below = forward(0, 1, 2, 3) + backward(3, 2)
    for _ in range(3):
        assert all(run(order, frozen_below))
    assert order.upcoming() == (tuple(frozen_below), len(frozen_below))


def test_short_evaluation_is_learned() -> None:
    order = AccessOrder(range(4))
    for _ in range(3):
        run(order, forward(0, 1), Mode.EVAL)
    assert order.upcoming()[0] == tuple(forward(0, 1))


def test_iterations_without_accesses_teach_nothing() -> None:
    order = AccessOrder(range(2))
    for _ in range(3):
        order.begin(Mode.TRAIN)
    assert order.upcoming() == ((f(0), f(1), b(1), b(0)), 0)


def test_model_without_units() -> None:
    order = AccessOrder([])
    order.begin(Mode.TRAIN)
    assert order.upcoming() == ((), 0)
    assert not order.record(f(7))
    order.begin(Mode.TRAIN)
    assert order.record(f(7))


accesses = st.builds(Access, st.sampled_from(Phase), st.integers(0, 5))
train_iterations = st.lists(accesses, min_size=1, max_size=20)
events = st.lists(st.one_of(accesses, st.sampled_from(Mode)), max_size=80)


@given(st.integers(0, 5), events)
def test_anything_may_happen(n_units: int, happened: list[Access | Mode]) -> None:
    order = AccessOrder(range(n_units))
    n_accesses = 0
    for event in happened:
        if isinstance(event, Mode):
            order.begin(event)
        else:
            trace, position = order.upcoming()
            predicted = bool(trace) and trace[position % len(trace)] == event
            in_training = order.mode is Mode.TRAIN or event.phase is Phase.FORWARD
            was_hit = order.record(event)
            assert was_hit == predicted or not in_training
            n_accesses += 1
        trace, position = order.upcoming()
        assert 0 <= position <= len(trace)
    assert order.hits + order.misses == n_accesses


@given(events, train_iterations)
def test_a_repeated_iteration_is_predicted_whatever_came_before(
    before: list[Access | Mode], iteration: list[Access]
) -> None:
    iteration = [*iteration, b(0)]
    order = AccessOrder(range(4))
    for event in before:
        if isinstance(event, Mode):
            order.begin(event)
        else:
            order.record(event)
    for _ in range(2):  # the first one may be a random branch of what came before
        run(order, iteration)
    for _ in range(3):
        assert all(run(order, iteration))


@given(st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=1, max_size=6))
def test_interleaved_evaluations_never_cost_training_a_miss(evaluations: list[list[int]]) -> None:
    order = AccessOrder(range(4))
    for units in evaluations:
        run(order, forward(*units), Mode.EVAL)
        assert all(run(order, ITERATION))


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=20, max_size=20))
def test_random_branches_keep_most_predictions(choices: list[list[bool]]) -> None:
    """Four blocks of three units of which the middle one is one of two, chosen anew in every iteration."""
    order = AccessOrder(range(16))
    for chosen in choices:
        units = [unit for block, c in enumerate(chosen) for unit in (4 * block, 4 * block + 1 + c, 4 * block + 3)]
        run(order, forward(*units) + backward(*reversed(units)))
    assert order.hits > order.misses


def _ahead(order: AccessOrder, iterations: list[list[int]], window: int = 6) -> float:
    """The share of uses that are among the next `window` uses predicted, as a read-ahead of so many units sees them."""
    ahead = total = 0
    for units in iterations:
        order.begin(Mode.TRAIN)
        for access in forward(*units) + backward(*reversed(units)):
            trace, position = order.upcoming()
            ahead += access in [trace[(position + n) % len(trace)] for n in range(min(window, len(trace)))]
            order.record(access)
            total += 1
    return ahead / total


def _dropped(random: Random, share: float) -> list[int]:
    return [0, *(unit for unit in range(1, 23) if random.random() > share), 23]


ROUTES: dict[str, Callable[[Random], list[int]]] = {
    "one layer in ten is dropped": lambda random: _dropped(random, 0.1),
    "one layer in five is dropped": lambda random: _dropped(random, 0.2),
    "every other layer is dropped": lambda random: _dropped(random, 0.5),
    "one of two branches": lambda random: [2 * layer + random.randint(0, 1) for layer in range(12)],
    "an optional layer": lambda random: [0, 1, 2] if random.random() < 0.5 else [0, 2],
    "blocks called one to five times": lambda random: [u for u in range(6) for _ in range(random.randint(1, 5))],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_random_routes_keep_four_uses_in_five_ahead(route: Callable[[Random], list[int]]) -> None:
    """A peer threw its order away in every step of such models (PEER_DEEPSPEED section 4, number 10)."""
    random, order = Random(0), AccessOrder(range(24))
    _ahead(order, [route(random) for _ in range(4)])
    assert _ahead(order, [route(random) for _ in range(40)]) >= 0.8


def test_a_layer_that_is_never_used_again_is_forgotten() -> None:
    order = AccessOrder(range(4))
    run(order, ITERATION)
    fewer = forward(0, 1, 3) + backward(3, 1, 0)
    run(order, fewer)
    run(order, fewer)
    assert all(run(order, fewer))
