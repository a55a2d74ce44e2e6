"""`infinity train`: the whole run, from settings to summary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infinity.cli import baseline
from infinity.cli.console import make_console
from infinity.cli.failures import deferred
from infinity.cli.loop import load_training_text
from infinity.cli.memory import map_large_blocks, rss_bytes, warm_up
from infinity.cli.offloaded import train_offloaded
from infinity.cli.ranks import this_job
from infinity.cli.report import add_baseline, make_report, write_json
from infinity.cli.settings import RunSettings, TrainOptions, resolve
from infinity.cli.tables import summary
from infinity.errors import ConfigError, InfinityError


def train(options: TrainOptions) -> None:
    """Train as the options say, and show what happened.

    Raises:
        ConfigError, PlacementError: the run cannot work as asked; nothing was changed.
        InfinityError, StorageError: what went wrong while it ran; nothing is left behind.
    """
    if not this_job().is_first:
        options = replace(options, json=None, metrics=None, trace=None)
    settings = resolve(options)
    _check_outputs(options)
    _check_resume(options)
    if options.baseline:
        baseline.check_memory(settings.training)
    map_large_blocks()
    text = load_training_text(settings.training)
    with deferred():  # the first step of a process loads much of torch
        warm_up(settings.training, settings.config.precision)
    interpreter_nbytes = rss_bytes()
    run = train_offloaded(settings, text)
    if run.measured is None:
        raise InfinityError("the run ended without measurements")
    report = make_report(
        settings,
        run.records,
        run.measured,
        first_step=run.first_step,
        interpreter_nbytes=interpreter_nbytes,
        source=text.source,
        prediction=run.prediction,
    )
    console = make_console()
    if options.baseline:
        console.print("running the same training in plain PyTorch")
        comparison = _compare(settings, run.first_step, report["losses"], run.hashes)
        add_baseline(report, comparison, run.first_step)
    console.print(summary(report))
    if options.json is not None:
        write_json(options.json, report)


def _compare(
    settings: RunSettings, first_step: int, losses: list[float], hashes: dict[str, str]
) -> baseline.Comparison:
    """A resumed run is compared with one plain run over all steps since the beginning."""
    training = replace(settings.training, steps=first_step + settings.training.steps)
    plain = baseline.run_baseline(training)
    return baseline.compare(plain, losses, hashes, settings.config.precision, uses_cuda=training.uses_cuda)


def _check_outputs(options: TrainOptions) -> None:
    """Files that are written at the end must be writable at the beginning."""
    for name, path in (("--json", options.json), ("--trace", options.trace), ("--metrics", options.metrics)):
        if path is not None:
            _check_file(name, path)


def _check_file(name: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{name} {path}: this is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{name} {path}: the folder {path.absolute().parent} does not exist")


def _check_resume(options: TrainOptions) -> None:
    if options.resume is not None and not options.resume.exists():
        raise ConfigError(f"--resume {options.resume}: there is no such folder")
