"""The offloaded run: engine, optimizer, steps, and what is read from the engine before it is closed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import nn

from infinity.bench.machine import describe_machine
from infinity.cli import checkpoints
from infinity.cli.console import make_console
from infinity.cli.display import Display
from infinity.cli.failures import undisturbed
from infinity.cli.hashing import hash_parameters
from infinity.cli.loop import BETAS, WEIGHT_DECAY, accumulate_gradients, batches_of
from infinity.cli.records import Counters, StepRecord
from infinity.cli.report import Measured
from infinity.cli.settings import RunSettings
from infinity.cli.tables import preflight
from infinity.config import Durability
from infinity.data.text import Text
from infinity.editing import gathered
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.init import empty_init
from infinity.models.gpt import Gpt, init_weights
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.plan.observed import Prediction, RunObserver
from infinity.plan.scheduler_trace import SchedulerTrace, record
from infinity.plan.wear_guard import WearGuard, WearReport


@dataclass(slots=True)
class OffloadedRun:
    """What an offloaded run gave."""

    first_step: int = 0
    records: list[StepRecord] = field(default_factory=list)
    measured: Measured | None = None
    prediction: Prediction | None = None
    wear: list[WearReport] = field(default_factory=list)
    scheduler: SchedulerTrace | None = None
    hashes: dict[str, str] = field(default_factory=dict)


def train_offloaded(settings: RunSettings, text: Text) -> OffloadedRun:
    """Run the training of `settings`. Swap files, threads and memory are given back whatever happens."""
    training, options = settings.training, settings.options
    with empty_init():
        model = Gpt(training.shape, recompute=training.recompute)
    torch.manual_seed(training.seed)
    made = offload(model, settings.config, init_fn=init_weights, resume=settings.continues is not None)
    with _closed_undisturbed(made) as engine:
        optimizer = AdamW(
            model.parameters(),
            lr=training.lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=training.clip,
        )
        display = Display(make_console(), training.steps)
        run = OffloadedRun()
        if options.resume is not None:
            run.first_step, changed = checkpoints.load(engine, options.resume, settings)
            display.say(f"resumed {options.resume}: continuing with step {run.first_step}")
            for change in changed:
                display.say(f"different from the saved run: {change}")
        tables = preflight(
            engine.plan,
            accumulate=training.accumulate,
            io_engine=engine.io_engine,
            notes=(*settings.notes, f"text: {text.source}"),
            is_resumed=run.first_step > 0,
        )
        display.say(tables)
        observer = RunObserver(engine._runtime)
        nvme = settings.config.nvme
        guard = WearGuard.of_store(engine._runtime.store, nvme.wear_budget, nvme.wear_action)
        with _metrics_file(options.metrics) as metrics, display:
            _steps(settings, text, engine, model, optimizer, run, display, observer, guard, metrics)
        run.prediction = observer.predict(micro_batches=training.accumulate, recompute=training.recompute)
        if options.save is not None:
            checkpoints.save(engine, options.save, optimizer, settings, run.first_step + len(run.records))
            display.say(f"saved to {options.save}")
        run.measured = Measured.of(engine)
        run.wear = guard.report()
        if options.scheduler_trace is not None:
            run.scheduler = record(
                engine._runtime,
                observer,
                machine=describe_machine(),
                micro_batches=training.accumulate,
                traffic=run.measured.traffic.per_step[-1],
            )
        if options.trace is not None:
            engine.trace.write_chrome(options.trace)
        if options.baseline:
            run.hashes = hash_parameters(model, gathered)
    return run


def _steps(
    settings: RunSettings,
    text: Text,
    engine: Engine,
    model: nn.Module,
    optimizer: AdamW,
    run: OffloadedRun,
    display: Display,
    observer: RunObserver,
    guard: WearGuard,
    metrics: IO[str] | None,
) -> None:
    training = settings.training
    batches = batches_of(training, text)
    device = torch.device("cuda" if training.uses_cuda else "cpu")
    before = _counters(engine)
    last_step = run.first_step + training.steps
    for step in range(run.first_step, last_step):
        started_s = time.perf_counter()
        loss = accumulate_gradients(model, batches, step, training.accumulate, device)
        optimizer.step()
        optimizer.zero_grad()
        if settings.config.durability is Durability.STEP:
            engine.note(checkpoints.position(settings, step + 1, last_step))
        seconds = time.perf_counter() - started_s
        observer.step_ended()
        verdict = guard.step_ended()
        norm = optimizer.last_grad_norm
        counters = _counters(engine)
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=None if norm is None else norm.item(),
            seconds=seconds,
            tokens=training.tokens_per_step,
            counters=counters,
            before=before,
        )
        before = counters
        run.records.append(record)
        display.step(record)
        if metrics is not None:
            metrics.write(json.dumps(record.to_json()) + "\n")
            metrics.flush()
        if verdict.message:
            display.say(verdict.message)
        if verdict.must_stop:
            display.say(f"stopping after step {step}: nvme.wear_action is 'stop'")
            return
        if verdict.pause_s and step + 1 < last_step:
            time.sleep(verdict.pause_s)
            observer.paused(verdict.pause_s)


def _counters(engine: Engine) -> Counters:
    """The engine's counters as they stand. `engine.metrics()` would wait for writes, which overlap the next step."""
    return engine.counters()


@contextmanager
def _closed_undisturbed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        with undisturbed():
            engine.close()


@contextmanager
def _metrics_file(path: Path | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--metrics {path}: cannot be written: {error.strerror or error}") from error
    with file:
        yield file
