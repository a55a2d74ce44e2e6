"""The parts of `infinity bench tier` that measure nothing: profiles, schedules, statistics, settings, plots."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infinity.bench.engines import BenchEngine, parse_engines
from infinity.bench.load import Schedule
from infinity.bench.profiles import PROFILES, Order, Workload, block_load, comparison, find_profiles
from infinity.bench.recommend import config_block, recommend
from infinity.bench.result import BenchResult, Drive
from infinity.bench.statistics import Latencies, shares, spread
from infinity.bench.sustained import Point, find_cliff
from infinity.bench.svg import Bar, Line, bars, lines
from infinity.bench.target import choose_nbytes, margin_nbytes, open_target
from infinity.bench.tier import CpuTime, Measurement, Series
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.sizes import GIB, KIB, MIB
from storage.backends.cost import IoCost
from storage.types import Op


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("SEQ1M Q8T1", "SEQ1M Q8T1"),
        ("seq1m-q8t1", "SEQ1M Q8T1"),
        ("seq8m", "SEQ8M Q16"),
        ("rnd4k_q1", "RND4K Q1"),
        ("OFFLOAD", "offload"),
    ],
)
def test_profiles_are_found_however_they_are_typed(typed: str, name: str) -> None:
    assert [profile.name for profile in find_profiles([typed])] == [name]


@pytest.mark.parametrize("typed", ["", "-", "seq2m", "ofload"])
def test_unknown_profile_names_the_known_ones(typed: str) -> None:
    with pytest.raises(ConfigError, match="allowed: SEQ1M Q8T1, "):
        find_profiles([typed])


def test_offload_profile_has_the_mixes_of_training() -> None:
    (offload,) = find_profiles(["offload"])
    assert [workload.read_percent for workload in offload.workloads] == [100, 75, 50, 25]


@pytest.mark.parametrize("workload", [w for p in PROFILES for w in p.workloads], ids=lambda w: f"{w.name} {w.depth}")
def test_no_two_transfers_in_flight_overlap(workload: Workload) -> None:
    schedule = Schedule.of(workload, GIB)
    twice = schedule.offsets * 2  # the schedule begins again at its end
    window = workload.transfers
    if len(schedule.offsets) < 10_000:
        for start in range(len(schedule.offsets)):
            assert len(set(twice[start : start + window])) == window
    assert sorted(schedule.offsets) == list(range(0, len(schedule.offsets) * schedule.nbytes, schedule.nbytes))


@pytest.mark.parametrize("read_percent", [100, 75, 50, 25, 0])
def test_mix_is_exact_in_every_hundred(read_percent: int) -> None:
    ops = Schedule.of(block_load("x", read_percent, MIB, 8), 400 * MIB).ops
    assert [ops[start : start + 100].count(Op.READ) for start in range(0, 400, 100)] == [read_percent] * 4


def test_random_order_is_the_same_every_time_and_not_in_order() -> None:
    workload = block_load("x", 100, 4 * KIB, 8, Order.RANDOM)
    first, second = (Schedule.of(workload, 16 * MIB).offsets for _ in range(2))
    assert first == second
    assert first != sorted(first)


def test_file_too_small_for_the_queue_says_how_large_it_must_be() -> None:
    with pytest.raises(ConfigError, match="--size must be at least 256 MiB"):
        Schedule.of(block_load("x", 100, 8 * MIB, 16), 64 * MIB)


def test_engines_are_parsed_once_each() -> None:
    assert parse_engines("direct, aiofiles,direct") == (BenchEngine.DIRECT, BenchEngine.AIOFILES)
    for wrong in ("", "direct,uring"):
        with pytest.raises(ConfigError, match="allowed: direct, aio, buffered, aiofiles"):
            parse_engines(wrong)


def test_spread() -> None:
    one = spread([3.0, 1.0, 2.0])
    assert (one.median, one.lowest, one.highest, one.relative) == (2.0, 1.0, 3.0, 1.0)
    assert spread([0.0]).relative == 0.0


def test_percentiles_are_latencies_that_happened() -> None:
    values = np.arange(1, 101, dtype=np.int64) * 1000
    found = Latencies.of(values)
    assert (found.count, found.least_ns, found.most_ns, found.mean_ns) == (100, 1000, 100_000, 50_500)
    assert found.percentiles_ns[99.0] == 100_000
    assert set(found.percentiles_ns.values()) <= set(values.tolist())
    assert Latencies.of(np.array([], dtype=np.int64)).percentiles_ns == {}


def test_every_latency_is_in_one_step_of_the_scale() -> None:
    values = np.array([1, 999, 1_000, 999_999, 1_000_000, 1_999_000_000, 2_500_000_000], dtype=np.int64)
    found = shares(values)
    assert sum(percent for unit in found.values() for percent in unit.values()) == pytest.approx(100)
    assert found["ms"][">=2000"] == pytest.approx(100 / 7)


def test_cliff_is_where_it_becomes_slower_for_good() -> None:
    fast, slow = 2e9, 5e8
    rates = [fast] * 10 + [slow] + [fast] * 29 + [slow] * 60  # one slow interval on the way is none
    points = [Point(number * 0.5, number * 100, rate) for number, rate in enumerate(rates)]
    cliff = find_cliff(points)
    assert cliff is not None
    assert (cliff.at_s, cliff.before_bytes_per_s, cliff.after_bytes_per_s) == (20.0, fast, slow)
    assert find_cliff(points[:40]) is None
    assert find_cliff(points[:2]) is None


def _series(block_nbytes: int, depth: int, rate: float, directory: str = "/a", profile: str = "sweep") -> Series:
    workload = Workload(profile, 50, 16 * MIB, block_nbytes, depth, 4)
    latencies = {op: np.array([1_000_000], dtype=np.int64) for op in Op}
    moved = {op: int(rate / 2) for op in Op}
    run = Measurement(1.0, CpuTime(0.1, 0.1), moved, latencies, IoCost(10, 1e-4))
    return Series(workload, BenchEngine.DIRECT, (directory,), (run,))


def test_smallest_settings_that_are_fast_enough_are_recommended() -> None:
    settings = recommend([_series(MIB, 2, 1e9), _series(MIB, 4, 1.95e9), _series(4 * MIB, 16, 2e9)])
    assert settings is not None
    assert (settings.block_nbytes, settings.threads, settings.engine) == (MIB, 4, BenchEngine.DIRECT)


def test_settings_suit_the_drive_that_needs_most() -> None:
    easy, hard = (
        [_series(MIB, 2, 1e9), _series(MIB, 8, 1e9)],
        [
            _series(MIB, 2, 1e8, "/b"),
            _series(MIB, 8, 5e8, "/b"),
        ],
    )
    settings = recommend([*easy, *hard])
    assert settings is not None
    assert settings.threads == 8


def test_the_kernel_engine_is_recommended_when_it_alone_was_measured() -> None:
    series = replace(_series(MIB, 8, 1e9), engine=BenchEngine.AIO)
    settings = recommend([series])
    assert settings is not None
    assert settings.engine is BenchEngine.AIO


def test_nothing_is_recommended_from_small_blocks_alone() -> None:
    assert recommend([_series(4 * KIB, 32, 1e8)]) is None
    assert recommend([]) is None


def test_configuration_block_is_accepted(tmp_path: Path) -> None:
    result = BenchResult({})
    directory = tmp_path / 'odd "name"'
    result.drives.append(Drive(str(directory), "ext4", GIB, {}, None, ()))
    result.series.append(_series(2 * MIB, 8, 1e9))
    file = tmp_path / "config.toml"
    file.write_text(config_block(result))
    tomllib.loads(file.read_text())
    nvme = Config.load(file).nvme
    assert (nvme.paths, nvme.threads, nvme.block_nbytes) == ((directory,), 8, 2 * MIB)


def test_plots_are_well_formed_whatever_the_labels() -> None:
    bar = Bar("<read> & 'write'", 1.0, 0.5, 2.0, "1 MB/s")
    for text in (
        bars([bar], "a < b"),
        bars([], "empty"),
        lines([Line("<&>", ((0.0, 1.0), (2.0, 3.0)))], "x & y", "x", "y"),
        lines([], "empty", "x", "y"),
    ):
        ElementTree.fromstring(text)


def test_file_size_leaves_a_margin_and_is_refused_without_room(tmp_path: Path) -> None:
    assert choose_nbytes(tmp_path, 100 * MIB) == 96 * MIB  # whole transfers
    assert margin_nbytes(tmp_path) >= 256 * MIB
    with pytest.raises(ConfigError, match=r"needs 1\.\d+ EiB|needs .* and a margin of .* are free there"):
        choose_nbytes(tmp_path, 1 << 60)


def test_file_is_gone_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_target(tmp_path, 16 * MIB) as target:
        assert Path(target.path).stat().st_size == 16 * MIB
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, problem in (("none", "there is no such directory"), ("file", "not a directory")):
        with pytest.raises(ConfigError, match=problem), open_target(tmp_path / name):
            raise AssertionError("it was opened")


def test_comparison_runs_read_write_and_mixed_at_the_given_size() -> None:
    workloads = comparison(2 * MIB, 4).workloads
    assert [workload.mix for workload in workloads] == ["read", "write", "50/50"]
    assert {(w.block_nbytes, w.transfer_nbytes, w.depth, w.transfers) for w in workloads} == {(2 * MIB, 2 * MIB, 4, 4)}
