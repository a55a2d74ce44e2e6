"""Checksums that whoever made the bytes of a write brings along."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.checksums import BLOCK_NBYTES, Digests, block_parts
from storage.errors import IntegrityError
from storage.pool import HostPool
from storage.store import ShardStore
from tests.storage.conftest import MakeStore
from tests.storage.helpers import PAGE, TAG, failure, filled, finish

_PAGES = 2 * BLOCK_NBYTES // PAGE + 5
_SPANS = st.tuples(st.integers(0, _PAGES - 1), st.integers(1, _PAGES)).map(lambda s: (s[0], min(s[0] + s[1], _PAGES)))


@given(st.integers(0, 5 * BLOCK_NBYTES), st.integers(1, 5 * BLOCK_NBYTES))
def test_parts_are_what_blocks_have_of_a_span(start: int, nbytes: int) -> None:
    parts = block_parts(start, start + nbytes)
    assert (parts[0][0], parts[-1][1]) == (start, start + nbytes)
    assert all(stop == following for (_, stop), (following, _) in pairwise(parts))
    assert all(a < b and a // BLOCK_NBYTES == (b - 1) // BLOCK_NBYTES for a, b in parts)
    assert all(a % BLOCK_NBYTES == 0 for a, _ in parts[1:])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=st.lists(_SPANS, min_size=1, max_size=8))
def test_a_write_notes_them_as_if_it_had_computed_them(
    store: ShardStore, pool: HostPool, spans: list[tuple[int, int]]
) -> None:
    nbytes = _PAGES * PAGE
    for key in ("brought", "computed"):
        store.create(key, nbytes)
    try:
        for number, (first, last) in enumerate(spans):
            with filled(pool, (last - first) * PAGE, number) as lease:
                start, memory = first * PAGE, lease.memory[: (last - first) * PAGE]
                digests = Digests.of(memory, start)
                finish(store.submit_write("brought", memory, offset=start, tag=TAG, digests=digests))
                finish(store.submit_write("computed", memory, offset=start, tag=TAG))
        brought, computed = (store._keys[key].checksums for key in ("brought", "computed"))
        assert brought is not None and computed is not None
        assert brought.dump() == computed.dump()
        with pool.lease(nbytes, "target") as target:
            for first, last in spans:
                memory = target.memory[: (last - first) * PAGE]
                finish(store.submit_read("brought", memory, offset=first * PAGE, tag=TAG))
    finally:
        for key in ("brought", "computed"):
            store.delete(key)


@pytest.mark.parametrize("at", [0, BLOCK_NBYTES - 1, BLOCK_NBYTES, _PAGES * PAGE - 1])
def test_what_changes_bytes_before_they_are_written_is_caught(store: ShardStore, pool: HostPool, at: int) -> None:
    """A checksum that is computed when bytes move would be one of the wrong bytes."""
    store.create("a", _PAGES * PAGE)
    with filled(pool, _PAGES * PAGE, 1) as source, pool.lease(_PAGES * PAGE, "target") as target:
        digests = Digests.of(source.memory, 0)
        source.array("u1")[at] ^= 1
        finish(store.submit_write("a", source.memory, tag=TAG, digests=digests))
        error = failure(store.submit_read("a", target.memory, tag=TAG))
        assert isinstance(error, IntegrityError)
        assert error.offset == at // BLOCK_NBYTES * BLOCK_NBYTES


def test_digests_of_other_bytes_are_refused(store: ShardStore, pool: HostPool) -> None:
    store.create("a", 4 * PAGE)
    with filled(pool, 2 * PAGE, 1) as source, pool.lease(PAGE, "target") as target:
        finish(store.submit_write("a", source.memory, tag=TAG))
        for digests in (Digests.of(source.memory, PAGE), Digests.of(source.memory[:PAGE], 0)):
            message = f"digests of bytes {digests.start} to {digests.stop} for a write of 8192 bytes at 0 of key 'a'"
            with pytest.raises(ValueError, match=message):
                store.submit_write("a", source.memory, tag=TAG, digests=digests)
        finish(store.submit_read("a", target.memory, tag=TAG))
    with pytest.raises(ValueError, match="1 digests for bytes 0 to 262145: 2 are needed"):
        Digests(0, BLOCK_NBYTES + 1, [7])


def test_a_store_without_checksums_needs_none(open_store: MakeStore, pool: HostPool) -> None:
    store = open_store(options={"checksum": "none"})
    assert not store.notes_digests
    store.create("a", PAGE)
    with filled(pool, PAGE, 1) as source:
        finish(store.submit_write("a", source.memory, tag=TAG, digests=Digests.of(source.memory, 0)))
        finish(store.submit_read("a", source.memory, tag=TAG))
