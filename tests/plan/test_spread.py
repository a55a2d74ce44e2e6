"""Which drive holds what, as the planner has it and as a store does it."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.bounds import nvme_s
from infinity.plan.drives import DriveModel
from infinity.plan.spread import Spread, drive_shares, steady_speeds
from storage.store import ShardStore
from tests.plan.cases import make_scenario
from tests.scheduler.planned import UnitShape

MIB = 1 << 20
SIZES = [24 * MIB, 3 * MIB, 4096, MIB, 700 * 4096, 5 * MIB, 2 * MIB]
RATES = st.sampled_from([1e8, 1e9, 7e9])
MODELS = st.builds(DriveModel, RATES, RATES, duplex=st.sampled_from([0.0, 0.3, 0.5, 1.0]))


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 2.0, 5.0]])
def test_keys_lie_where_a_store_puts_them(tmp_path: Path, speeds: list[float]) -> None:
    keys = [(f"key{number}", nbytes) for number, nbytes in enumerate(SIZES)]
    spread = Spread(speeds, keys)
    folders = [tmp_path / str(number) for number in range(len(speeds))]
    with closing(ShardStore.open(folders, sum(SIZES), speeds=speeds)) as store:
        for key, nbytes in keys:
            store.create(key, nbytes)
        assert [report.held_nbytes for report in store.drive_report()] == spread.held_nbytes
        for key, nbytes in keys:
            held = dict.fromkeys(range(len(speeds)), 0)
            for piece in store._keys[key].pieces:
                held[piece.extent.drive] += piece.extent.nbytes
            assert spread.shares(key, 0, nbytes) == {drive: n for drive, n in held.items() if n}


def test_a_span_is_moved_by_the_drives_that_hold_it() -> None:
    spread = Spread([1.0, 1.0], [("cut", 4 * MIB), ("whole", MIB)])
    assert spread.shares("cut", MIB, 3 * MIB) == {0: MIB, 1: MIB}
    assert spread.shares("cut", 0, MIB) == {0: MIB}
    assert len(spread.shares("whole", 0, MIB)) == 1
    assert (spread.nbytes_of("cut"), spread.nbytes_of("nowhere")) == (4 * MIB, 0)


def test_drives_hold_as_much_as_they_move_in_the_same_time() -> None:
    # 14 read and 12 written: 14 / 7 + 12 / 1.5 = 10 s against 14 / 7 + 12 / 3 = 6 s.
    slow, fast = DriveModel(7e9, 1.5e9), DriveModel(7e9, 3e9)
    assert drive_shares([slow, fast], 14 * 10**9, 12 * 10**9) == pytest.approx([6 / 16, 10 / 16])
    assert drive_shares([slow, fast], 14 * 10**9, 0) == pytest.approx([0.5, 0.5])
    assert drive_shares([], 1, 1) == []


@given(model=MODELS, read=st.integers(0, 10**10), write=st.integers(0, 10**10))
def test_the_least_time_of_one_drive_is_its_own(model: DriveModel, read: int, write: int) -> None:
    scenario = make_scenario([UnitShape((1,))], drives=[model])
    assert nvme_s(scenario, read, write) == pytest.approx(model.seconds(read, write))


@given(models=st.lists(MODELS, min_size=1, max_size=3), chance=st.randoms(use_true_random=False))
def test_no_spread_is_faster_than_the_least_time(models: list[DriveModel], chance: random.Random) -> None:
    scenario = make_scenario([UnitShape((1,))], drives=models)
    read, write = 14e9, 12e9
    least_s = nvme_s(scenario, int(read), int(write))
    even = drive_shares(models, 1, 1)
    tried = [([1.0] * len(models), [1.0] * len(models)), (even, even), (steady_speeds(models, 14, 12),) * 2]
    tried += [([chance.random() + 0.01 for _ in models], [chance.random() + 0.01 for _ in models]) for _ in range(50)]
    for reads, writes in tried:
        took_s = max(
            model.seconds(read * r / sum(reads), write * w / sum(writes))
            for model, r, w in zip(models, reads, writes, strict=True)
        )
        assert took_s >= least_s * (1 - 1e-9)


def test_the_least_time_is_reached_where_each_drive_takes_what_suits_it() -> None:
    reader, writer = DriveModel(4e9, 1e6, duplex=0.0), DriveModel(1e6, 2e9, duplex=0.0)
    scenario = make_scenario([UnitShape((1,))], drives=[reader, writer])
    assert nvme_s(scenario, 4 * 10**9, 2 * 10**9) == pytest.approx(1.0, rel=1e-2)
