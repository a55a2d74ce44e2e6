"""Host memory for transfers and for shards that stay: exact sizes, page aligned, every byte accounted for.

Each lease is an anonymous memory map of its own size rounded up to a page, never to a power of two. A block that is
given back is kept for the next lease of the same size, already faulted in (and pinned, where there is a device to pin
it for); blocks of other sizes are unmapped when the capacity would be exceeded, so memory cannot fragment.

[Note: loans]
A CPU computes where the shards are, so its flat buffers may lie in blocks of the pool: in those that hold a shard,
which saves the copy, or in one of their own, which saves the page faults of fresh memory. A *loan* keeps a block from
being used for something else, also after its lease has ended. What is only lent counts as memory of the device, which
has a budget of its own, and not against the capacity; nor do as many bytes of kept blocks as were ever lent at once.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.align import PAGE_NBYTES, align_up
from storage.closing import Releasing
from storage.errors import ClosedError, PoolExhaustedError
from storage.huge_pages import HUGE_NBYTES

Register = Callable[[int, int], Callable[[], None]]


def map_private(nbytes: int, *, huge_pages: bool) -> memoryview:
    """Memory of its own.

    Private memory, because only that gets huge pages everywhere: the first touch is five times faster than shared.

    Children do not inherit it, so a forked data loader neither copies pages on write nor keeps them alive.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, nbytes))
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        mapped.madvise(mmap.MADV_DONTFORK)
    if huge_pages and nbytes >= HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapped)


class _Block:
    """One memory map."""

    __slots__ = ("address", "is_abandoned", "is_leased", "memory", "n_loans", "nbytes", "unregister")

    def __init__(self, nbytes: int, memory: memoryview, register: Register | None) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.is_leased = True
        self.n_loans = 0
        self.is_abandoned = False
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.unregister = register(self.address, nbytes) if register is not None else None

    def unmap(self) -> None:
        """Drop the references; the map goes when nobody looks at it any more."""
        if self.unregister is not None:
            self.unregister()
            self.unregister = None
        self.memory = memoryview(b"")


class Lease(Releasing):
    """A block in somebody's hands. `memory` has exactly the bytes asked for."""

    __slots__ = ("_block", "_pool", "address", "memory", "nbytes", "owner")

    def __init__(self, pool: HostPool, block: _Block, nbytes: int, owner: str) -> None:
        self._pool = pool
        self._block: _Block | None = block
        self.nbytes = nbytes
        self.owner = owner
        self.address = block.address
        self.memory = block.memory[:nbytes]

    @property
    def block_nbytes(self) -> int:
        """Bytes charged: `nbytes` rounded up to a page."""
        return align_up(max(self.nbytes, 1), PAGE_NBYTES)

    def array(self, dtype: str, offset_nbytes: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """A numpy view of the memory."""
        return np.frombuffer(self.memory, dtype=dtype, offset=offset_nbytes, count=-1 if count is None else count)

    def lend(self) -> Loan:
        """A loan of the memory.

        Raises:
            ClosedError: the block has been given back.
        """
        if self._block is None:
            raise ClosedError(f"the memory of {self.owner} has been given back and cannot be lent")
        return self._pool._lend(self._block, self.nbytes)

    def release(self) -> None:
        """Give the block back. Idempotent. Views of the memory must not be used afterwards, but for those of a loan."""
        block, self._block = self._block, None
        if block is not None:
            self.memory = memoryview(b"")
            self._pool._take_back(block, self.owner)


class Loan(Releasing):
    """Memory that stays what it is until the loan is given back, whatever becomes of the lease; see [Note: loans]."""

    __slots__ = ("_block", "_pool", "memory")

    def __init__(self, pool: HostPool, block: _Block, nbytes: int) -> None:
        self._pool = pool
        self._block: _Block | None = block
        self.memory = block.memory[:nbytes]

    def release(self) -> None:
        """Give it back. Idempotent. Views of the memory must not be used afterwards."""
        self.memory = memoryview(b"")
        self._pool._end_loan(self)

    def abandon(self) -> None:
        """Give it back although views of it will be used: it is used for nothing else, and goes with them."""
        if self._block is not None:
            self._block.is_abandoned = True
        self.release()


class HostPool:
    """Leases of host memory up to a capacity. Thread safe; never waits.

    Args:
        capacity_nbytes: ceiling of leased and cached bytes together.
        register: pins a block, given address and size, and returns what unpins it (cudaHostRegister).
        huge_pages: advise the kernel to back large blocks with huge pages.
        map_memory: where a block of so many bytes comes from instead; simulations have no use for real memory.

    Attributes:
        leased_nbytes, cached_nbytes: in somebody's hands, and kept for the next lease.
        lent_nbytes: of blocks that are only lent, and the most there were at once.
        peak_nbytes: most bytes that counted against the capacity.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        register: Register | None = None,
        huge_pages: bool = True,
        map_memory: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.leased_nbytes = 0
        self.cached_nbytes = 0
        self.lent_nbytes = 0
        self.most_lent_nbytes = 0
        self.peak_nbytes = 0
        self._register = register
        self._map_memory = map_memory or partial(map_private, huge_pages=huge_pages)
        self._free: dict[int, list[_Block]] = {}  # by size; the size used longest ago first
        self._holders: Counter[str] = Counter()
        self._is_closed = False
        self._lock = threading.Lock()

    def holders(self) -> dict[str, int]:
        """Bytes leased, by owner."""
        with self._lock:
            return {owner: nbytes for owner, nbytes in self._holders.items() if nbytes}

    def lease(self, nbytes: int, owner: str) -> Lease:
        """A page-aligned block of `nbytes` rounded up to a page, with undefined content.

        Raises:
            ValueError: `nbytes` is negative.
            PoolExhaustedError: leases alone would exceed the capacity.
            ClosedError: the pool is closed.
        """
        if nbytes < 0:
            raise ValueError(f"{owner} asked for {nbytes} bytes of host memory; sizes are not negative")
        size = align_up(max(nbytes, 1), PAGE_NBYTES)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the host memory pool is closed")
            if self.leased_nbytes + size > self.capacity_nbytes:
                held = ", ".join(f"{who} {n}" for who, n in self._holders.most_common() if n)
                raise PoolExhaustedError(
                    f"{owner} needs {size} bytes of host memory, but {self.leased_nbytes} of {self.capacity_nbytes} "
                    f"are leased, by: {held or 'nobody'}"
                )
            cached = self._take_cached(size)
            if cached is not None:
                cached.is_leased = True
            self.leased_nbytes += size
            self._holders[owner] += size
            victims = self._make_room()
        # Mapping and pinning take long for large blocks: outside the lock.
        for victim in victims:
            victim.unmap()
        return Lease(self, cached or self._map(size, owner, partial(self._discharge, size, owner)), nbytes, owner)

    def lend(self, nbytes: int, owner: str) -> Loan:
        """A page-aligned block that is lent and nothing else, with undefined content; see [Note: loans].

        Raises:
            PoolExhaustedError: the system has no memory.
            ClosedError: the pool is closed.
        """
        size = align_up(max(nbytes, 1), PAGE_NBYTES)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the host memory pool is closed")
            block = self._take_cached(size)
            self._count_lent(size)
            victims = self._make_room()
        for victim in victims:
            victim.unmap()
        if block is None:
            block = self._map(size, owner, partial(self._uncount_lent, size))
            block.is_leased = False
        block.n_loans += 1  # nobody else knows the block yet
        return Loan(self, block, nbytes)

    def trim(self) -> None:
        """Unmap every cached block."""
        with self._lock:
            victims = self._evict(self.cached_nbytes)
        for victim in victims:
            victim.unmap()

    def close(self, *, strict: bool = False) -> None:
        """Unmap what is cached; leases given back later are unmapped at once. Idempotent.

        Raises:
            ClosedError: with `strict`, when leases are still out; it names their owners.
        """
        with self._lock:
            self._is_closed = True
            victims = self._evict(self.cached_nbytes)
            held = {owner: nbytes for owner, nbytes in self._holders.items() if nbytes}
        for victim in victims:
            victim.unmap()
        if strict and held:
            raise ClosedError(f"the host memory pool was closed while leases were out: {held}")

    @property
    def _counted_nbytes(self) -> int:
        """Bytes that count against the capacity."""
        return self.leased_nbytes + self.cached_nbytes + self.lent_nbytes - self.most_lent_nbytes

    def _make_room(self) -> list[_Block]:
        """Kept blocks that have to go so that what counts, with a block that was just charged, fits the capacity."""
        victims = self._evict(self._counted_nbytes - self.capacity_nbytes)
        self.peak_nbytes = max(self.peak_nbytes, self._counted_nbytes)
        return victims

    def _count_lent(self, size: int) -> None:
        self.lent_nbytes += size
        self.most_lent_nbytes = max(self.most_lent_nbytes, self.lent_nbytes)

    def _uncount_lent(self, size: int) -> None:
        with self._lock:
            self.lent_nbytes -= size

    def _take_cached(self, size: int) -> _Block | None:
        blocks = self._free.pop(size, None)
        if not blocks:
            return None
        self.cached_nbytes -= size
        block = blocks.pop()
        if blocks:
            self._free[size] = blocks  # now the size used last: evicted last
        return block

    def _evict(self, nbytes: int) -> list[_Block]:
        """Take cached blocks out until at least `nbytes` are gone; the caller unmaps them."""
        victims = []
        for size in list(self._free):
            blocks = self._free[size]
            while blocks and nbytes > 0:
                victims.append(blocks.pop())
                self.cached_nbytes -= size
                nbytes -= size
            if not blocks:
                del self._free[size]
        return victims

    def _map(self, size: int, owner: str, discharge: Callable[[], None]) -> _Block:
        """A new block for bytes already charged, which `discharge` undoes."""
        try:
            return _Block(size, self._map_memory(size), self._register)
        except (OSError, MemoryError) as error:
            discharge()
            raise PoolExhaustedError(
                f"{owner} needs {size} bytes of host memory, which the system refuses: {error}. "
                f"{self.leased_nbytes} bytes are leased. Lower the host budget"
            ) from error
        except BaseException:
            discharge()
            raise

    def _discharge(self, size: int, owner: str) -> None:
        with self._lock:
            self._discharge_locked(size, owner)

    def _discharge_locked(self, size: int, owner: str) -> None:
        self.leased_nbytes -= size
        self._holders[owner] -= size
        if not self._holders[owner]:
            del self._holders[owner]

    def _take_back(self, block: _Block, owner: str) -> None:
        """A lease has ended."""
        with self._lock:
            self._discharge_locked(block.nbytes, owner)
            block.is_leased = False
            if block.n_loans:
                self._count_lent(block.nbytes)
                return
            is_kept = self._keep(block)
        if not is_kept:
            block.unmap()

    def _lend(self, block: _Block, nbytes: int) -> Loan:
        with self._lock:
            block.n_loans += 1
        return Loan(self, block, nbytes)

    def _end_loan(self, loan: Loan) -> None:
        with self._lock:
            block = loan._block
            if block is None:
                return
            loan._block = None  # together with what it counts: a Ctrl-C before leaves both for the next try
            block.n_loans -= 1
            if block.is_leased or block.n_loans:
                return
            self.lent_nbytes -= block.nbytes
            is_kept = self._keep(block)
        if not is_kept:
            block.unmap()

    def _keep(self, block: _Block) -> bool:
        """Keep a block that nobody uses for the next who needs one of its size. False where it has to go."""
        if self._is_closed or block.is_abandoned:
            return False
        self._free.setdefault(block.nbytes, []).append(block)
        self.cached_nbytes += block.nbytes
        return True
