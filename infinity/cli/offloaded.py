"""The offloaded run: engine, optimizer, steps, and what is read from the engine before it is closed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bench.machine import describe_machine
from infinity.cli import checkpoints
from infinity.cli.console import make_console
from infinity.cli.display import Display
from infinity.cli.hashing import hash_parameters
from infinity.cli.loop import BETAS, WEIGHT_DECAY, accumulate_gradients, batches_of
from infinity.cli.recording import Recording
from infinity.cli.records import Counters, StepRecord
from infinity.cli.report import Measured, begin_report
from infinity.cli.settings import RunSettings
from infinity.cli.stopping import undisturbed
from infinity.cli.tables import preflight
from infinity.config import Durability
from infinity.data.batches import Batches
from infinity.data.text import Text
from infinity.editing import gathered
from infinity.empty import empty_init
from infinity.engine import Engine
from infinity.models.gpt import Gpt, init_weights
from infinity.observe.exporters import JsonLines
from infinity.observe.tolerant import TolerantSink
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.plan.observed import Prediction, RunObserver
from infinity.plan.scheduler_trace import LEAST_STEPS, SchedulerTrace, record
from infinity.plan.wear_guard import WearReport
from infinity.wear import WearWatch


@dataclass(slots=True)
class OffloadedRun:
    """What an offloaded run gave."""

    first_step: int = 0
    begun: dict[str, Any] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    measured: Measured | None = None
    prediction: Prediction | None = None
    wear: list[WearReport] = field(default_factory=list)
    scheduler: SchedulerTrace | None = None
    hashes: dict[str, str] = field(default_factory=dict)


def train_offloaded(settings: RunSettings, text: Text, recording: Recording) -> OffloadedRun:
    """Run the training of `settings`. Swap files, threads and memory are given back whatever happens."""
    training = settings.training
    with empty_init():
        model = Gpt(training.shape, recompute=training.recompute)
    torch.manual_seed(training.seed)
    made = offload(model, settings.config, init_fn=init_weights, resume=settings.continues is not None)
    with _closed_undisturbed(made) as engine:
        session = _Session(settings, engine, model)
        try:
            recording.begin(session.begin(text))
            with session.metrics_file() as metrics, session.display:
                session.train(text, metrics)
            return session.finish()
        except BaseException as error:
            with undisturbed():
                recording.fail(error, engine.trace, session.close())
            raise


class _Session:
    """One run on an open engine, in three parts: `begin`, `train`, `finish`. Used by the training thread."""

    def __init__(self, settings: RunSettings, engine: Engine, model: nn.Module) -> None:
        training = settings.training
        self._settings, self._engine, self._model = settings, engine, model
        self._optimizer = AdamW(
            model.parameters(),
            lr=training.lr,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=training.clip,
        )
        drives = [drive.directory for drive in engine.drives]
        self.display = Display(make_console(), training.steps, engine.counters, drives)
        self._run = OffloadedRun()
        self._wear: WearWatch | None = None

    def begin(self, text: Text) -> dict[str, Any]:
        """Go on where a saved run stopped, if one is; show the plan; count from here. Gives what is known by now."""
        engine, settings, run = self._engine, self._settings, self._run
        options = settings.options
        if options.resume is not None:
            run.first_step, changed = checkpoints.load(engine, options.resume, settings)
            self.display.say(f"resumed {options.resume}: continuing with step {run.first_step}")
            for change in changed:
                self.display.say(f"different from the saved run: {change}")
        if settings.config.durability is Durability.STEP:  # a run that is killed in its first step can be continued
            first_step, steps = run.first_step, settings.training.steps
            engine.note(checkpoints.position(settings, first_step, first_step + steps))
        tables = preflight(
            engine.plan,
            accumulate=settings.training.accumulate,
            io_engine=engine.io_engine,
            notes=(*settings.notes, f"text: {text.source}"),
            is_resumed=run.first_step > 0,
        )
        self.display.say(tables)
        self._observer = RunObserver(engine._runtime)
        self._wear = WearWatch(engine, tell=self.display.say, pause=self._pause)
        run.begun = begin_report(
            settings, engine.plan, engine.counters(), first_step=run.first_step, source=text.source
        )
        return run.begun

    @contextmanager
    def metrics_file(self) -> Iterator[TolerantSink | None]:
        """What `--metrics` names; of a run that goes on it keeps the rows of earlier steps. A record begins anew."""
        options = self._settings.options
        if options.metrics is None:
            yield None
            return
        first_step = self._run.first_step if options.record is None else 0
        file = JsonLines(options.metrics, first_step=first_step)
        with closing(TolerantSink(file, f"--metrics {options.metrics}")) as sink:
            yield sink

    def train(self, text: Text, metrics: TolerantSink | None) -> None:
        """All steps, or those until the wear budget is spent."""
        training, run = self._settings.training, self._run
        batches = batches_of(training, text)
        before = self._engine.counters()
        last_step = run.first_step + training.steps
        for step in range(run.first_step, last_step):
            record = self._step(batches, step, last_step, before)
            before = record.counters
            run.records.append(record)
            self.display.step(record)
            if metrics is not None:
                metrics.write(step, record.to_json())
            if self._is_worn(step, last_step):
                return

    def _step(self, batches: Batches, step: int, last_step: int, before: Counters) -> StepRecord:
        training, engine, optimizer = self._settings.training, self._engine, self._optimizer
        device = torch.device("cuda" if training.uses_cuda else "cpu")
        started_s = time.perf_counter()
        loss = accumulate_gradients(self._model, batches, step, training.accumulate, device)
        optimizer.step()
        optimizer.zero_grad()
        if self._settings.config.durability is Durability.STEP:
            engine.note(checkpoints.position(self._settings, step + 1, last_step))
        seconds = time.perf_counter() - started_s
        self._observer.step_ended()
        norm = optimizer.last_grad_norm
        return StepRecord(
            step=step,
            loss=loss,
            grad_norm=None if norm is None else norm.item(),
            seconds=seconds,
            tokens=training.tokens_per_step,
            counters=engine.counters(),  # `metrics()` would wait for writes, which overlap the next step
            before=before,
        )

    def close(self) -> list[WearReport]:
        """However the run ends, what it has written counts."""
        return [] if self._wear is None else self._wear.report()

    def _is_worn(self, step: int, last_step: int) -> bool:
        """Do what the wear budget asks for after a step; whether the run has to stop."""
        must_stop = self._wear is not None and self._wear.step_ended(is_last=step + 1 == last_step)
        if must_stop:
            self.display.say(f"stopping after step {step}: nvme.wear_action is 'stop'")
        return must_stop

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self._observer.paused(seconds)

    def finish(self) -> OffloadedRun:
        """Predict, save, and read from the engine what is read before it is closed."""
        training, options = self._settings.training, self._settings.options
        engine, run = self._engine, self._run
        run.prediction = self._observer.predict(micro_batches=training.accumulate, recompute=training.recompute)
        if options.save is not None:
            next_step = run.first_step + len(run.records)
            checkpoints.save(engine, options.save, self._optimizer, self._settings, next_step)
            self.display.say(f"saved to {options.save}")
        run.measured = Measured.of(engine)
        run.wear = [] if self._wear is None else self._wear.report()
        if options.scheduler_trace is not None:
            run.scheduler = self._scheduler_trace(run.measured)
        if options.trace is not None:
            self._write_trace(options.trace)
        if options.baseline:
            run.hashes = hash_parameters(self._model, gathered)
        return run

    def _write_trace(self, path: Path) -> None:
        """What has been trained is worth more than how."""
        try:
            self._engine.trace.write_chrome(path)
        except OSError as error:
            self.display.say(f"no trace in {path}: {error.strerror or error}")

    def _scheduler_trace(self, measured: Measured) -> SchedulerTrace | None:
        if len(self._run.records) < LEAST_STEPS:  # a run that was stopped
            self.display.say(f"no --scheduler-trace: fewer than {LEAST_STEPS} steps have run")
            return None
        return record(
            self._engine._runtime,
            self._observer,
            machine=describe_machine(),
            micro_batches=self._settings.training.accumulate,
            traffic=measured.traffic.per_step[-1],
        )


@contextmanager
def _closed_undisturbed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        with undisturbed():
            engine.close()
