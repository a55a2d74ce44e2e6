"""Public measurements of other engines, against the simulator."""

from __future__ import annotations

import pytest

from infinity.models.gpt import GptShape
from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Drive, Hardware, gpu_named
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.planner import PlanRequest, Workload, make_plan
from infinity.sizes import GIB, MIB

# Seconds of a step of a 13 B model, sequence 1024, on one RTX 4090 with n P5510 drives, from the TFLOPS that LoHan
# ("LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer GPU") reports: 6 P tokens / TFLOPS.
STEP_S = {
    32: {1: 68.2, 2: 39.7, 3: 31.5, 6: 21.0, 12: 18.0},
    48: {1: 72.2, 2: 42.7, 3: 31.5, 6: 26.2, 12: 24.9},
    64: {1: 72.7, 2: 45.8, 3: 37.5, 6: 33.7, 12: 34.5},
}


@pytest.fixture(scope="module")
def model() -> ModelPlan:
    shape = GptShape(layers=40, hidden=5120, heads=40, seq=1024)
    return model_plan(shape, seq=1024, batch=1, activation_itemsize=2, resident_threshold_nbytes=MIB)


def step_s(model: ModelPlan, batch: int, drives: int, efficiency: float, scale: float) -> float:
    """Predicted seconds; `scale` stretches the rates of the drives, so that bytes per parameter need not be ours."""
    rates = DriveModel(6.5e9 * scale, 3.4e9 * scale)
    hardware = Hardware(
        gpu=gpu_named("rtx4090"),
        drives=(Drive("P5510", rates),) * drives,
        host_memory_nbytes=64 * GIB,
        efficiency=efficiency,
        dram_bytes_per_s=300e9,
    )
    workload = Workload(batch=batch, device_budget_nbytes=16 * GIB, host_budget_nbytes=24 * GIB)
    return make_plan(PlanRequest(model, hardware, workload)).step_s


# Fitted to the table: one scale of the drives' rates for all of it (16 and 14 bytes are read and written per parameter
# there, 14 and 12 here), and one efficiency for each batch. The convention of the published TFLOPS is not known, so the
# efficiencies carry a common factor and mean nothing by themselves; the shape over the number of drives does.
SCALE = 0.676
EFFICIENCY = {32: 1.06, 48: 1.22, 64: 1.20}


@pytest.mark.parametrize("batch", [32, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (48, 64))])
def test_the_gain_of_more_drives_is_as_published(model: ModelPlan, batch: int) -> None:
    for drives, measured_s in STEP_S[batch].items():
        predicted_s = step_s(model, batch, drives, EFFICIENCY[batch], SCALE)
        assert predicted_s == pytest.approx(measured_s, rel=0.10), f"{drives} drives"


# Seconds of an iteration of DeepSpeed ZeRO-3 with NVMe, and of the update of MLP-Offload, and the parameters of one of
# the four ranks (in millions), by model size in billions: sample output of the artifact of "MLP-Offload: Multi-Level,
# Multi-Path Offloading for LLM Pre-training" (SC 25), scripts/parse-res.py.
RANK_MILLIONS = {40: 752.6, 52: 691.9, 70: 1072.0, 100: 1654.5, 120: 1667.6}
BASELINE_S = {40: 242.3, 52: 238.6, 70: 370.6, 100: 572.0, 120: 550.4}
MULTI_PATH_S = {40: 98.5, 52: 89.4, 70: 147.2, 100: 269.2, 120: 282.3}
KEPT_MILLIONS = 300.0  # three host buffers of a hundred million each keep their content from update to update


def nvme_s(millions: float, read_nbytes: int, write_nbytes: int, bytes_per_s: float) -> float:
    drive = DriveModel(bytes_per_s, bytes_per_s, duplex=0.0)
    return drive.seconds(millions * 1e6 * read_nbytes, millions * 1e6 * write_nbytes)


@pytest.mark.parametrize("fitted", [52, 70, 100])
def test_logs_of_the_baseline_follow_from_its_bytes_and_one_bandwidth(fitted: int) -> None:
    """16 read and 12 written in the step, 4 of gradients written in backward; the other sizes are predicted."""
    rate = nvme_s(RANK_MILLIONS[fitted], 16, 12 + 4, 1.0) / BASELINE_S[fitted]
    for size, measured_s in BASELINE_S.items():
        assert nvme_s(RANK_MILLIONS[size], 16, 12 + 4, rate) == pytest.approx(measured_s, rel=0.15), size


def test_logs_of_the_multi_path_engine_follow_from_what_it_does_not_keep() -> None:
    """12 read and 12 written of what is not kept in host memory; fitted at 100 B."""
    rate = nvme_s(RANK_MILLIONS[100] - KEPT_MILLIONS, 12, 12, 1.0) / MULTI_PATH_S[100]
    for size, measured_s in MULTI_PATH_S.items():
        predicted_s = nvme_s(RANK_MILLIONS[size] - KEPT_MILLIONS, 12, 12, rate)
        assert predicted_s == pytest.approx(measured_s, rel=0.15), size
