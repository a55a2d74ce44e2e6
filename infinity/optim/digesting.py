"""Checksums of what a kernel has just written, computed while the processor's caches hold it.

[Note: digests while bytes are warm]
xxh3 is as fast as memory is: some 10 GB/s per core for bytes that come from DRAM, half of that beside a computation on
all cores, and 20 to 40 GB/s for what lies in a cache. Of a chunk, some still does when its kernel has run, and nothing
when its turn at the drive has come; and the threads of the drives are back at the drive sooner. docs/design-notes.md
has what that gave.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from infinity.optim.kernel_threads import KernelThreads
from storage.checksums import Digests, block_parts

_LEAST_NBYTES = 4 << 20  # of a thread's share: 0.2 ms, several times what it costs to wake it


def digests_of(memory: memoryview, start: int, threads: KernelThreads) -> Digests:
    """Of bytes that will be written to a key from `start` on. The threads are those of the kernels.

    Raises:
        RuntimeError: the threads are closed.
    """
    stop = start + len(memory)
    edges = [start, *(b for _, b in block_parts(start, stop))]
    count = max(1, min(threads.count, len(memory) // _LEAST_NBYTES))
    cuts = [edges[number * (len(edges) - 1) // count] for number in range(count + 1)]
    shares: dict[int, Digests] = {}

    def take(first: int, last: int) -> None:
        shares[first] = Digests.of(memory[first - start : last - start], first)

    threads.run([partial(take, first, last) for first, last in pairwise(cuts)])
    return Digests(start, stop, [value for first in cuts[:-1] for value in shares[first].values])


def no_digests(memory: memoryview, start: int) -> None:
    """Of bytes that no checksum guards, or for which the store computes it."""
