"""The update pipeline on a virtual clock: depth, order, budgets, failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.order import Phase
from infinity.residency import CopyState
from infinity.shard_io import SubmitWrite
from infinity.testing import SimulatedStore
from storage.errors import ReadError, SwapFullError, WriteError
from storage.types import Op, Priority, Ticket, TrafficTag
from tests.scheduler.simulation import Simulation

PAGE = SHARD_ALIGN_NUMEL * 4


async def test_reading_and_writing_of_chunks_overlap(tmp_path: Path) -> None:
    store = SimulatedStore(read_bytes_per_s=PAGE, write_bytes_per_s=PAGE)
    simulation = Simulation(tmp_path, [8], window_nbytes=8 * PAGE, overlapped=False, store=store)
    await simulation.train_step()
    await simulation.train_step()
    await simulation.pipeline.drain()
    reads = [t for t in store.log if t.op is Op.READ and t.tag == TrafficTag("state", 1)]
    writes = [t for t in store.log if t.op is Op.WRITE and t.tag == TrafficTag("state", 1)]
    assert len(reads) == len(writes) == 8
    assert reads[1].start_s < writes[0].end_s
    assert reads[2].start_s < writes[1].end_s
    await simulation.close()


async def test_what_updates_read_goes_first_while_somebody_waits_for_them(tmp_path: Path) -> None:
    store = SimulatedStore(read_bytes_per_s=PAGE, write_bytes_per_s=PAGE / 4)
    simulation = Simulation(tmp_path, [6], window_nbytes=8 * PAGE, overlapped=False, store=store, pipeline_chunks=3)
    for _ in range(2):
        await simulation.train_step()
        await simulation.pipeline.drain()
    step = asyncio.create_task(simulation.train_step())
    while not any("state" in transfer for transfer in store.describe_in_flight()):
        await asyncio.sleep(0.1)
    simulation.pipeline.hasten()
    while not any(t.op is Op.READ and t.tag == TrafficTag("state", 2) for t in store.log[:-3]):
        await asyncio.sleep(0.1)
    simulation.pipeline.relax()
    await step
    await simulation.pipeline.drain()
    reads = [t.priority for t in store.log if t.op is Op.READ and t.tag.kind == "state"]
    demands = reads.count(Priority.DEMAND)
    assert demands >= 3  # what was being read, and what has been submitted since
    assert reads == [Priority.READ_AHEAD] * 6 + [Priority.DEMAND] * demands + [Priority.READ_AHEAD] * (6 - demands)
    assert demands < 6
    await simulation.close()


@pytest.mark.parametrize("chunks", [1, 2, 3])
async def test_the_pipeline_budget_is_a_ceiling(tmp_path: Path, chunks: int) -> None:
    simulation = Simulation(tmp_path, [5, 3], window_nbytes=8 * PAGE, pipeline_chunks=chunks)
    for _ in range(3):
        await simulation.train_step()
    assert simulation.pipeline_budget.peak_nbytes <= simulation.pipeline_budget.limit_nbytes
    await simulation.close()


class RefusingStore(SimulatedStore):
    """Has no room for parameters once it is told so."""

    is_full = False

    @property
    def submit_write(self) -> SubmitWrite:
        submit = super().submit_write

        def refuse(key: str, memory: memoryview, **said: Any) -> Ticket:
            if self.is_full and said["tag"].kind == "param":
                raise SwapFullError("no room for parameters")
            return submit(key, memory, **said)

        return refuse


async def test_memory_is_not_given_back_while_it_is_written_although_another_write_is_refused(tmp_path: Path) -> None:
    store = RefusingStore(read_bytes_per_s=PAGE, write_bytes_per_s=PAGE / 100)
    # More than a mebibyte, so that chunks write their parameters themselves.
    simulation = Simulation(tmp_path, [80], window_nbytes=80 * PAGE, store=store, pipeline_chunks=1)
    await simulation.train_step()
    await simulation.pipeline.drain()
    store.is_full = True
    step = asyncio.create_task(simulation.train_step())
    most = 0
    while not step.done():
        most = max(most, sum(text.startswith("write") for text in store.describe_in_flight()))
        await asyncio.sleep(0.1)
    assert most == 2  # of as many buffers as there are, for the parameters are in their host copy
    with pytest.raises(SwapFullError):
        await step
    await simulation.pipeline.drain()
    assert simulation.pipeline_budget.used_nbytes == 0


async def test_the_first_step_reads_no_state(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [2, 2], window_nbytes=8 * PAGE)
    await simulation.train_step()
    await simulation.train_step()
    assert simulation.read_nbytes(0, "state") == 0
    assert simulation.read_nbytes(1, "state") == 4 * PAGE
    await simulation.close()


async def test_every_update_ends_up_in_the_store(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [3, 1, 2], window_nbytes=4 * PAGE)
    for _ in range(3):
        await simulation.train_step()
    await simulation.settle()
    for group in simulation.groups:
        values = memoryview(simulation.store.content(group.key)).cast("f")
        assert set(values) == {3.0}
    await simulation.close()


@pytest.mark.parametrize("overlapped", [True, False])
async def test_a_failed_write_fails_the_update_keeps_the_bytes_and_holds_nothing_else(
    tmp_path: Path, overlapped: bool
) -> None:
    def failure(op: Op, key: str) -> BaseException | None:
        return WriteError("disk died") if op is Op.WRITE and key == "unit1" else None

    simulation = Simulation(
        tmp_path, [1] * 3, window_nbytes=3 * PAGE, overlapped=overlapped, store=SimulatedStore(failure=failure)
    )
    await simulation.train_step()
    await simulation.pipeline.drain()
    failed = simulation.updates[1]
    with pytest.raises(WriteError, match="disk died"):
        failed.written.result()
    assert [type(error) for error in simulation.failures] == [WriteError]
    assert simulation.pipeline_budget.used_nbytes == 0
    if overlapped:
        assert simulation.copies[1].state is CopyState.FAILED
        assert simulation.copies[1].block is not None
    with pytest.raises(WriteError, match="disk died"):
        await simulation.use(1, Phase.FORWARD)
    for copy in simulation.copies:
        copy.lost_update = None
    await simulation.close()


class _OpenFence:
    """A copy from the device that ends when it is told to. Nobody may hold a thread for it."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def end(self) -> None:
        self._over.set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            raise TimeoutError("a thread was held for a copy")


async def test_a_gradient_on_its_way_keeps_no_other_update_waiting(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1, 1], window_nbytes=2 * PAGE)
    fence = _OpenFence()
    late = simulation.submit_update(0)
    late.gradient.fences.append(fence)
    await simulation.submit_update(1).written
    assert not late.computed.done
    fence.end()
    await late.written
    assert not simulation.failures
    await simulation.close()


async def test_a_failed_read_of_a_chunk_is_not_over_before_the_others_into_its_memory(tmp_path: Path) -> None:
    """Memory that a transfer still fills must not be given to anybody else."""

    def failure(op: Op, key: str) -> BaseException | None:
        return ReadError("no state") if op is Op.READ and "state" in key else None

    def duration_s(op: Op, key: str, nbytes: int) -> float:
        return 1.0 if "state" in key or op is Op.WRITE else 50.0

    store = SimulatedStore(failure=failure, duration_s=duration_s)
    simulation = Simulation(tmp_path, [1], window_nbytes=PAGE, overlapped=False, store=store)
    await simulation.train_step()
    with pytest.raises(ReadError, match="no state"):
        await simulation.train_step()
    assert store.describe_in_flight() == []  # nor is anything read ahead of an update that was lost
    await simulation.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_one_chunk_is_read_one_computed_and_one_written_at_a_time(tmp_path: Path, depth: int) -> None:
    """While the kernel works on chunk c, c+1 is being read and c-1 written, as far as the budget goes."""
    seen: list[list[str]] = []
    store = SimulatedStore(duration_s=lambda op, key, nbytes: (1.0 if op is Op.READ else 1.1) * ("state" in key))
    simulation = Simulation(
        tmp_path,
        [8],
        window_nbytes=8 * PAGE,
        keep_at_boundary=[0],
        pipeline_nbytes=depth * PAGE,
        store=store,
        on_compute=lambda: seen.append([what for what in store.describe_in_flight() if "state" in what]),
    )
    await simulation.train_step()
    await simulation.pipeline.drain()
    seen.clear()
    await simulation.train_step()
    await simulation.close()
    assert len(seen) == 8
    for chunk, in_flight in list(enumerate(seen))[1:]:
        before = [f"write of unit0/state{chunk - 1}"] if depth >= 2 else []
        after = [f"read of unit0/state{chunk + 1}"] if depth >= 3 and chunk < 7 else []
        assert sorted(in_flight) == sorted(before + after)
