from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import ClosedError, PoolExhaustedError
from storage.pool import HostPool, Lease, Loan
from tests.storage.helpers import MIB, PAGE, run_threads


def mapped(address: int) -> bool:
    """Whether an address is mapped in this process."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_exactly_what_was_asked_for_in_whole_pages(nbytes: int) -> None:
    pool = HostPool(8 * MIB)
    with pool.lease(nbytes, "a") as lease:
        assert len(lease.memory) == lease.nbytes == nbytes
        assert lease.block_nbytes == -(-nbytes // PAGE) * PAGE == pool.leased_nbytes
        assert lease.address % PAGE == 0
        assert np.frombuffer(lease.memory, "u1").ctypes.data == lease.address
        assert not lease.memory.readonly
    assert (pool.leased_nbytes, pool.cached_nbytes) == (0, lease.block_nbytes)
    pool.close(strict=True)
    assert pool.cached_nbytes == 0


def test_a_block_given_back_serves_the_next_lease_of_its_size() -> None:
    pool = HostPool(8 * PAGE)
    first = pool.lease(2 * PAGE, "a")
    address = first.address
    first.release()
    first.release()
    with pool.lease(PAGE + 1, "b") as second:
        assert second.address == address
        assert pool.cached_nbytes == 0
    pool.close()


def test_cached_blocks_of_other_sizes_go_when_room_is_needed() -> None:
    pool = HostPool(8 * PAGE, huge_pages=False)
    addresses = []
    for lease in [pool.lease(2 * PAGE, "a"), pool.lease(PAGE, "a"), pool.lease(PAGE, "a")]:
        addresses.append(lease.address)
        lease.release()
    large = pool.lease(6 * PAGE, "b")
    assert pool.leased_nbytes + pool.cached_nbytes <= 8 * PAGE
    assert pool.cached_nbytes == 2 * PAGE
    assert pool.peak_nbytes <= 8 * PAGE
    large.release()
    pool.close()


def test_closing_unmaps() -> None:
    pool = HostPool(64 * MIB)
    lease = pool.lease(32 * MIB, "a")
    address = lease.address
    lease.memory[0] = 1
    assert mapped(address)
    lease.release()
    assert mapped(address)
    pool.trim()
    assert not mapped(address)
    assert pool.cached_nbytes == 0


def test_a_block_that_somebody_still_looks_at_stays_mapped() -> None:
    pool = HostPool(64 * MIB)
    lease = pool.lease(PAGE, "a")
    view = lease.array("u1")
    view[:] = 7
    lease.release()
    pool.close()
    assert (view == 7).all()


def test_a_full_pool_says_who_holds_what() -> None:
    pool = HostPool(4 * PAGE)
    first, second = pool.lease(3 * PAGE, "unit 1"), pool.lease(PAGE, "unit 2")
    with pytest.raises(PoolExhaustedError, match=r"unit 3 needs 4096 bytes.*unit 1 12288, unit 2 4096"):
        pool.lease(1, "unit 3")
    assert pool.holders() == {"unit 1": 3 * PAGE, "unit 2": PAGE}
    first.release()
    second.release()
    assert pool.holders() == {}
    pool.close()


def test_a_closed_pool() -> None:
    pool = HostPool(4 * PAGE)
    lease = pool.lease(PAGE, "unit 1")
    with pytest.raises(ClosedError, match="unit 1"):
        pool.close(strict=True)
    pool.close()
    with pytest.raises(ClosedError, match="closed"):
        pool.lease(PAGE, "unit 2")
    lease.release()
    assert (pool.leased_nbytes, pool.cached_nbytes) == (0, 0)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        HostPool(PAGE).lease(-1, "a")


def test_views_as_numbers() -> None:
    pool = HostPool(PAGE)
    with pool.lease(64, "a") as lease:
        lease.array("f4")[:] = np.arange(16)
        assert lease.array("f4", 8, 2).tolist() == [2.0, 3.0]
        assert len(lease.array("f4", 8)) == 14
    pool.close()


class Registry:
    """Stands for cudaHostRegister."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        self.pinned[address] = nbytes
        return lambda: self.pinned.__delitem__(address)


def test_blocks_stay_pinned_while_cached_and_no_longer() -> None:
    registry = Registry()
    pool = HostPool(4 * PAGE, register=registry)
    lease = pool.lease(PAGE, "a")
    assert registry.pinned == {lease.address: PAGE}
    lease.release()
    assert registry.pinned
    pool.lease(4 * PAGE, "b").release()
    assert list(registry.pinned.values()) == [4 * PAGE]
    pool.close()
    assert not registry.pinned


def test_a_block_that_cannot_be_pinned_costs_nothing() -> None:
    def refuse(address: int, nbytes: int) -> Callable[[], None]:
        raise OSError("no memory may be locked")

    pool = HostPool(4 * PAGE, register=refuse)
    with pytest.raises(PoolExhaustedError, match=r"unit 1 needs 8192 bytes.*no memory may be locked"):
        pool.lease(2 * PAGE, "unit 1")
    assert (pool.leased_nbytes, pool.holders()) == (0, {})
    pool.close(strict=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5 * PAGE)), max_size=60))
def test_the_capacity_holds_whatever_happens(actions: list[tuple[int, int]]) -> None:
    pool = HostPool(10 * PAGE, huge_pages=False)
    leases: list[Lease] = []
    for slot, nbytes in actions:
        charge = -(-max(nbytes, 1) // PAGE) * PAGE
        if slot < len(leases):
            leases.pop(slot).release()
        elif sum(lease.block_nbytes for lease in leases) + charge > 10 * PAGE:
            with pytest.raises(PoolExhaustedError):
                pool.lease(nbytes, "x")
        else:
            leases.append(pool.lease(nbytes, "x"))
        assert pool.leased_nbytes == sum(lease.block_nbytes for lease in leases)
        assert pool.leased_nbytes + pool.cached_nbytes <= pool.peak_nbytes <= 10 * PAGE
        spans = sorted((lease.address, lease.address + lease.block_nbytes) for lease in leases)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for lease in leases:
        lease.release()
    pool.close(strict=True)


def test_leases_of_many_threads_never_share_memory() -> None:
    pool = HostPool(64 * PAGE)

    def work(number: int) -> None:
        choose = random.Random(number)
        for _ in range(150):
            with pool.lease(choose.randint(1, 8 * PAGE), str(number)) as lease:
                view = lease.array("u1")
                view[:] = number
                assert (view == number).all()

    run_threads(4, work)
    assert pool.leased_nbytes == 0
    assert pool.peak_nbytes <= 64 * PAGE
    pool.close(strict=True)


# Loans --------------------------------------------------------------------------------------------------------------


def test_a_loan_outlives_its_lease() -> None:
    """The bytes stay, nobody else gets the block, and only the lease counts against the capacity."""
    pool = HostPool(2 * PAGE)
    lease = pool.lease(PAGE, "shard")
    lease.memory[:5] = b"bytes"
    loan, address = lease.lend(), lease.address
    lease.release()
    assert (pool.leased_nbytes, pool.lent_nbytes, pool.cached_nbytes) == (0, PAGE, 0)
    others = [pool.lease(PAGE, "another") for _ in range(2)]
    assert address not in {other.address for other in others}
    with pytest.raises(PoolExhaustedError):
        pool.lease(1, "too much")
    assert bytes(loan.memory[:5]) == b"bytes"
    loan.release()
    loan.release()
    assert (pool.lent_nbytes, pool.cached_nbytes, pool.most_lent_nbytes) == (0, PAGE, PAGE)
    assert pool.peak_nbytes == 2 * PAGE
    for other in others:
        other.release()
    pool.close(strict=True)
    assert pool.cached_nbytes == 0


def test_a_lease_outlives_its_loans() -> None:
    pool = HostPool(PAGE)
    lease = pool.lease(PAGE, "shard")
    loans = [lease.lend(), lease.lend()]
    for loan in loans:
        loan.release()
    assert (pool.leased_nbytes, pool.lent_nbytes, pool.most_lent_nbytes) == (PAGE, 0, 0)
    lease.release()
    assert (pool.leased_nbytes, pool.cached_nbytes) == (0, PAGE)
    with pytest.raises(ClosedError, match="shard"):
        lease.lend()


def test_a_block_that_is_only_lent_is_used_again() -> None:
    pool = HostPool(0)  # nothing may be leased
    first = pool.lend(PAGE, "flat")
    address = np.frombuffer(first.memory, "u1").ctypes.data
    first.release()
    with pool.lend(PAGE - 1, "flat") as second:
        assert np.frombuffer(second.memory, "u1").ctypes.data == address
        assert len(second.memory) == PAGE - 1
    with pool.lend(3 * PAGE, "flat"), pytest.raises(PoolExhaustedError):
        pool.lease(PAGE, "shard")
    assert pool.peak_nbytes == 0
    pool.close(strict=True)
    with pytest.raises(ClosedError):
        pool.lend(PAGE, "flat")


def test_what_is_lent_when_the_pool_closes_goes_with_the_loan() -> None:
    pool = HostPool(2 * MIB)
    lease = pool.lease(MIB, "shard")
    loan, address = lease.lend(), lease.address
    lease.release()
    pool.close(strict=True)
    assert mapped(address)
    loan.release()
    assert not mapped(address)
    assert (pool.lent_nbytes, pool.cached_nbytes) == (0, 0)


def test_memory_that_is_looked_at_for_good_is_never_used_again() -> None:
    pool = HostPool(2 * MIB)
    lease = pool.lease(MIB, "shard")
    lease.memory[:5] = b"bytes"
    loan, address = lease.lend(), lease.address
    seen = loan.memory[:5]
    loan.abandon()
    assert pool.lent_nbytes == 0
    lease.release()
    assert (pool.leased_nbytes, pool.cached_nbytes) == (0, 0)
    with pool.lease(MIB, "another") as other:
        assert other.address != address
    assert bytes(seen) == b"bytes"
    del seen
    assert not mapped(address)


def test_a_loan_without_memory_costs_nothing() -> None:
    def refuse(nbytes: int) -> memoryview:
        raise MemoryError

    pool = HostPool(PAGE, map_memory=refuse)
    with pytest.raises(PoolExhaustedError, match="flat"):
        pool.lend(PAGE, "flat")
    assert pool.lent_nbytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lease", "lend", "own", "end", "return"]), st.integers(0, 9)), max_size=80))
def test_what_counts_stays_below_the_capacity(actions: list[tuple[str, int]]) -> None:
    """Whatever is lent beside it, and no two holders have the same memory."""
    pool = HostPool(6 * PAGE, huge_pages=False)
    leases: list[Lease] = []
    loans: list[Loan] = []
    for action, number in actions:
        if action == "lease" and pool.leased_nbytes + (number % 3 + 1) * PAGE <= 6 * PAGE:
            leases.append(pool.lease((number % 3 + 1) * PAGE, "x"))
            leases[-1].memory[:8] = len(leases).to_bytes(8, "little")
        elif action == "lend" and leases:
            loans.append(leases[number % len(leases)].lend())
        elif action == "own":
            loans.append(pool.lend((number % 3 + 1) * PAGE, "y"))
        elif action == "end" and leases:
            leases.pop(number % len(leases)).release()
        elif action == "return" and loans:
            loans.pop(number % len(loans)).release()
        assert pool.leased_nbytes == sum(lease.block_nbytes for lease in leases)
        counted = pool.leased_nbytes + pool.cached_nbytes + pool.lent_nbytes - pool.most_lent_nbytes
        assert counted <= pool.peak_nbytes <= 6 * PAGE
        addresses = {lease.address for lease in leases}
        assert len(addresses) == len(leases)
        only_lent = {np.frombuffer(loan.memory, "u1").ctypes.data: len(loan.memory) for loan in loans}
        assert pool.lent_nbytes == sum(n for address, n in only_lent.items() if address not in addresses)
    for holder in (*leases, *loans):
        holder.release()
    pool.close(strict=True)
    assert (pool.lent_nbytes, pool.cached_nbytes) == (0, 0)
