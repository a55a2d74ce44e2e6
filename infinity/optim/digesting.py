"""Checksums of what a kernel has just written, computed while the processor's caches hold it.

[Note: digests while bytes are warm]
xxh3 is as fast as memory is: some 10 GB/s per core for bytes that come from DRAM, half of that beside a computation on
all cores, and 20 to 40 GB/s for what lies in a cache. The bytes of an update do when its kernel has run, and no longer
when their turn at the drive has come.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from infinity.optim.kernel_threads import KernelThreads
from storage.checksums import Digests, block_parts, xxh3_of

_LEAST_NBYTES = 4 << 20  # of a thread's share: 0.2 ms, several times what it costs to wake it


def digests_of(memory: memoryview, start: int, threads: KernelThreads) -> Digests:
    """Of bytes that will be written to a key from `start` on. The threads are those of the kernels.

    Raises:
        RuntimeError: the threads are closed.
    """
    stop = start + len(memory)
    parts = block_parts(start, stop)
    values = [0] * len(parts)

    def fill(first: int, last: int) -> None:
        for number in range(first, last):
            a, b = parts[number]
            values[number] = xxh3_of(memory[a - start : b - start])

    count = max(1, min(threads.count, len(memory) // _LEAST_NBYTES))
    cuts = [number * len(parts) // count for number in range(count + 1)]
    threads.run([partial(fill, first, last) for first, last in pairwise(cuts)])
    return Digests(start, stop, values)
