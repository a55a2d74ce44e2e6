"""Where things lie and how they are moved does not change a bit: budgets, drives, I/O engines, chunks, devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity, smallest_budget
from tests.zoo import Attention, Frozen, Nested, Net, OddNet, build

SCHEDULES = ("overlapped", "synchronous", "deferred")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "frozen": Frozen,
    "odd": OddNet,
    "nested": Nested,
    "tied": partial(Net, tied=True),
    "attention": Attention,
}


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_smallest_host_budget(offload: MakeEngine, schedule: str, model: str) -> None:
    make = MODELS[model]
    minimum = smallest_budget(offload, "host", build(make), schedule=schedule)
    with pytest.raises(infinity.PlacementError, match="host budget"):
        offload(build(make), schedule=schedule, host={"budget": minimum - 1})
    loop = Loop(make)
    engine = assert_parity(loop, offload, schedule=schedule, host={"budget": minimum})
    assert engine.plan.placement.host_minimum_nbytes == minimum
    assert engine.metrics()["host/peak_bytes"] <= minimum


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_smallest_device_budget(offload: MakeEngine, schedule: str, model: str) -> None:
    make = MODELS[model]
    minimum = smallest_budget(offload, "device", build(make), schedule=schedule)
    with pytest.raises(infinity.PlacementError, match="device budget"):
        offload(build(make), schedule=schedule, device={"kind": "cpu", "budget": minimum - 1})
    device = {"kind": "cpu", "budget": minimum}
    engine = assert_parity(Loop(make), offload, schedule=schedule, device=device, check_traffic=False)
    assert engine.metrics()["device/peak_bytes"] <= minimum


def test_smallest_budgets_accumulating(offload: MakeEngine) -> None:
    minimum = smallest_budget(offload, "host", build(Net), schedule="synchronous")
    loop = Loop(Net, accumulate=(3, 1), max_norm=0.1)
    assert_parity(loop, offload, clip_in_optimizer=True, schedule="synchronous", host={"budget": minimum})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_in_host_memory(offload: MakeEngine, schedule: str) -> None:
    engine = assert_parity(Loop(Net), offload, schedule=schedule, host={"budget": "64MiB"})
    assert engine.plan.placement.nvme_nbytes == 0
    assert engine.io_engine == "none"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budget", [450, 600, 700, 800, 900], ids=lambda kib: f"{kib}KiB")
def test_between(offload: MakeEngine, schedule: str, budget: int) -> None:
    """Budgets with which some shards are pinned and others are not."""
    assert_parity(Loop(Net), offload, schedule=schedule, host={"budget": f"{budget}KiB"})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_chunks(offload: MakeEngine, schedule: str) -> None:
    """Parameters are cut in the middle."""

    def make() -> Net:
        return Net(hidden=211)

    engine = assert_parity(Loop(make), offload, schedule=schedule, chunk="32KiB", host={"budget": "1200KiB"})
    assert engine.plan.placement.chunk_numel == 4096
    assert engine.metrics()["optimizer/chunks"] > engine.traffic.per_step[0]["d2h_bytes"] / (4 * 8 * 4096)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_drives(offload: MakeEngine, tmp_path: Path, schedule: str) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    engine = assert_parity(Loop(Net), offload, schedule=schedule, nvme={"paths": drives})
    assert all(str(drive) in engine.io_engine for drive in drives)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buffered(offload: MakeEngine, schedule: str) -> None:
    engine = assert_parity(Loop(Net), offload, schedule=schedule, nvme={"engine": "buffered"})
    assert engine.io_engine.startswith("buffered")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
def test_fake_device(offload: MakeEngine, tmp_path: Path, schedule: str, latency_s: float) -> None:
    device = {"kind": "fake", "path": tmp_path, "budget": "1MiB", "latency_s": latency_s}
    assert_parity(Loop(Frozen), offload, schedule=schedule, device=device)


def test_smallest_blocks_and_one_thread(offload: MakeEngine) -> None:
    nvme = {"block_nbytes": 4096, "threads": 1}
    assert_parity(Loop(Net), offload, schedule="overlapped", nvme=nvme)


@pytest.mark.parametrize("classes", [["Block"], ["Outer"]], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unit_classes(offload: MakeEngine, schedule: str, classes: list[str]) -> None:
    engine = assert_parity(Loop(Nested), offload, schedule=schedule, unit_classes=classes)
    assert engine.plan.units


@pytest.mark.parametrize("threshold", ["4B", "64MiB"])
def test_resident_threshold(offload: MakeEngine, threshold: str) -> None:
    """From every parameter in a unit to everything outside the blocks resident."""
    assert_parity(Loop(Net), offload, schedule="synchronous", resident_threshold=threshold, host={"budget": "2MiB"})
