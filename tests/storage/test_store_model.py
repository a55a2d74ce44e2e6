"""Random overlapping reads and writes against plain bytes, in submission order, over every backend."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.backends.faulty import Fault, FaultyBackend
from storage.backends.probe import probe_direct
from storage.errors import SwapFullError
from storage.pool import HostPool, Lease
from storage.store import ShardStore, StorageOptions
from storage.types import Op, Priority, Ticket
from tests.storage.helpers import PAGE, TAG, WAIT_S, filled

_PAGES = 12
_KEYS = ("a", "b")


@st.composite
def _operations(draw: st.DrawFn) -> tuple[str, str, int, int, Priority]:
    first = draw(st.integers(0, _PAGES - 1))
    pages = draw(st.integers(1, _PAGES - first))
    verb = draw(st.sampled_from(["read", "write", "write fails"]))
    return verb, draw(st.sampled_from(_KEYS)), first, pages, draw(st.sampled_from(list(Priority)))


class Model:
    """Bytes as they would be if every operation ended before the next was submitted; None where a write failed."""

    def __init__(self) -> None:
        self.pages: dict[str, list[bytes | None]] = {key: [bytes(PAGE)] * _PAGES for key in _KEYS}

    def write(self, key: str, first: int, data: bytes | None, pages: int) -> None:
        for number in range(pages):
            self.pages[key][first + number] = data[number * PAGE : (number + 1) * PAGE] if data is not None else None

    def read(self, key: str, first: int, pages: int) -> bytes | None:
        span = self.pages[key][first : first + pages]
        return None if None in span else b"".join(page for page in span if page is not None)


@pytest.mark.parametrize("engine", ["direct", "buffered"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(_operations(), max_size=40))
def test_as_if_one_after_the_other(
    tmp_path: Path, engine: str, operations: list[tuple[str, str, int, int, Priority]]
) -> None:
    if engine == "direct" and (problem := probe_direct(tmp_path)):
        pytest.skip(problem)
    with TemporaryDirectory(dir=tmp_path) as folder:
        run(Path(folder), engine, operations)


def run(folder: Path, engine: str, operations: list[tuple[str, str, int, int, Priority]]) -> None:
    faulty: list[FaultyBackend] = []

    def wrap(backend: object) -> FaultyBackend:
        faulty.append(FaultyBackend(backend))  # type: ignore[arg-type]
        return faulty[-1]

    options = StorageOptions(engine=engine, block_nbytes=2 * PAGE, threads=4, free_margin_nbytes=0)
    pool, model = HostPool(64 << 20), Model()
    store = ShardStore.open([folder], 2 * _PAGES * PAGE, options=options, wrap_backend=wrap)
    try:
        with pool.lease(_PAGES * PAGE, "zeros") as zeros:
            for key in _KEYS:
                store.create(key, _PAGES * PAGE)
                store.submit_write(key, zeros.memory, tag=TAG)
            assert store.drain(WAIT_S)
        submitted = [submit(store, faulty[0], pool, model, number, one) for number, one in enumerate(operations)]
        assert store.drain(WAIT_S)
        for ticket, lease, expected, is_write in submitted:
            assert ticket.done
            if expected is None:
                assert isinstance(ticket.exception, SwapFullError)
            elif not is_write:
                assert ticket.exception is None
                assert lease.memory == expected
            lease.release()
    finally:
        store.close()
    pool.close(strict=True)


def submit(
    store: ShardStore,
    faulty: FaultyBackend,
    pool: HostPool,
    model: Model,
    number: int,
    operation: tuple[str, str, int, int, Priority],
) -> tuple[Ticket, Lease, bytes | None, bool]:
    verb, key, first, pages, priority = operation
    lease = filled(pool, pages * PAGE, number)
    if verb == "read":
        ticket = store.submit_read(key, lease.memory, offset=first * PAGE, priority=priority, tag=TAG)
        return ticket, lease, model.read(key, first, pages), False
    # A fault hits the request when it reaches the backend, which for a held one is later: choose it by its ticket.
    fails = verb == "write fails"
    name = f"write of {key} ({pages * PAGE} bytes at {first * PAGE})"
    data = None if fails else bytes(lease.memory)
    if fails:
        store.drain(WAIT_S)  # so that this request, and no other, meets the fault
        faulty.inject(Fault.NO_SPACE, op=Op.WRITE, when=lambda request: request.ticket.label == name)
    ticket = store.submit_write(key, lease.memory, offset=first * PAGE, priority=priority, tag=TAG)
    assert ticket.label == name
    model.write(key, first, data, pages)
    return ticket, lease, data, True
