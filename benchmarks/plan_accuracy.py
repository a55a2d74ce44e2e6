"""Predicted against measured step times, from calibrations made before the runs.

Per model size the benchmark goes round by round, and in a round schedule by schedule: first two runs on the drive as it
is, from which everything is fitted (overlapped: what computing loses to the threads beside it; synchronous: seconds of
the training thread, of kernels and hand-overs, rates of the drive); then the schedule, predicted before it starts. So
a slow minute of the machine or of a drive that others share meets calibrations and runs alike, and the error of a case
is the median of its rounds. In the same way every schedule runs on one and two throttled drives of two speeds,
predicted from a calibration just before them and the speeds of the throttle, or what the real drive has for each. Real
files, real threads. Torch and the optimizer compute with one thread each: a training run on a GPU does not compute with
the cores that move its bytes either. The machine has to be quiet; it takes 25 to 40 minutes then.

    python benchmarks/plan_accuracy.py [DIRECTORY] [--json FILE] [--steps N] [--drives real,throttled]
        [--rounds N] [--throttled-rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.bench.arguments import at_least, made_folder, result_file
from infinity.bench.machine import describe_machine
from infinity.engine import Engine
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.plan.drives import DriveModel
from infinity.plan.observed import Calibration, RunObserver, scenario_of_run, with_drives
from infinity.plan.phases import median_step_s
from infinity.plan.simulate import simulate
from storage.backends.base import Backend
from storage.backends.throttled import Throttle, ThrottledBackend

SHAPES = (GptShape(8, 256, 4, 64), GptShape(12, 320, 4, 64), GptShape(12, 448, 8, 64))
SCHEDULES = ("synchronous", "overlapped", "deferred")
RATES = ((200e6, 130e6), (400e6, 260e6))  # throttles: read and write, bytes/s of one drive
_LEAST_STEPS, _LEAST_S = 4, 3.0  # of a run that is measured, after its first two steps
_DEVICE_BUDGET, _HOST_SHARE = "32MiB", 0.35  # of the state in host memory


@contextmanager
def opened(shape: GptShape, schedule: str, folders: list[Path], throttle: Throttle | None) -> Iterator[Engine]:
    with infinity.empty_init():
        model = Gpt(shape)
    torch.manual_seed(0)
    config = infinity.Config(
        schedule=schedule,
        optimizer_threads=1,
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
    """From two runs: in one much goes on beside computing, which shows what that costs; the other shows the rest."""
    with opened(shape, "overlapped", [root / "drive0"], None) as engine:
        observer = run(engine, steps)
        contention = observer.calibrate(observer.moments[1:]).contention
    with opened(shape, "synchronous", [root / "drive0"], None) as engine:
        observer = run(engine, steps)
        return observer.calibrate(observer.moments[1:], contention)


@dataclass(frozen=True, slots=True)
class Case:
    """What runs: a model with a schedule on so many drives, which are throttled to read and write so fast."""

    shape: GptShape
    schedule: str
    drives: int
    rates: tuple[float, float] | None


def measure(case: Case, calibration: Calibration, root: Path) -> tuple[float, float]:
    """Seconds of a step, as predicted before the run starts, and as measured without its first two steps."""
    throttle, expected = None, calibration
    if case.rates is not None:
        throttle = Throttle(*case.rates)
        expected = with_drives(calibration, [_throttled(case, calibration.drives[0])] * case.drives)
    folders = [root / f"drive{number}" for number in range(case.drives)]
    with opened(case.shape, case.schedule, folders, throttle) as engine:
        scenario = scenario_of_run(engine._runtime, expected, micro_batches=1, recompute=False)
        predicted_s = simulate(scenario).step_s
        steps = max(_LEAST_STEPS, math.ceil(_LEAST_S / predicted_s))  # else a moment's disturbance is most of it
        return predicted_s, median_step_s(run(engine, 2 + steps).moments[2:])


def _throttled(case: Case, real: DriveModel) -> DriveModel:
    """One of the drives: as fast as its throttle lets it be, or its part of the real one that is behind all of them."""
    if case.rates is None:
        return real
    shares = (rate / case.drives for rate in real.beside())
    read, write = (min(pair) for pair in zip(case.rates, shares, strict=True))
    return DriveModel(read, write, latency_s=0.0, duplex=1.0)


def row_of(case: Case, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """The result of a case: medians over its rounds."""
    row = {
        "parameters": case.shape.parameters,
        "schedule": case.schedule,
        "drives": case.drives,
        "throttle_bytes_per_s": case.rates,
        "predicted_s": round(statistics.median(predicted_s for predicted_s, _ in pairs), 4),
        "measured_s": round(statistics.median(measured_s for _, measured_s in pairs), 4),
        "error": round(statistics.median(predicted_s / measured_s - 1 for predicted_s, measured_s in pairs), 4),
        "errors": [round(predicted_s / measured_s - 1, 4) for predicted_s, measured_s in pairs],
    }
    print(json.dumps(row), flush=True)
    return row


def rows_of(shape: GptShape, rounds: dict[str, int], root: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Every case of one model size.

    Args:
        rounds: by kind of drives; a kind that is not named does not run.
        steps: of the runs from which a calibration is fitted.
    """
    found: dict[Case, list[tuple[float, float]]] = {}
    for _ in range(rounds.get("real", 0)):
        for schedule in SCHEDULES:
            calibration = calibrate(shape, root, steps)
            case = Case(shape, schedule, 1, None)
            found.setdefault(case, []).append(measure(case, calibration, root))
    for _ in range(rounds.get("throttled", 0)):
        for schedule in SCHEDULES:
            calibration = calibrate(shape, root, steps)
            for rates, count in itertools.product(RATES, (1, 2)):
                case = Case(shape, schedule, count, rates)
                found.setdefault(case, []).append(measure(case, calibration, root))
    yield from (row_of(case, pairs) for case, pairs in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=made_folder)
    parser.add_argument("--json", type=result_file)
    longest = "of the runs that the largest model is calibrated from; smaller ones make more"
    parser.add_argument("--steps", type=at_least(4), default=8, help=longest)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="of runs on the drive as it is")
    throttled = "of runs on throttled drives, which vary less"
    parser.add_argument("--throttled-rounds", type=at_least(1), default=3, help=throttled)
    parser.add_argument("--drives", default="real,throttled", help="which of them; both by default")
    options = parser.parse_args()
    every = {"real": options.rounds, "throttled": options.throttled_rounds}
    rounds = {kind: every[kind] for kind in options.drives.split(",") if kind in every}
    if len(rounds) != len(options.drives.split(",")):
        parser.error(f"--drives {options.drives}: allowed: real, throttled, or both with a comma between")
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        for number in range(2):
            (root / f"drive{number}").mkdir()
        for shape in SHAPES:
            longer = math.sqrt(SHAPES[-1].parameters / shape.parameters)
            rows += rows_of(shape, rounds, root, round(options.steps * longer))
    errors = [abs(row["error"]) for row in rows]
    result = {
        "machine": describe_machine(),
        "torch": torch.__version__,
        "calibration_steps": options.steps,
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
