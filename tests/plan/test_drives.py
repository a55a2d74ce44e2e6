"""Modelled drives on virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from infinity.plan.drives import DriveModel
from infinity.plan.simulated_drives import SimulatedDrives
from infinity.plan.virtual import PlanLoop, SparseMemory
from storage.types import Op, Priority, Ticket, TrafficTag

GB = 10**9
TAG = TrafficTag("param", 0)
MEMORY = SparseMemory().map(GB)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=PlanLoop) as runner:
        return runner.run(main)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def drives(*models: DriveModel, nbytes: int = GB) -> SimulatedDrives:
    """A store with a few keys of so many bytes."""
    return SimulatedDrives(models, [(key, nbytes) for key in "abcd"], keep_log=True)


async def moved(store: SimulatedDrives, *transfers: tuple[Op, str, int]) -> float:
    """Seconds until all of the transfers, submitted together, are over."""
    await Ticket.all_of([submit(store, op, key, nbytes) for op, key, nbytes in transfers])
    return now_s()


def submit(store: SimulatedDrives, op: Op, key: str, nbytes: int, priority: Priority = Priority.READ_AHEAD) -> Ticket:
    call = store.submit_read if op is Op.READ else store.submit_write
    return call(key, MEMORY[:nbytes], priority=priority, tag=TAG)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    model = DriveModel(4 * GB, 2 * GB, latency_s=0.25)
    assert run(moved(drives(model), (Op.READ, "a", GB))) == pytest.approx(0.5)
    assert run(moved(drives(model), (Op.WRITE, "a", GB))) == pytest.approx(0.75)


def test_latencies_of_queued_transfers_overlap() -> None:
    model = DriveModel(4 * GB, 2 * GB, latency_s=0.25)
    assert run(moved(drives(model), *[(Op.READ, key, GB) for key in "abcd"])) == pytest.approx(0.25 + 1.0)


@pytest.mark.parametrize(("duplex", "expected_s"), [(1.0, 1.0), (0.5, 1.5), (0.0, 2.0)])
def test_both_directions_share_the_drive_as_far_as_it_is_not_duplex(duplex: float, expected_s: float) -> None:
    model = DriveModel(GB, GB, latency_s=0.0, duplex=duplex)
    assert run(moved(drives(model), (Op.READ, "a", GB), (Op.WRITE, "b", GB))) == pytest.approx(expected_s)
    assert model.seconds(GB, GB) == pytest.approx(expected_s)


@pytest.mark.parametrize("read_share", [0.2, 0.5, 0.875])
@pytest.mark.parametrize("duplex", [0.0, 0.3, 1.0])
def test_no_mix_is_faster_than_its_bound(read_share: float, duplex: float) -> None:
    model = DriveModel(3 * GB, GB, latency_s=0.0, duplex=duplex, read_share=read_share)
    for read_nbytes, write_nbytes in ((GB, GB // 10), (GB // 10, GB), (GB, GB)):
        took_s = run(moved(drives(model), (Op.READ, "a", read_nbytes), (Op.WRITE, "b", write_nbytes)))
        assert took_s >= model.seconds(read_nbytes, write_nbytes) * (1 - 1e-6)


def test_transfers_end_at_any_time_that_a_plan_may_reach() -> None:
    """Where a float holds no nanoseconds any more, what was left of a transfer took no time, for ever."""

    async def main() -> float:
        store = drives(DriveModel(3 * GB, 0.7 * GB, duplex=0.3), nbytes=GB // 7)
        await asyncio.sleep(1.2345e7)
        start_s = now_s()
        await moved(store, *[(op, key, GB // 7) for key in "abcd" for op in (Op.READ, Op.WRITE)])
        return now_s() - start_s

    assert 0.5 < run(main()) < 5.0


def test_two_drives_add_up_also_when_one_is_slow() -> None:
    fast, slow = DriveModel(4 * GB, 4 * GB, latency_s=0.0), DriveModel(GB, GB, latency_s=0.0)
    assert run(moved(drives(fast, slow), (Op.READ, "a", GB))) == pytest.approx(1 / 5, rel=1e-3)  # cut at 256 KiB
    assert run(moved(drives(slow, slow), (Op.WRITE, "a", GB))) == pytest.approx(1 / 2, rel=1e-3)


def test_keys_too_small_to_be_cut_keep_one_drive_busy_each() -> None:
    slow = DriveModel(GB, GB, latency_s=0.0)
    store = drives(slow, slow, nbytes=10**6)
    assert len(store.servers) == 2
    # a and c lie on one drive, b and d on the other.
    assert run(moved(store, (Op.READ, "a", 10**6))) == pytest.approx(1e-3)
    assert run(moved(drives(slow, slow, nbytes=10**6), *[(Op.READ, key, 10**6) for key in "ac"])) == pytest.approx(2e-3)
    assert run(moved(drives(slow, slow, nbytes=10**6), *[(Op.READ, key, 10**6) for key in "ab"])) == pytest.approx(1e-3)


def test_a_part_of_a_key_is_moved_by_the_drives_that_hold_it() -> None:
    one = DriveModel(GB, GB, latency_s=0.0)
    assert run(moved(drives(one, one), (Op.READ, "a", GB))) == pytest.approx(1 / 2, rel=1e-3)
    assert run(moved(drives(one, one), (Op.READ, "a", GB // 4))) == pytest.approx(1 / 4)


@pytest.mark.parametrize(("key", "nbytes"), [("nowhere", 4096), ("a", 8192)])
def test_bytes_that_a_key_does_not_have_are_refused(key: str, nbytes: int) -> None:
    async def main() -> None:
        submit(drives(DriveModel(GB, GB), nbytes=4096), Op.READ, key, nbytes)

    with pytest.raises(ValueError, match=f"bytes 0 to {nbytes} of {key}"):
        run(main())


def test_a_demand_overtakes_what_is_moving() -> None:
    async def main() -> tuple[float, float]:
        store = drives(DriveModel(GB, GB, latency_s=0.0))
        first = submit(store, Op.READ, "a", GB)
        await asyncio.sleep(0.5)
        await submit(store, Op.READ, "b", GB // 4, Priority.DEMAND)
        demand_s = now_s()
        await first
        return demand_s, now_s()

    assert run(main()) == (pytest.approx(0.75), pytest.approx(1.25))


def test_what_somebody_begins_to_wait_for_overtakes_what_is_moving() -> None:
    async def main() -> tuple[float, float]:
        store = drives(DriveModel(GB, GB, latency_s=0.0))
        first, second = submit(store, Op.READ, "a", GB), submit(store, Op.READ, "b", GB // 4)
        await asyncio.sleep(0.5)
        store.promote("b")
        await second
        second_s = now_s()
        await first
        store.promote("a")  # it has been moved: nothing happens
        return second_s, now_s()

    assert run(main()) == (pytest.approx(0.75), pytest.approx(1.25))


def test_a_full_cache_makes_writes_slow_and_drains_meanwhile() -> None:
    model = DriveModel(GB, 1e8, latency_s=0.0, slc_nbytes=9e8, slc_write_bytes_per_s=1e9)
    # While the cache fills at 1.0 it drains at 0.1: it is full after 1 s; what is left goes at the sustained rate.
    assert run(moved(drives(model), *[(Op.WRITE, key, GB) for key in "ab"])) == pytest.approx(1.0 + 10.0)


def test_a_cache_does_not_make_steps_without_end_faster() -> None:
    model = DriveModel(GB, 1e8, latency_s=0.0, slc_nbytes=9e8, slc_write_bytes_per_s=1e9)
    assert run(moved(drives(model), (Op.WRITE, "a", GB // 2))) == pytest.approx(0.5)
    assert model.seconds(0, GB // 2) == pytest.approx(5.0)  # what goes into the cache has to leave it


def test_a_cache_recovers_while_nothing_is_written() -> None:
    model = DriveModel(GB, 1e8, latency_s=0.0, slc_nbytes=9e8, slc_write_bytes_per_s=1e9)

    async def main() -> float:
        store = drives(model)
        await moved(store, (Op.WRITE, "a", GB))
        await asyncio.sleep(9.0)
        start_s = now_s()
        await moved(store, (Op.WRITE, "b", GB))
        return now_s() - start_s

    assert run(main()) == pytest.approx(1.0)


def test_a_read_waits_for_the_write_before_it() -> None:
    async def main() -> list[str]:
        store = drives(DriveModel(GB, 1e8, latency_s=0.0, duplex=1.0))
        await moved(store, (Op.WRITE, "a", GB // 10), (Op.READ, "a", GB // 10), (Op.READ, "b", GB // 10))
        return [f"{transfer.op} {transfer.key}" for transfer in store.log]

    assert run(main()) == ["read b", "write a", "read a"]


def test_bytes_are_counted_by_direction_kind_and_step() -> None:
    async def main() -> SimulatedDrives:
        store = drives(DriveModel(GB, GB))
        await moved(store, (Op.WRITE, "a", 8192), (Op.READ, "b", 4096), (Op.READ, "c", 4096))
        return store

    store = run(main())
    assert store.traffic == {(Op.WRITE, "param", 0): 8192, (Op.READ, "param", 0): 8192}
    assert (store.nbytes(Op.READ, 0), store.nbytes(Op.READ, 1)) == (8192, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"read_bytes_per_s": 0.0},
        {"write_bytes_per_s": -1.0},
        {"latency_s": -1.0},
        {"duplex": 1.5},
        {"read_share": 0.0},
        {"read_bytes_per_s": math.nan},
        {"write_bytes_per_s": math.inf},
        {"latency_s": math.nan},
        {"slc_nbytes": 1.0},
        {"slc_nbytes": -1.0, "slc_write_bytes_per_s": 2.0},
        {"slc_nbytes": 1.0, "slc_write_bytes_per_s": 0.5},
        {"slc_nbytes": 1.0, "slc_write_bytes_per_s": math.inf},
    ],
)
def test_models_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|must take|not negative"):
        DriveModel(**({"read_bytes_per_s": 1.0, "write_bytes_per_s": 1.0} | wrong))
