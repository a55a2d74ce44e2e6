"""The read-ahead scheduler on a virtual clock: order, budgets, timing, mispredictions, failures."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.order import Mode, Phase
from infinity.residency import CopyState
from infinity.testing import SimulatedStore
from storage.errors import ReadError
from storage.types import Op, Priority, Ticket, TrafficTag
from tests.scheduler.simulation import Simulation

PAGE = SHARD_ALIGN_NUMEL * 4


async def test_reads_of_the_next_units_are_under_way_before_a_computation_ends(tmp_path: Path) -> None:
    store = SimulatedStore(read_bytes_per_s=PAGE / 0.5)
    simulation = Simulation(tmp_path, [1] * 6, window_nbytes=3 * PAGE, store=store)
    await simulation.train_step()
    reads = {(t.key, t.submitted_s) for t in store.log if t.op is Op.READ and t.tag.kind == "param"}
    forward = [use for use in simulation.uses if use.access.phase is Phase.FORWARD]
    for use, following in itertools.pairwise(forward):
        submitted = min(at for key, at in reads if key == f"unit{following.access.unit}")
        assert submitted < use.end_s
    await simulation.close()


async def test_fast_storage_hides_behind_computation(tmp_path: Path) -> None:
    """With reads of half a computation's length, only the very first unit is waited for."""
    store = SimulatedStore(read_bytes_per_s=PAGE / 0.5, write_bytes_per_s=PAGE / 0.2)
    simulation = Simulation(tmp_path, [1] * 6, window_nbytes=4 * PAGE, store=store, keep_at_turn=[5])
    await simulation.train_step()
    uses = simulation.uses
    waited = [after.ready_s - before.end_s for before, after in itertools.pairwise(uses)]
    assert max(waited) == pytest.approx(0.0, abs=1e-6)
    assert simulation.read_ahead.counts["demand"] <= 1
    await simulation.close()


async def test_the_window_is_a_ceiling_and_reads_keep_their_order(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [3, 1, 2, 1, 3], window_nbytes=4 * PAGE, overlapped=False)
    await simulation.train_step()
    assert simulation.window.peak_nbytes <= 4 * PAGE
    reads = [t.key for t in simulation.store.log if t.op is Op.READ and t.tag.kind == "param" and t.nbytes > PAGE]
    assert reads[:3] == ["unit0", "unit2", "unit4"]
    await simulation.close()


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("read_s", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("write_s", [0.01, 1.0, 30.0])
async def test_bytes_read_do_not_depend_on_timing(
    tmp_path: Path, overlapped: bool, read_s: float, write_s: float
) -> None:
    def duration_s(op: Op, key: str, nbytes: int) -> float:
        return read_s if op is Op.READ else write_s

    simulation = Simulation(
        tmp_path,
        [1] * 6,
        window_nbytes=3 * PAGE,
        overlapped=overlapped,
        keep_at_turn=[4, 5],
        keep_at_boundary=[0, 1],
        store=SimulatedStore(duration_s=duration_s),
    )
    for _ in range(3):
        await simulation.train_step()
    in_step = 0 if overlapped else 4  # without a copy, an update reads the parameters again
    assert simulation.read_nbytes(0) == (6 + 4 + in_step) * PAGE
    assert simulation.read_nbytes(1) == simulation.read_nbytes(2) == (4 + 4 + in_step) * PAGE
    await simulation.close()


async def test_nothing_of_the_next_iteration_is_read_before_the_step_is_submitted(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 3, window_nbytes=6 * PAGE, overlapped=False)
    simulation.begin()
    for unit in (0, 1, 2):
        await simulation.use(unit, Phase.FORWARD)
    for unit in (2, 1, 0):
        await simulation.use(unit, Phase.BACKWARD)
    reads = simulation.read_ahead.counts["ahead"]
    assert reads == 6
    await simulation.settle()
    assert simulation.read_ahead.counts["ahead"] == reads
    await simulation.close()


async def test_reads_go_on_into_the_next_iteration_once_the_step_is_submitted(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 4, window_nbytes=4 * PAGE)
    await simulation.train_step()
    await simulation.pipeline.drain()
    present = [copy.state for copy in simulation.copies]
    assert CopyState.ABSENT not in present
    for copy in simulation.copies:
        await copy.ticket
    assert simulation.read_nbytes(1) == 4 * PAGE
    await simulation.close()


async def test_a_misprediction_costs_one_demand_read(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 6, window_nbytes=3 * PAGE)
    await simulation.train_step()
    before = simulation.read_ahead.counts["demand"]
    simulation.begin()
    for unit in (0, 1, 4, 5):  # 2 and 3 are skipped
        await simulation.use(unit, Phase.FORWARD)
    assert simulation.read_ahead.counts["demand"] == before + 1
    await simulation.close()


async def test_a_demand_overtakes_reads_ahead(tmp_path: Path) -> None:
    store = SimulatedStore(read_bytes_per_s=PAGE)
    simulation = Simulation(tmp_path, [1] * 8, window_nbytes=8 * PAGE, store=store)
    simulation.begin()
    await simulation.use(0, Phase.FORWARD)
    queued = [copy for copy in simulation.copies if copy.state is CopyState.READING]
    assert len(queued) > 1
    store.create("elsewhere", PAGE)
    memory = simulation.pool.lease(PAGE, "elsewhere")
    ticket = store.submit_read("elsewhere", memory.memory, priority=Priority.DEMAND, tag=TrafficTag("param", 0))
    await ticket
    assert store.log[-1].key == "elsewhere"
    assert not queued[-1].ticket.done
    memory.release()
    await simulation.close()


async def test_the_copy_needed_last_gives_way(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 6, window_nbytes=2 * PAGE)
    simulation.begin()
    await simulation.use(0, Phase.FORWARD)
    for copy in simulation.copies[1:3]:
        await copy.ticket
    await simulation.read_ahead.demand(5)
    assert simulation.copies[1].state is CopyState.CLEAN
    assert simulation.copies[2].state is CopyState.ABSENT
    await simulation.copies[5].ticket
    assert [t.priority for t in simulation.store.log if t.key == "unit5"] == [Priority.DEMAND]
    simulation.read_ahead.consumed(5, Phase.FORWARD)
    await simulation.close()


async def test_an_evaluation_keeps_the_training_order(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 4, window_nbytes=3 * PAGE)
    await simulation.train_step()
    demands = simulation.read_ahead.counts["demand"]
    simulation.begin(Mode.EVAL)
    for unit in range(4):
        await simulation.use(unit, Phase.FORWARD)
    await simulation.train_step()
    assert simulation.read_ahead.counts["demand"] == demands
    assert any(t.tag.kind == "param_eval" for t in simulation.store.log)
    await simulation.close()


async def test_a_failed_read_is_tried_again_when_needed_and_then_reaches_the_waiter(tmp_path: Path) -> None:
    failing = [ReadError("broken on purpose"), ReadError("broken ahead of need")]

    def failure(op: Op, key: str) -> BaseException | None:
        return failing.pop() if op is Op.READ and key == "unit2" and failing else None

    simulation = Simulation(tmp_path, [1] * 4, window_nbytes=2 * PAGE, store=SimulatedStore(failure=failure))
    simulation.begin()
    for unit in (0, 1):
        await simulation.use(unit, Phase.FORWARD)
    with pytest.raises(ReadError, match="on purpose"):
        await simulation.use(2, Phase.FORWARD)
    for unit in (2, 3):
        await simulation.use(unit, Phase.FORWARD)
    await simulation.close()


@pytest.mark.parametrize("read_s", [1.5, 4.0])
async def test_slow_storage_costs_what_it_is_slower_and_no_more(tmp_path: Path, read_s: float) -> None:
    """Reads longer than computations: the channel never idles, so a pass takes as long as its reads."""
    store = SimulatedStore(read_bytes_per_s=PAGE / read_s, write_bytes_per_s=1e15)
    simulation = Simulation(tmp_path, [1] * 8, window_nbytes=3 * PAGE, store=store)
    simulation.begin()
    for unit in range(8):
        await simulation.use(unit, Phase.FORWARD)
    ended_s = simulation.uses[-1].end_s
    assert ended_s == pytest.approx(8 * read_s + 1.0, rel=1e-3)
    await simulation.close()


@pytest.mark.parametrize("window", [2, 3, 5])
async def test_a_wider_window_takes_no_longer(tmp_path: Path, window: int) -> None:
    """Slow units after fast ones: a window carries the slack of one to the other."""
    durations = [3.0, 3.0, 3.0, 0.2, 0.2, 0.2, 0.2, 0.2]

    async def seconds(pages: int, name: str) -> float:
        (tmp_path / name).mkdir()
        store = SimulatedStore(read_bytes_per_s=PAGE, write_bytes_per_s=1e15)
        simulation = Simulation(
            tmp_path / name,
            [1] * 8,
            window_nbytes=pages * PAGE,
            store=store,
            compute_s=lambda access: durations[access.unit],
        )
        start_s = asyncio.get_running_loop().time()
        simulation.begin()
        for unit in range(8):
            await simulation.use(unit, Phase.FORWARD)
        taken_s = asyncio.get_running_loop().time() - start_s
        await simulation.close()
        return taken_s

    narrow, wide = await seconds(window, "narrow"), await seconds(window + 1, "wide")
    assert wide <= narrow
    assert (wide < narrow) is (window < 5)  # enough to hold what the slow units leave time for
    assert wide >= max(sum(durations), 8.0)


async def test_no_read_starts_before_the_last_write_of_its_bytes_has_landed(tmp_path: Path) -> None:
    store = SimulatedStore(duration_s=lambda op, key, nbytes: 0.01 if op is Op.READ else 7.0)
    simulation = Simulation(tmp_path, [2, 1, 3], window_nbytes=4 * PAGE, store=store)
    for _ in range(3):
        await simulation.train_step()
    await simulation.settle()
    reads = [t for t in store.log if t.op is Op.READ and t.tag.kind == "param"]
    writes = [t for t in store.log if t.op is Op.WRITE and t.tag.kind == "param"]
    assert writes
    for read in reads:
        for write in writes:
            overlaps = write.key == read.key and write.offset < read.offset + read.nbytes
            if overlaps and read.offset < write.offset + write.nbytes and write.submitted_s <= read.submitted_s:
                assert read.start_s >= write.end_s
    await simulation.close()


async def test_an_order_that_has_changed_is_learned(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, [1] * 6, window_nbytes=3 * PAGE)
    for _ in range(2):
        await simulation.train_step()
    order = [5, 3, 1, 4, 2, 0]  # backwards: what is jumped over is not found again
    demands = []
    for _ in range(3):
        before = simulation.read_ahead.counts["demand"]
        await simulation.train_step(order)
        demands.append(simulation.read_ahead.counts["demand"] - before)
    assert demands[0] > 0
    assert demands[1:] == [0, 0]
    await simulation.close()


class NotedUpdate:
    """Implements `infinity.readahead.DeferredUpdate`."""

    def __init__(self, index: int, started: list[int]) -> None:
        self._index, self._started = index, started

    def start(self, *, is_forced: bool) -> None:
        """Note it."""
        self._started.append(self._index)

    def fail(self, error: BaseException) -> None:
        """Nothing fails here."""
        raise error


@dataclass
class CopyToDevice:
    """Implements `infinity.devices.base.Fence`."""

    done: bool = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Only of a copy that is over."""
        assert self.done


async def _defer_while_the_device_reads(simulation: Simulation) -> tuple[CopyToDevice, list[int]]:
    """Deferred updates of kept copies 0, 1 and 2, of which the device still reads the first; those that start."""
    await simulation.train_step()
    await asyncio.sleep(100)
    simulation.begin()
    copy_to_device, started = CopyToDevice(), list[int]()
    copies, read_ahead = simulation.copies[:3], simulation.read_ahead
    assert all(copy.state is CopyState.CLEAN for copy in copies)
    assert copies[0].claim()
    read_ahead.consumed(0, Phase.BACKWARD, copy_to_device)
    for index, copy in enumerate(copies):
        copy.update = Ticket(f"update {index}")
        read_ahead.defer(index, NotedUpdate(index, started))
    read_ahead.step_submitted(simulation.step)
    await asyncio.sleep(1)
    return copy_to_device, started


async def test_updates_keep_their_order_while_the_device_reads_a_shard_before_them(tmp_path: Path) -> None:
    """Started before it, they would occupy the optimizer's worker, and the next forward begins with that shard."""
    simulation = Simulation(
        tmp_path, [1] * 3, window_nbytes=3 * PAGE, overlapped=False, keep_at_turn=[0, 1, 2], keep_at_boundary=[0, 1, 2]
    )
    copy_to_device, started = await _defer_while_the_device_reads(simulation)
    assert not started
    copy_to_device.done = True
    await asyncio.sleep(1)
    assert started == [0, 1, 2]
    await simulation.close()


async def test_updates_that_hold_the_memory_somebody_waits_for_do_not_wait_for_their_turn(tmp_path: Path) -> None:
    simulation = Simulation(
        tmp_path, [1] * 4, window_nbytes=3 * PAGE, overlapped=False, keep_at_turn=[0, 1, 2], keep_at_boundary=[0, 1, 2]
    )
    copy_to_device, started = await _defer_while_the_device_reads(simulation)
    demand = asyncio.create_task(simulation.read_ahead.demand(3))
    await asyncio.sleep(1)
    assert started == [1, 2]
    copy_to_device.done = True
    await asyncio.sleep(1)
    assert started == [1, 2, 0]
    demand.cancel()
    await simulation.close()
