"""Going back to the last commit: at the start of a process that continues a run, and after a step was lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.load import go_on, refuse_gathered, renew_copies, stand_still
from infinity.checkpoint.parts import check_settings, persistent_buffers, restore_settings
from infinity.checkpoint.rng import restore_rng_state
from infinity.checkpoint.tiers import CHECKPOINT_STEP
from infinity.config import Config, Durability
from infinity.durable.committer import Committer
from infinity.durable.journal import Journal, layout_of
from infinity.durable.notes import StoredRun, read_run, refuse_other_layout
from infinity.errors import CheckpointError, ConfigError
from infinity.iteration import Iteration
from infinity.lockstep import Lockstep, Want
from infinity.observe.stalls import StallCause
from infinity.runtime import Runtime
from infinity.updates import Updates
from storage.durable import DurableFolder, durable_folder
from storage.manifest import MANIFEST_FILE
from storage.swapfile import OWNER_FILE, make_directory_error
from storage.types import Priority, Ticket, TrafficTag

_log = logging.getLogger(__name__)


def restore_shards(runtime: Runtime, run: StoredRun) -> None:
    """Make the committed state of a run the engine's: counts, and what is in host memory for good.

    What is read while training stays in the swap files, where it is. Nothing may be in flight, and no copy held that
    is not there for good.

    Raises:
        CheckpointError: it is of another model.
        StorageError: it cannot be read.
    """
    refuse_other_layout(run, layout_of(runtime))
    tickets = [*_restore_states(runtime, run), *_restore_copies(runtime)]
    for ticket in tickets:
        runtime.stalls.settle(ticket, StallCause.NVME_READ)
    for ticket in tickets:
        ticket.result()
    _restore_buffers(runtime, run)


def _restore_states(runtime: Runtime, run: StoredRun) -> Iterable[Ticket]:
    for index, state in runtime.states.items():
        key = runtime.groups[index].key
        state.steps[:] = run.state.counts[key]
        for record, is_initialised in zip(state.records, run.state.initialised[key], strict=True):
            record.is_initialised = is_initialised
            if record.lease is not None and is_initialised:
                yield _read(runtime, record.key, record.lease.memory, "state")


def _restore_copies(runtime: Runtime) -> Iterable[Ticket]:
    renew_copies(runtime)
    for copy in runtime.copies:
        if copy.pinned:
            yield _read(runtime, copy.group.key, copy.memory, "param")


def _read(runtime: Runtime, key: str, memory: memoryview, kind: str) -> Ticket:
    if runtime.store is None:
        raise RuntimeError("a durable run lies in a swap file, but there is none")
    return runtime.store.submit_read(key, memory, priority=Priority.DEMAND, tag=TrafficTag(kind, CHECKPOINT_STEP))


def _restore_buffers(runtime: Runtime, run: StoredRun) -> None:
    buffers = persistent_buffers(runtime.model)
    found = {name: (buffer.dtype, buffer.shape) for name, buffer in run.buffers.items()}
    if {name: (buffer.dtype, buffer.shape) for name, buffer in buffers.items()} != found:
        raise CheckpointError(
            f"the buffers of the run in {run.path} are not those of this model; build the model it was started with"
        )
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(run.buffers[name])


def _why_none(path: Path) -> str:
    if not path.is_dir():
        return "there is no such folder; is its drive mounted?"
    return "no step was ever committed there"


def _refuse_missing_drives(run: StoredRun, paths: Sequence[Path]) -> None:
    """A drive that is not mounted is told before anything is made where it should be."""
    missing = [str(path) for path in paths if not durable_folder(path).is_dir()]
    if missing:
        raise CheckpointError(
            f"the run in {run.path} cannot be resumed: no part of it is in {', '.join(missing)}. Mount the drive, or "
            f"give the directories that it had: {', '.join(run.layout.directories)}"
        )


def find_run(config: Config, *, resume: bool) -> StoredRun | None:
    """The run that an engine is to continue; None for a new one, before which `make_way` is called.

    Raises:
        ConfigError: the settings do not fit, or a run is there that would be overwritten.
        CheckpointError: there is nothing to continue.
    """
    paths = config.nvme.paths
    if config.durability is not Durability.STEP:
        if resume:
            raise ConfigError("resume=True continues a run with durability='step'; for a checkpoint: engine.load()")
        return None
    if paths is None:
        raise ConfigError("durability='step' keeps the state in nvme.paths: give it directories, one per drive")
    folder = durable_folder(paths[0])
    run = read_run(folder)
    if run is None and resume:
        raise CheckpointError(
            f"there is no run to resume in {paths[0]}: {_why_none(paths[0])}. Give the directories of the run in "
            "the order in which it had them"
        )
    if run is not None and resume:
        _refuse_missing_drives(run, paths)
    if run is not None and not resume:
        if run.is_untrained:
            return None
        raise ConfigError(
            f"{folder} holds a run at step {run.step}, which would be lost. Continue it (infinity.offload(..., "
            f"resume=True), then engine.restore(); one of the command line: `infinity train --resume {paths[0]}`), "
            f"choose another directory, or remove it (`infinity clean --resumable {paths[0]}`)"
        )
    return run


def make_way(config: Config) -> None:
    """Remove a run that ended before its first step from where a new one begins; nothing is lost with it.

    Raises:
        SwapInUseError: a process is still at it.
        StorageError: it is damaged, or cannot be removed.
    """
    paths = config.nvme.paths
    if config.durability is not Durability.STEP or not paths:
        return
    if (run := read_run(durable_folder(paths[0]))) is None or not run.is_untrained:
        return
    for path in paths:  # the first one has the manifest, without which the files of the others mean nothing
        if durable_folder(path).is_dir():
            _empty_untrained(path)
    _log.info("%s held a run that ended before its first step; a new one begins there", run.path)


def _empty_untrained(directory: Path) -> None:
    path = durable_folder(directory)
    try:
        folder = DurableFolder(path, "making way for a new run")
        try:
            run = read_run(path)  # nobody else is at it now; until now somebody might have been
            if run is not None and not run.is_untrained:
                raise ConfigError(f"{path} holds a run at step {run.step} by now, which would be lost")
            # What sqlite keeps beside the manifest goes before it, for it would be applied to the next one.
            for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST_FILE):
                if file.name != OWNER_FILE:
                    file.unlink()
        finally:
            folder.close()
    except OSError as error:
        raise make_directory_error(directory, error) from error


def restore(
    runtime: Runtime,
    updates: Updates,
    iteration: Iteration,
    journal: Journal,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Go back to the last commit; see `Engine.restore`."""
    committer = runtime.committer
    if committer is None:
        raise ConfigError("the steps of this engine are not durable")
    runtime.saver.settle()  # what saves hold of the swap files is let go of
    committer.settle()
    for update in runtime.in_flight:
        runtime.stalls.settle(update.written, StallCause.NVME_WRITE)
    runtime.in_flight.clear()
    store = committer.store
    if runtime.lockstep is not None:
        _meet_at_last_commit(runtime.lockstep, committer, runtime.config.nvme.io_timeout_s)
    run = StoredRun.parse(store.directory, store.step, store.notes())
    has_settings = run.state.optimizer is not None  # not before the first step
    if optimizer is not None and has_settings:
        check_settings(run.state.optimizer, optimizer, runtime.groups)
    iteration.reset()
    refuse_gathered(runtime)
    with updates.restoring(f"going back to step {run.step}"):
        stand_still(runtime)
        store.roll_back(runtime.config.nvme.io_timeout_s)
        committer.recover()
        restore_shards(runtime, run)
        go_on(runtime)
    journal.continue_from(run)
    if run.step or run.state.is_noted:  # see [Note: random numbers of a commit]
        restore_rng_state(run.state.rng)
    if optimizer is not None and has_settings:
        restore_settings(run.state.optimizer, optimizer)
    return run.extra


def _meet_at_last_commit(lockstep: Lockstep, committer: Committer, timeout_s: float) -> None:
    """Before the ranks go back to their last commit: those that are ahead of another one go back to that of before.

    Raises:
        CheckpointError: their commits differ by more than one.
        StorageError: this rank cannot go back.
    """
    epochs = [brought[0] for brought in lockstep.meet(Want.RESTORE, committer.epoch)]
    if max(epochs) - min(epochs) > 1:
        raise CheckpointError(f"the last commits of the ranks are {epochs}; start again with resume=True")
    if committer.epoch > min(epochs):
        committer.store.step_back(timeout_s)
        committer.epoch = min(epochs)
