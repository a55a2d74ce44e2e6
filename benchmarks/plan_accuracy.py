"""Predicted against measured step times, from a calibration made before the runs.

For each model size one run on the unthrottled drive gives the seconds of the training thread and of the kernels. Then
every schedule runs on one and two throttled drives of two speeds; its step is predicted before it starts, from that
calibration and the speeds of the throttle, by the simulated scheduler. On the drive as it is, every schedule is
predicted from the calibration alone. Real files, real threads. The machine has to be quiet.

    python benchmarks/plan_accuracy.py [DIRECTORY] [--json FILE] [--steps N] [--drives real,throttled]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.bench.machine import describe_machine
from infinity.engine import Engine
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.plan.drives import DriveModel
from infinity.plan.observed import Calibration, RunObserver, scenario_of_run, with_drives
from infinity.plan.simulate import simulate
from storage.backends.base import Backend
from storage.backends.throttled import Throttle, ThrottledBackend

SHAPES = (GptShape(8, 160, 4, 64), GptShape(8, 256, 4, 64), GptShape(12, 320, 4, 64))
SCHEDULES = ("synchronous", "overlapped", "deferred")
RATES = ((60e6, 40e6), (200e6, 130e6))  # throttles: read and write, bytes/s of one drive
_DEVICE_BUDGET, _HOST_SHARE = "32MiB", 0.35  # of the state in host memory


@contextmanager
def opened(shape: GptShape, schedule: str, folders: list[Path], throttle: Throttle | None) -> Iterator[Engine]:
    with infinity.empty_init():
        model = Gpt(shape)
    torch.manual_seed(0)
    config = infinity.Config(
        schedule=schedule,
        device={"kind": "cpu", "budget": _DEVICE_BUDGET},
        host={"budget": int(shape.parameters * 12 * _HOST_SHARE) + (12 << 20)},
        nvme={"paths": folders},
    )

    def wrap(backend: Backend) -> Backend:
        return backend if throttle is None else ThrottledBackend(backend, throttle)

    with infinity.offload(model, config, init_fn=init_weights, wrap_backend=wrap) as engine:
        yield engine


def run(engine: Engine, steps: int) -> RunObserver:
    model = engine._runtime.model
    optimizer = infinity.AdamW(model.parameters())
    observer = RunObserver(engine._runtime)
    inputs = torch.zeros(2, 64, dtype=torch.long)
    for _ in range(steps):
        model(inputs, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        observer.step_ended()
    return observer


def calibrate(shape: GptShape, root: Path, steps: int) -> Calibration:
    with opened(shape, "synchronous", [root / "drive0"], None) as engine:
        observer = run(engine, steps)
        return observer.calibrate(observer.moments[1:])


def compare(
    shape: GptShape,
    calibration: Calibration,
    schedule: str,
    rates: tuple[float, float] | None,
    folders: list[Path],
    steps: int,
) -> dict[str, Any]:
    """One run: predicted before it starts, then measured without its first two steps. `rates` are a throttle's."""
    throttle, expected = None, calibration
    if rates is not None:
        throttle = Throttle(*rates)
        models = [DriveModel(*rates, latency_s=0.0, duplex=1.0)] * len(folders)
        expected = with_drives(calibration, models)
    with opened(shape, schedule, folders, throttle) as engine:
        scenario = scenario_of_run(engine._runtime, expected, micro_batches=1, recompute=False)
        predicted_s = simulate(scenario).step_s
        moments = run(engine, steps).moments[2:]
    measured_s = (moments[-1].at_s - moments[0].at_s) / (len(moments) - 1)
    row = {
        "parameters": shape.parameters,
        "schedule": schedule,
        "drives": len(folders),
        "throttle_bytes_per_s": rates,
        "predicted_s": round(predicted_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(predicted_s / measured_s - 1, 4),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--drives", default="real,throttled", help="which of them; both by default")
    options = parser.parse_args()
    kinds = set(options.drives.split(","))
    if not kinds <= {"real", "throttled"}:
        parser.error(f"--drives {options.drives}: allowed: real, throttled, or both with a comma between")
    cases: list[tuple[tuple[float, float] | None, int]] = [(None, 1)] if "real" in kinds else []
    cases += [(rates, count) for rates in RATES for count in (1, 2)] if "throttled" in kinds else []
    started_s = time.perf_counter()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        folders = [root / f"drive{number}" for number in range(2)]
        for folder in folders:
            folder.mkdir()
        for shape in SHAPES:
            calibration = calibrate(shape, root, options.steps)
            for schedule in SCHEDULES:
                for rates, count in cases:
                    rows.append(compare(shape, calibration, schedule, rates, folders[:count], options.steps))
    errors = [abs(row["error"]) for row in rows]
    result = {
        "machine": describe_machine(),
        "torch": torch.__version__,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "elapsed_s": round(time.perf_counter() - started_s, 1),
        "rows": rows,
    }
    print(f"median {result['median_error']:.1%}, worst {result['worst_error']:.1%}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
