"""Checksums of what kernels have just written."""

from __future__ import annotations

import numpy as np
import pytest

from infinity.optim.digesting import digests_of
from infinity.optim.kernel_threads import KernelThreads
from storage.checksums import BLOCK_NBYTES, Digests


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [4096, BLOCK_NBYTES, 4 << 20, (13 << 20) + 4096])
@pytest.mark.parametrize("start", [0, 3 * 4096])
def test_threads_share_the_work_and_change_nothing(threads: int, nbytes: int, start: int) -> None:
    memory = memoryview(np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8))
    with KernelThreads(threads) as several:
        assert digests_of(memory, start, several) == Digests.of(memory, start)
