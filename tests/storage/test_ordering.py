from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage.ordering import KeyOrder, Operation
from storage.types import Op, Priority, Ticket
from tests.storage.helpers import TAG

_SPANS = st.tuples(st.sampled_from(list(Op)), st.integers(0, 12), st.integers(1, 6))


def _operation(op: Op, start: int, nbytes: int) -> Operation:
    return Operation(op, "key", start, memoryview(bytearray(nbytes)), Priority.WRITE, TAG, nbytes, Ticket())


def _conflict(one: Operation, other: Operation) -> bool:
    overlap = one.start < other.stop and other.start < one.stop
    return overlap and Op.WRITE in (one.op, other.op)


def test_reads_do_not_wait_for_reads() -> None:
    order = KeyOrder()
    assert order.add(_operation(Op.READ, 0, 8))
    assert order.add(_operation(Op.READ, 0, 8))


def test_a_write_waits_for_everything_before_it_that_overlaps() -> None:
    order = KeyOrder()
    first, second, apart = (_operation(Op.READ, start, 4) for start in (0, 2, 8))
    for read in (first, second, apart):
        order.add(read)
    write = _operation(Op.WRITE, 0, 4)
    assert not order.add(write)
    assert order.remove(apart, None) == []
    assert order.remove(first, None) == []
    assert order.remove(second, None) == [write]


@given(st.lists(_SPANS, max_size=12), st.randoms())
def test_conflicting_operations_start_in_submission_order(spans: list[tuple[Op, int, int]], random: object) -> None:
    order = KeyOrder()
    operations = [_operation(*span) for span in spans]
    running = [operation for operation in operations if order.add(operation)]
    ended: list[Operation] = []
    while running:
        for number, operation in enumerate(operations):
            if operation in running:
                before = [o for o in operations[:number] if _conflict(o, operation)]
                assert all(o in ended for o in before)
        operation = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
        ended.append(operation)
        running += order.remove(operation, None)
    assert len(ended) == len(operations)
    assert order.operations == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=12))
def test_lost_spans_are_exactly_those_whose_last_write_failed(writes: list[tuple[int, int, bool]]) -> None:
    order = KeyOrder()
    model: list[Exception | None] = [None] * 20
    for number, (start, nbytes, fails) in enumerate(writes):
        operation = _operation(Op.WRITE, start, nbytes)
        error = OSError(number) if fails else None
        order.add(operation)
        order.remove(operation, error)
        model[start : start + nbytes] = [error] * nbytes
    for at, error in enumerate(model):
        found = order.lost_in(at, at + 1)
        assert (type(found), str(found)) == (type(error), str(error))
        assert found is None or found is not error  # whoever raises it keeps nothing alive in the order
