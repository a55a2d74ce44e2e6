"""Host memory and its reservation are held and given back together, also when one of them cannot be had."""

from __future__ import annotations

import pytest

from infinity.host_block import HostBlock
from storage.budget import TierBudget
from storage.errors import ClosedError, PoolExhaustedError
from storage.pool import HostPool

NBYTES = 8192


def _no_memory(nbytes: int) -> memoryview:
    raise MemoryError(f"{nbytes} bytes")


def test_both_are_given_back_once() -> None:
    pool, budget = HostPool(NBYTES), TierBudget("window", NBYTES)
    reservation = budget.try_reserve(NBYTES, "a shard")
    assert reservation is not None
    block = HostBlock.take(pool, reservation, "a shard")
    assert len(block.memory) == NBYTES
    assert (pool.leased_nbytes, budget.used_nbytes) == (NBYTES, NBYTES)
    block.release()
    block.release()
    assert (pool.leased_nbytes, budget.used_nbytes) == (0, 0)
    pool.close()


def test_a_reservation_without_memory_is_given_back() -> None:
    budget = TierBudget("window", NBYTES)
    closed = HostPool(NBYTES)
    closed.close()
    for pool, error in ((HostPool(NBYTES, map_memory=_no_memory), PoolExhaustedError), (closed, ClosedError)):
        reservation = budget.try_reserve(NBYTES, "a shard")
        assert reservation is not None
        with pytest.raises(error):
            HostBlock.take(pool, reservation, "a shard")
        assert budget.used_nbytes == 0
        assert pool.leased_nbytes == 0
