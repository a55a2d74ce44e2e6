"""What is advised where nothing fits: the least change with which something does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from infinity.errors import PlacementError
from infinity.models.gpt import GptShape
from infinity.plan.advice import nearest_that_works
from infinity.plan.hardware import Hardware, gpu_named, parse_drives
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.planner import PlanRequest, Workload, make_plan
from infinity.sizes import GIB, MIB


@cache
def model() -> ModelPlan:
    shape = GptShape(4, 1024, 16, 128)
    return model_plan(shape, seq=128, batch=1, activation_itemsize=2, resident_threshold_nbytes=MIB)


def request(
    *, device_nbytes: int = 24 * GIB, host_nbytes: int = 5 * GIB, drive: str = "", batch: int = 4
) -> PlanRequest:
    gpu = replace(gpu_named("rtx4090"), memory_nbytes=device_nbytes)
    hardware = Hardware(gpu, parse_drives([drive] if drive else []), host_nbytes)
    return PlanRequest(model(), hardware, Workload(batch=batch))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (request(device_nbytes=1024 * MIB + 64 * MIB, drive="3:2", batch=64), r"--batch \d+ --recompute"),
        (request(host_nbytes=4 * GIB + 64 * MIB, drive="3:2:400MB"), r"\d more of drive 3:2 GB/s"),
        (request(host_nbytes=4 * GIB), r"--host-memory 8 GiB"),
        (request(device_nbytes=512 * MIB, host_nbytes=4 * GIB), r"--device-memory \d+ (MiB|GiB) --host-memory 8 GiB.*"),
    ],
)
def test_the_nearest_plan_is_the_least_change(wanted: PlanRequest, expected: str) -> None:
    with pytest.raises(PlacementError):
        make_plan(wanted)
    nearest = nearest_that_works(wanted)
    assert nearest is not None and nearest.plan is not None
    assert re.fullmatch(expected, nearest.what), nearest.what
