"""Host memory for transfers and for shards that stay: exact sizes, page aligned, every byte accounted for.

Each lease is an anonymous memory map of its own size rounded up to a page, never to a power of two. A block that is
given back is kept for the next lease of the same size, already faulted in (and pinned, where there is a device to pin
it for); blocks of other sizes are unmapped when the capacity would be exceeded, so memory cannot fragment.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from storage.align import PAGE_NBYTES, align_up
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

    __slots__ = ("address", "memory", "nbytes", "unregister")

    def __init__(self, nbytes: int, memory: memoryview, register: Register | None) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.unregister = register(self.address, nbytes) if register is not None else None

    def unmap(self) -> None:
        """Drop the references; the map goes when nobody looks at it any more."""
        if self.unregister is not None:
            self.unregister()
            self.unregister = None
        self.memory = memoryview(b"")


class Lease:
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

    def release(self) -> None:
        """Give the block back. Idempotent. Views of the memory must not be used afterwards."""
        block, self._block = self._block, None
        if block is not None:
            self.memory = memoryview(b"")
            self._pool._take_back(block, self.owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class HostPool:
    """Leases of host memory up to a capacity. Thread safe; never waits.

    Args:
        capacity_nbytes: ceiling of leased and cached bytes together.
        register: pins a block, given address and size, and returns what unpins it (cudaHostRegister).
        huge_pages: advise the kernel to back large blocks with huge pages.
        map_memory: where a block of so many bytes comes from instead; simulations have no use for real memory.
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
            # What has to go to make room, so that cached and leased bytes together stay below the capacity.
            victims = [] if cached else self._evict(self._total_nbytes + size - self.capacity_nbytes)
            self.leased_nbytes += size
            self._holders[owner] += size
            self.peak_nbytes = max(self.peak_nbytes, self._total_nbytes)
        # Mapping and pinning take long for large blocks: outside the lock.
        for victim in victims:
            victim.unmap()
        return Lease(self, cached or self._map(size, owner), nbytes, owner)

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
    def _total_nbytes(self) -> int:
        return self.leased_nbytes + self.cached_nbytes

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

    def _map(self, size: int, owner: str) -> _Block:
        """A new block for bytes already charged."""
        try:
            return _Block(size, self._map_memory(size), self._register)
        except (OSError, MemoryError) as error:
            self._discharge(size, owner)
            raise PoolExhaustedError(
                f"{owner} needs {size} bytes of host memory, which the system refuses: {error}. "
                f"{self.leased_nbytes} bytes are leased. Lower the host budget"
            ) from error
        except BaseException:
            self._discharge(size, owner)
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
        with self._lock:
            self._discharge_locked(block.nbytes, owner)
            is_kept = not self._is_closed
            if is_kept:
                self._free.setdefault(block.nbytes, []).append(block)
                self.cached_nbytes += block.nbytes
        if not is_kept:
            block.unmap()
