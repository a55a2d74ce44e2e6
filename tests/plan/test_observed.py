"""Calibration from the phases of real runs, and predictions made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

import infinity
from infinity.engine import Engine
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.optim.kernel_threads import usable_cores
from infinity.plan.bounds import moved_nbytes, scenario_traffic
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drive_phases import fit_drives
from infinity.plan.drives import DriveModel
from infinity.plan.observed import (
    Calibration,
    RunObserver,
    scenario_of_run,
    unit_times,
    with_drives,
)
from infinity.plan.phases import middle_steps, step_s
from infinity.plan.simulate import simulate, simulate_long
from infinity.plan.thread_phases import kernel_loss

SHAPE = GptShape(layers=4, hidden=64, heads=4, seq=16)


def train(folder: Path, steps: int, schedule: str = "synchronous") -> tuple[Engine, RunObserver]:
    """A small real run; the engine is open."""
    with infinity.empty_init():
        model = Gpt(SHAPE)
    torch.manual_seed(0)
    config = infinity.Config(
        precision="fp32",
        schedule=schedule,
        device={"kind": "cpu", "budget": "2MiB"},
        host={"budget": "2MiB"},
        nvme={"paths": [folder]},
    )
    engine = infinity.offload(model, config, init_fn=init_weights)
    optimizer = infinity.AdamW(model.parameters())
    observer = RunObserver(engine._runtime)
    inputs = torch.zeros(1, 16, dtype=torch.long)
    for _ in range(steps):
        model(inputs, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        observer.step_ended()
    return engine, observer


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped"])
def test_phases_of_a_run_are_divided_between_thread_kernels_and_drives(tmp_path: Path, schedule: str) -> None:
    engine, observer = train(tmp_path, 4, schedule)
    with engine:
        pairs = list(pairwise(observer.moments[1:]))
        ((first, last),) = middle_steps(observer.moments[1:])
        calibration = observer.calibrate(observer.moments[1:])
        assert calibration.steps == 3
        assert calibration.measured_s == median(last.at_s - first.at_s for first, last in pairs)
        assert step_s(first, last) == calibration.measured_s
        worked_s = calibration.measured_s - (last.stalled_s - first.stalled_s)
        assert 0 < calibration.thread_s <= worked_s
        assert calibration.kernel_s > 0
        assert 0 < calibration.hand_over_s < calibration.measured_s
        (drive,) = calibration.drives
        transfers = [e for e in engine.trace.events() if e.category in ("read", "write") and e.start_s >= first.at_s]
        fastest = max(e.nbytes / e.duration_s for e in transfers)
        assert 0 < max(drive.beside()) <= max(drive.read_bytes_per_s, drive.write_bytes_per_s) < 100 * fastest
        assert (drive,) == fit_drives([(first, last)], engine.trace.events(), [str(tmp_path)])


def test_a_prediction_simulates_the_very_placement_of_the_run(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 6)
    with engine:
        prediction = observer.predict(micro_batches=1, recompute=False)
        assert prediction is not None
        assert prediction.calibration.steps == 2  # of five after the first
        scenario = scenario_of_run(engine._runtime, prediction.calibration, micro_batches=1, recompute=False)
        result = simulate_long(scenario)
        assert (result.read_nbytes, result.write_nbytes) == moved_nbytes(scenario_traffic(scenario))
        expected = engine.plan.expected_traffic(1)
        assert moved_nbytes(scenario_traffic(scenario)) == moved_nbytes(expected)
        assert prediction.step_s == result.step_s
        # What is left of the step after all the waits is in the prediction in full.
        assert prediction.step_s >= prediction.calibration.thread_s
        assert prediction.error == pytest.approx(prediction.step_s / prediction.measured_s - 1)


def test_slower_drives_make_the_same_machine_slower(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 4)
    with engine:
        calibration = observer.calibrate(observer.moments[1:])
        slow = with_drives(calibration, [DriveModel(1e6, 1e6, latency_s=0.0, duplex=1.0)])
        scenario = scenario_of_run(engine._runtime, slow, micro_batches=1, recompute=False)
        read, write = moved_nbytes(scenario_traffic(scenario))
        assert simulate(scenario).step_s >= max(read, write) / 1e6 * 0.99


@pytest.mark.parametrize("steps", [0, 1])
def test_the_first_step_alone_predicts_nothing(tmp_path: Path, steps: int) -> None:
    engine, observer = train(tmp_path, steps)
    with engine:
        assert observer.predict(micro_batches=1, recompute=False) is None


def test_two_steps_predict_the_one_they_were_fitted_to(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 2)
    with engine:
        prediction = observer.predict(micro_batches=1, recompute=False)
        assert prediction is not None
        assert prediction.measured_s == prediction.calibration.measured_s
        assert prediction.error == prediction.residual


def test_a_calibration_is_told_in_json() -> None:
    calibration = Calibration(0.5, 1e-9, (DriveModel(1e9, 5e8),), 3, 0.75, 1e-4, Contention(1.0, 1e-3, 1e-9))
    told = json.loads(json.dumps(calibration.to_json()))
    assert told["thread_s"] == 0.5
    assert told["drives"][0]["write_bytes_per_s"] == 5e8
    assert told["contention"] == {"kernel": 1.0, "transfer_s": 1e-3, "byte_s": 1e-9}


def test_a_step_is_divided_by_parameters_and_passes(tmp_path: Path) -> None:
    engine, _ = train(tmp_path, 0)
    with engine:
        units = engine._runtime.units
        times = unit_times(units, 1.0, recompute=True)
        assert sum(t.forward_s + t.backward_s for t in times.values()) == pytest.approx(1.0)
        blocks = [times[unit.index] for unit in units if unit.name.startswith("blocks")]
        assert all(block.backward_s == pytest.approx(3 * block.forward_s) for block in blocks)
        embeddings = [times[unit.index] for unit in units if isinstance(unit.module, torch.nn.Embedding)]
        assert all(embedding.forward_s == 0 for embedding in embeddings)


def test_pauses_between_steps_are_nobody_s_time(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 3)
    with engine:
        plain = observer.calibrate(observer.moments[1:], NO_CONTENTION)
        last = observer.moments[-1]
        observer.moments[-1] = replace(last, at_s=last.at_s + 100.0, paused_s=100.0)
        paused = observer.calibrate(observer.moments[1:], NO_CONTENTION)
        assert paused.measured_s == pytest.approx(plain.measured_s)
        assert paused.thread_s == pytest.approx(plain.thread_s)


def test_a_long_run_is_calibrated_before_its_trace_forgets_the_first_steps(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 12)
    with engine:
        remembered = observer.predict(micro_batches=1, recompute=False)
        engine.trace._events.clear()
        forgotten = observer.predict(micro_batches=1, recompute=False)
        assert remembered is not None and forgotten is not None
        assert forgotten.calibration == remembered.calibration
        assert forgotten.calibration.steps == 5
        assert forgotten.calibration.kernel_s > 0
        assert observer.moments[-1].paused_s > 0  # no step is charged for it


def test_what_a_transfer_costs_is_seen_in_a_run(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 4, "overlapped")
    with engine:
        first, last = observer.moments[1], observer.moments[-1]
        assert last.thread_cpu_s > first.thread_cpu_s
        assert last.loop_cpu_s > first.loop_cpu_s
        assert last.io_cpu_s > first.io_cpu_s
        contention = observer.calibrate(observer.moments[1:]).contention
        assert contention.kernel == kernel_loss(torch.get_num_threads(), engine._runtime.threads.count, usable_cores())
        foreign = Contention(transfer_s=1e-3, byte_s=1e-9)
        seen = observer.calibrate(observer.moments[1:], foreign)
        assert seen.contention == foreign
        scenario = scenario_of_run(engine._runtime, seen, micro_batches=1, recompute=False)
        assert scenario.speeds.contention == foreign
