"""Measures this machine for the planner: each resource alone, then a short run on all of them, and how well it was met.

The run is real: swap files in the given folders, the engine's own scheduler. The first schedule is what the corrections
are fitted to; the second is predicted with them before it starts, and its error is the residual that counts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from infinity.bench.machine import describe_machine
from infinity.bench.memory import measure_memory
from infinity.bench.result import MemoryReport
from infinity.config import Config, DeviceKind, Schedule
from infinity.empty import empty_init
from infinity.engine import Engine
from infinity.models.gpt import Block, Gpt, GptShape, init_weights
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.plan.calibration import Alone, Corrections, MachineCalibration, Residual, now
from infinity.plan.drives import DriveModel
from infinity.plan.model import BACKWARD_FLOPS, ModelPlan, model_plan
from infinity.plan.observed import Calibration, RunObserver, scenario_of_run
from infinity.plan.simulate import simulate
from infinity.sizes import MIB
from infinity.torch_compat import can_swap_memory
from infinity.versions import infinity_version
from storage.calibration import calibrate
from storage.calibration_cache import CalibrationCache

_BLOCKS = (GptShape(2, 128, 4, 64), GptShape(2, 256, 4, 128), GptShape(2, 512, 8, 128), GptShape(2, 768, 12, 128))
_BATCH = 2
_REPEATS = 9
_RATE_S = 0.15  # of each rate of memory and kernels
_STEPS = 5
_SHAPE = GptShape(6, 512, 8, 64)  # transfers of several MiB, as those of large models
_HOST_SHARE = 0.35  # of the state: most of it moves
_HOST_LEAST_NBYTES = 24 * MIB
_DEVICE_BUDGET_NBYTES = 64 * MIB
_SCHEDULES = (Schedule.SYNCHRONOUS, Schedule.OVERLAPPED)

Progress = Callable[[str], None]


def calibrate_machine(directories: Sequence[Path], progress: Progress) -> MachineCalibration:
    """Measure everything; takes about half a minute on a quiet machine, and writes about 3 GB.

    Raises:
        StorageError: a drive cannot be measured.
        InfinityError: a run failed.
    """
    made = now()
    drives = {}
    for directory in directories:
        progress(f"drive {directory}")
        found = calibrate(directory)
        CalibrationCache().keep(found)
        drives[str(directory)] = DriveModel(found.read_nbytes_per_s, found.write_nbytes_per_s, latency_s=0.0)
    report, _ = measure_memory(None, repeats=3, seconds=_RATE_S, progress=progress)
    progress("computing")
    flops_per_s, unit_s = fit_compute(list(block_times()))
    alone = Alone(
        flops_per_s=flops_per_s,
        unit_s=unit_s,
        optimizer_s=1.0 / _rate(report, "AdamW bf16"),
        copy_bytes_per_s=_rate(report, "host memory copy"),
        link_bytes_per_s=_link(report),
        drives=drives,
    )
    fitted, residuals = _run_all(directories, progress)
    has_gpu = torch.cuda.is_available()
    return MachineCalibration(
        machine=describe_machine(),
        made=made,
        versions={"infinity": infinity_version(), "torch": torch.__version__},
        device=torch.cuda.get_device_name() if has_gpu else "the CPU of this machine",
        has_gpu=has_gpu,
        device_memory_nbytes=_device_memory_nbytes(),
        alone=alone,
        corrections=corrections_from(alone, fitted),
        residuals=tuple(residuals),
        hand_over_s=fitted.hand_over_s,
        contention=fitted.contention,
    )


def _device_memory_nbytes() -> int:
    """Of the GPU; 0 where there is none, and computing takes a share of the host memory."""
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def _rate(report: MemoryReport, name: str) -> float:
    """The median of the last entry of a name, which has all threads."""
    return [rate.alone.median for rate in report.rates if rate.name == name][-1]


def _link(report: MemoryReport) -> float:
    names = {rate.name for rate in report.rates}
    if "host to device" in names:
        return min(_rate(report, "host to device"), _rate(report, "device to host"))
    return next(rate.alone.median for rate in report.rates if rate.name == "host memory copy")  # of one thread


# Computing ----------------------------------------------------------------------------------------------------------


def block_times() -> Iterator[tuple[float, float]]:
    """Operations and seconds of forward and backward of transformer blocks of several sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in _BLOCKS:
        block = Block(shape).to(device=device, dtype=dtype)
        x = torch.randn(_BATCH, shape.seq, shape.hidden, device=device, dtype=dtype, requires_grad=True)
        flops = _plan_of(shape).work["blocks.0"].forward_flops * _BATCH * (1 + BACKWARD_FLOPS)
        _pass_s(block, x)  # the first one of a size sets things up
        yield flops, min(_pass_s(block, x) for _ in range(_REPEATS))  # alone: what disturbs a pass is not its own


def _pass_s(block: Block, x: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    started_s = time.perf_counter()
    torch.autograd.backward(block(x).sum())
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def fit_compute(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Operations per second and seconds of overhead of a pass, by least squares of relative errors over all sizes.

    A pass is one of the three that forward and backward count as.
    """
    flops, seconds = np.array(measured, dtype=float).T
    scaled = np.stack([flops / seconds, 1 / seconds], axis=1)
    (per_flop, overhead_s), *_ = np.linalg.lstsq(scaled, np.ones(len(measured)), rcond=None)
    if overhead_s < 0 or per_flop <= 0:  # no overhead can be told: one rate for all sizes
        per_flop, overhead_s = float(np.sum(seconds) / np.sum(flops)), 0.0
    return 1.0 / float(per_flop), float(overhead_s) / (1 + BACKWARD_FLOPS)


def _plan_of(shape: GptShape) -> ModelPlan:
    return model_plan(shape, seq=shape.seq, batch=1, activation_itemsize=4, resident_threshold_nbytes=0)


# Runs ---------------------------------------------------------------------------------------------------------------


def _run_all(directories: Sequence[Path], progress: Progress) -> tuple[Calibration, list[Residual]]:
    """Fit to the first schedule, predict every other.

    What computing loses to what goes on beside it shows where much does, so it is seen in a run of its own.
    """
    progress("training, to see what goes on beside it")
    with _engine(directories, Schedule.OVERLAPPED) as engine:
        observer = _train(engine)
        contention = observer.calibrate(observer.moments[2:]).contention
    fitted: Calibration | None = None
    residuals = []
    for schedule in _SCHEDULES:
        progress(f"training, {schedule.value}")
        with _engine(directories, schedule) as engine:
            predicted_s = None if fitted is None else _predict(engine, fitted)
            observer = _train(engine)
            seen = observer.calibrate(observer.moments[2:], contention)
            if fitted is None or predicted_s is None:
                fitted, predicted_s, kind = seen, _predict(engine, seen), "fitted to"
            else:
                kind = "predicted before it ran"
        residuals.append(Residual(f"{schedule.value}, {kind}", predicted_s, seen.measured_s, now()))
    if fitted is None:
        raise ValueError("no schedule to run")
    return fitted, residuals


def corrections_from(alone: Alone, seen: Calibration) -> Corrections:
    """What a run did over what the same work takes alone."""
    work = _plan_of(_SHAPE)
    units, passes = len(work.work), 1 + BACKWARD_FLOPS
    copies = 1 if can_swap_memory() else 3  # down once and, where the memory of shards cannot be shared, up twice
    copied_nbytes = copies * 4 * work.parameters
    compute_s = work.step_flops(recompute=False) * _BATCH / alone.flops_per_s + units * passes * alone.unit_s
    if not torch.cuda.is_available():
        compute_s += copied_nbytes / alone.link_bytes_per_s
    reads = sum(drive.beside()[0] for drive in seen.drives)
    writes = sum(drive.beside()[1] for drive in seen.drives)
    return Corrections(
        compute=seen.thread_s / compute_s,
        optimizer=seen.kernel_s / alone.optimizer_s,
        read=sum(drive.read_bytes_per_s for drive in alone.drives.values()) / reads,
        write=sum(drive.write_bytes_per_s for drive in alone.drives.values()) / writes,
    )


def _predict(engine: Engine, calibration: Calibration) -> float:
    return simulate(scenario_of_run(engine._runtime, calibration, micro_batches=1, recompute=False)).step_s


@contextmanager
def _engine(directories: Sequence[Path], schedule: Schedule) -> Iterator[Engine]:
    with ExitStack() as closing:
        folders = [
            Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="infinity-calibration-", dir=directory)))
            for directory in directories
        ]
        with empty_init():
            model = Gpt(_SHAPE)
        config = Config(
            schedule=schedule,
            device={"kind": DeviceKind.AUTO, "budget": _DEVICE_BUDGET_NBYTES},
            host={"budget": int(_SHAPE.parameters * 12 * _HOST_SHARE) + _HOST_LEAST_NBYTES},
            nvme={"paths": folders},
        )
        yield closing.enter_context(offload(model, config, init_fn=init_weights))


def _train(engine: Engine) -> RunObserver:
    model = engine._runtime.model
    optimizer = AdamW(model.parameters())
    observer = RunObserver(engine._runtime)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.zeros(_BATCH, _SHAPE.seq, dtype=torch.long, device=device)
    for _ in range(_STEPS):
        model(inputs, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        observer.step_ended()
    return observer
