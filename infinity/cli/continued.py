"""`infinity train --resume` of a run with durable steps: finding it, and the options that it had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import INDEX_FILE
from infinity.cli.ranks import Job, this_job
from infinity.cli.train_options import TrainOptions
from infinity.config import Config, DeviceKind, Durability
from infinity.durable.notes import StoredRun, read_run
from infinity.durable.together import agree_on_run
from infinity.errors import CheckpointError, ConfigError
from infinity.ranks import discover
from infinity.rendezvous import exchange_early
from infinity.swap_directories import directory_of_rank, folders_of_ranks
from storage.durable import DURABLE_PREFIX, durable_folder


def find_continued(options: TrainOptions) -> StoredRun | None:
    """The run with durable steps that `--resume` names; None where it names a checkpoint, or nothing.

    With several ranks this rank's part of it, as of the last step that all of them have committed.

    Raises:
        ConfigError: the folder is not the first one of its run, or the run was one of another number of ranks.
        CheckpointError, IntegrityError: the run cannot be read.
    """
    folder, job = options.resume, this_job()
    if folder is None or (folder / INDEX_FILE).exists():
        return None
    _refuse_other_job(folder, job)
    return _look(folder) if job.size == 1 else _look_over_ranks(folder, job, options.device)


def _refuse_other_job(folder: Path, job: Job) -> None:
    """Folders of ranks are those of this machine, or of all, where the folder is on a file system that all share."""
    found = len([path for path in folders_of_ranks(folder) if durable_folder(path).is_dir()])
    if found and found not in ({job.local_size, job.size} if job.size > 1 else set()):
        raise ConfigError(
            f"--resume {folder}: a run of {found} ranks lies there, and this job has {job.size}. Continue it on as "
            f"many as before: torchrun --nproc-per-node {found} -m infinity train --resume {folder}"
        )


def _look_over_ranks(folder: Path, job: Job, device: str | None) -> StoredRun | None:
    timeout_s = Config().rank_timeout_s
    wants_cuda = device in (None, DeviceKind.AUTO, DeviceKind.CUDA)
    ranks = discover(uses_cuda=wants_cuda and torch.cuda.is_available())
    own = directory_of_rank(folder, job.rank)
    run = agree_on_run(ranks, lambda: _look(own), folder, timeout_s)
    if run is None:
        return None
    # A rank that was stopped before its first note has none: it is at the same step all the same.
    notes = [json.loads(text) for text in exchange_early(ranks, json.dumps(dict(run.extra), default=repr), timeout_s)]
    return replace(run, extra=run.extra or next(filter(None, notes), {}))


def _look(folder: Path) -> StoredRun | None:
    inside = folder if folder.name.startswith(DURABLE_PREFIX) else durable_folder(folder)
    run = read_run(inside)
    if run is None and inside.is_dir():
        raise ConfigError(
            f"--resume {folder}: no step was ever committed there, or it is not the first of several --nvme folders of "
            "its run; give the first"
        )
    return run


def continue_with(options: TrainOptions, run: StoredRun) -> TrainOptions:
    """Options for going on with a run: what is not given is as it was.

    Raises:
        CheckpointError: the run is not one of `infinity train`, or was stopped before it began.
    """
    if not run.extra:
        raise CheckpointError(
            f"the run in {run.path} was stopped before its first step, so there is nothing to continue. Remove it "
            "(`infinity clean --resumable`) and start it again"
        )
    try:
        was = dict(run.extra["training"])
        shape, budgets = dict(was["shape"]), dict(run.extra["budgets"])
        left = int(run.extra["last_step"]) - int(run.extra["next_step"])
        if options.preset is None:
            options = replace(options, preset=run.extra["preset"], **_missing(options, shape))
        kept = ("batch", "accumulate", "micro_batches", "seed", "lr", "clip", "recompute")
        settings = {name: was[name] for name in kept}
        settings |= {"precision": run.layout.precision, "state_format": run.layout.state_format}
        settings |= {"durability": Durability.STEP.value}
        settings |= {"device_budget": budgets["device"], "host_budget": budgets["host"]}
        settings |= {"data": tuple(map(Path, was["data"])), "nvme": tuple(map(Path, run.layout.directories))}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the run in {run.path} was not made by `infinity train` ({error!r})") from error
    settings["steps"] = left if left > 0 else None
    if options.config is not None:
        for name in ("precision", "state_format", "micro_batches", "device_budget", "host_budget"):
            del settings[name]
    return replace(options, **_missing(options, settings))


def _missing(options: TrainOptions, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that were not given as options."""
    return {name: value for name, value in values.items() if getattr(options, name) in (None, ())}
