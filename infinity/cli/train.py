"""`infinity train`: the whole run, from settings to summary."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.bench.machine import describe_machine
from infinity.checkpoint.folder import refuse_other
from infinity.checkpoint.format import INDEX_FILE
from infinity.checkpoint.series import candidates
from infinity.cli import baseline
from infinity.cli.console import make_console
from infinity.cli.files import check_files, write_text
from infinity.cli.loop import load_training_text
from infinity.cli.memory import check_activations, map_large_blocks, rss_bytes, warm_up
from infinity.cli.offloaded import OffloadedRun, train_offloaded
from infinity.cli.ranks import this_job
from infinity.cli.recording import Recording
from infinity.cli.report import add_baseline, make_report, open_report
from infinity.cli.settings import RunSettings, resolve
from infinity.cli.stopping import deferred, undisturbed
from infinity.cli.tables import summary
from infinity.cli.train_options import TrainOptions
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.plan.calibration import CalibrationFile, Residual, now
from infinity.plan.observed import Prediction
from infinity.plan.scheduler_trace import to_text
from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE
from storage.filesystems import existing_part


def train(options: TrainOptions) -> None:
    """Train as the options say, and show what happened.

    Raises:
        ConfigError, PlacementError: the run cannot work as asked; nothing was changed.
        InfinityError, StorageError: what went wrong while it ran; nothing is left behind.
    """
    if not this_job().is_first:
        options = replace(options, json=None, metrics=None, trace=None, record=None)
    if options.record is not None:
        options = _recorded(options, options.record)
    settings = resolve(options)
    _check_outputs(options)
    _check_resume(settings)
    _check_save(options)
    check_activations(settings.training)
    if options.baseline:
        baseline.check_memory(settings.training)
    recording = Recording(options.record, options.json)
    recording.open(open_report(settings))
    try:
        map_large_blocks(settings.training)
        text = load_training_text(settings.training)
        with deferred():  # the first step of a process loads much of torch
            warm_up(settings.training, settings.config.precision, settings.config.state_format)
        interpreter_nbytes = rss_bytes()
        run = train_offloaded(settings, text, recording)
        report = _report(settings, run, interpreter_nbytes)
        recording.keep(report)
        _tell(settings, run, report)
        recording.finish(report)
    except BaseException as error:
        with undisturbed():
            recording.fail(error)
        raise


def _report(settings: RunSettings, run: OffloadedRun, interpreter_nbytes: int) -> dict[str, Any]:
    if run.measured is None:
        raise InfinityError("the run ended without measurements")
    return make_report(
        settings,
        run.begun,
        run.records,
        run.measured,
        interpreter_nbytes=interpreter_nbytes,
        prediction=run.prediction,
        wear=run.wear,
    )


def _tell(settings: RunSettings, run: OffloadedRun, report: dict[str, Any]) -> None:
    """Everything but the report itself, to which the comparison with plain PyTorch is added."""
    options, console = settings.options, make_console()
    if run.prediction is not None and this_job().is_first:
        _keep_residual(settings, run.prediction)
    if options.scheduler_trace is not None and run.scheduler is not None:
        write_text("--scheduler-trace", options.scheduler_trace, to_text(run.scheduler))
    if options.baseline:
        console.print("running the same training in plain PyTorch")
        comparison = _compare(settings, run.first_step, report["losses"], run.hashes)
        add_baseline(report, comparison, run.first_step)
    console.print(summary(report))


def _recorded(options: TrainOptions, folder: Path) -> TrainOptions:
    """The files of a record go to its folder; elsewhere `infinity report` would miss them."""
    given = [name for name in ("json", "metrics", "trace") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"--record {folder} writes what --{given[0]} does, into its folder; leave --{given[0]} out")
    return replace(options, json=folder / RUN_FILE, metrics=folder / METRICS_FILE, trace=folder / TRACE_FILE)


def _keep_residual(settings: RunSettings, prediction: Prediction) -> None:
    """How the prediction turned out, beside this machine's calibration."""
    shape, schedule = settings.training.shape, settings.config.schedule.value
    what = f"infinity train, {shape.layers} x {shape.hidden}, {schedule}, {settings.config.precision.value}"
    residual = Residual(what, prediction.step_s, prediction.measured_s, now())
    CalibrationFile(describe_machine()).note(residual)


def _compare(
    settings: RunSettings, first_step: int, losses: list[float], hashes: dict[str, str]
) -> baseline.Comparison:
    """A resumed run is compared with one plain run over all steps since the beginning, as many as it came to."""
    training = replace(settings.training, steps=first_step + len(losses))
    plain = baseline.run_baseline(training)
    return baseline.compare(plain, losses, hashes, settings.config.precision, training)


def _check_outputs(options: TrainOptions) -> None:
    files = {"scheduler_trace": options.scheduler_trace, "io_log": options.io_log}
    if options.record is None:  # else its folder is made later
        files |= {"json": options.json, "trace": options.trace, "metrics": options.metrics}
    check_files((options.config, *options.data), **files)


def _check_save(options: TrainOptions) -> None:
    """What could not be saved at the end is refused at the beginning."""
    if options.save is None:
        return
    try:
        refuse_other(options.save, lambda there: (there / INDEX_FILE).exists())
    except CheckpointError as error:
        raise ConfigError(f"--save {error}") from None
    above = existing_part(options.save.absolute().parent)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--save {options.save}: nothing can be written in {above}; give another folder")


def _check_resume(settings: RunSettings) -> None:
    """Refuse a folder with nothing to continue before a model is offloaded for it."""
    folder = settings.options.resume
    if folder is None or settings.continues is not None:
        return
    if not folder.exists():
        raise ConfigError(f"--resume {folder}: there is no such folder")
    if not any((checkpoint / INDEX_FILE).exists() for checkpoint in candidates(folder)):
        raise ConfigError(
            f"--resume {folder}: neither a checkpoint nor a run with durable steps is there; give the folder of "
            "--save, or the first of --nvme"
        )
