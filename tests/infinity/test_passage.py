"""Chunks that are read through the buffers of a passage: how many beside one another, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.devices.cpu import CpuDevice
from infinity.layout import SHARD_ALIGN_NUMEL, Chunk, FlatLayout
from infinity.observe.stalls import StallCause, StallClock
from infinity.passage import DEPTH, Passage
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Ticket

CHUNK_NUMEL = SHARD_ALIGN_NUMEL
CHUNKS = FlatLayout.pack([("weight", (6 * CHUNK_NUMEL,))]).cut(CHUNK_NUMEL)


class Reader:
    """A passage with room for two chunks of fp32, and what became of chunks: `read` or `used`, with their index."""

    def __init__(self) -> None:
        self.budget = TierBudget("passage", DEPTH * CHUNK_NUMEL * torch.float32.itemsize)
        self.pool = HostPool(1 << 20)
        stalls = StallClock(20.0, progress=lambda: 0, report=lambda: "")
        self.passage = Passage(
            store=None,
            pool=self.pool,
            budget=self.budget,
            chunk_numel=CHUNK_NUMEL,
            device=CpuDevice(1 << 20),
            stalls=stalls,
        )
        self.done: list[str] = []

    def read_all(self, dtype: torch.dtype) -> list[str]:
        def read(chunk: Chunk, memory: memoryview) -> Ticket:
            self.done.append(f"read {chunk.index}")
            values = torch.frombuffer(memory, dtype=dtype, count=chunk.numel)
            values.fill_(chunk.index)
            return Ticket.completed()

        def use(chunk: Chunk, values: torch.Tensor) -> None:
            assert values.eq(chunk.index).all()
            self.done.append(f"used {chunk.index}")

        self.passage.read_each(CHUNKS, dtype, read, use, StallCause.NVME_READ)
        return self.done


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    assert reader.budget.used_nbytes == reader.pool.leased_nbytes == 0
    reader.pool.close()


@pytest.mark.parametrize(("dtype", "n_at_once"), [(torch.float32, 2), (torch.bfloat16, 4)])
def test_as_many_are_read_as_there_is_room_for(reader: Reader, dtype: torch.dtype, n_at_once: int) -> None:
    done = reader.read_all(dtype)
    assert done[:n_at_once] == [f"read {number}" for number in range(n_at_once)]
    assert done[n_at_once] == "used 0"
    assert [what for what in done if what.startswith("used")] == [f"used {number}" for number in range(6)]
    assert reader.budget.peak_nbytes == reader.budget.limit_nbytes


def test_what_is_there_is_used_rather_than_waiting_for_a_write(reader: Reader) -> None:
    """A gradient that is being written holds one buffer; its write would end only after this."""
    writing = reader.passage.take(CHUNK_NUMEL * torch.float32.itemsize, "gradient")
    assert reader.read_all(torch.float32) == [f"{what} {number}" for number in range(6) for what in ("read", "used")]
    writing.release()
