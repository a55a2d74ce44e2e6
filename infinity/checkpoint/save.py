"""Saving: what is there is captured, then written behind training or while the caller waits.

[Note: what a save costs] Capturing waits until the updates so far have landed in the swap files, and takes note
of where everything lies. Writing shares blocks where the file system can and copies inside the kernel where not;
nothing is converted, and nothing passes through the budgets. Training that goes on meanwhile writes elsewhere, so the
swap files need room for what a step rewrites once more, as long as a save is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.checkpoint.capture import capture_group
from infinity.checkpoint.description import describe_model
from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.format import (
    BUFFERS_FILE,
    EXTRA_FILE,
    INDEX_FILE,
    FileEntry,
    Index,
    OptimizerEntry,
    ParameterEntry,
    checksum_of_file,
    merged,
)
from infinity.checkpoint.parts import (
    aliases_of,
    copy_buffers,
    optimizer_entries,
    pack_extra,
    save_buffers,
    versions,
    write_synced,
)
from infinity.checkpoint.pending import SavedGradients, save_gradients
from infinity.checkpoint.rng import rng_state
from infinity.checkpoint.saver import CapturedSave
from infinity.checkpoint.series import Keep, check_keep, note_saved
from infinity.checkpoint.shard_file import ShardFile
from infinity.runtime import Runtime
from infinity.updates import Updates
from storage.held import HeldKeys
from storage.versioned import VersionedStore

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """A scheduler, a loss scaler, or anything else that gives its state as a dictionary."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True, slots=True)
class Beside:
    """What is saved beside the model: see `Engine.save`."""

    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    extra: Mapping[str, Any] | None = None

    def pack(self) -> bytes:
        """All but the optimizer as bytes. Raises CheckpointError for what cannot be read again."""
        content: dict[str, Any] = {"extra": dict(self.extra or {})}
        content["scheduler"] = None if self.scheduler is None else self.scheduler.state_dict()
        content["scaler"] = None if self.scaler is None else self.scaler.state_dict()
        return pack_extra(content)


@dataclass(frozen=True, slots=True)
class Small:
    """What else a checkpoint holds, as of the moment it was asked for."""

    packed: bytes
    buffers: Mapping[str, torch.Tensor]
    optimizer: list[OptimizerEntry] | None
    rng: list[dict[str, Any]]
    step: int
    precision: str
    descriptions: Mapping[str, bytes]
    aliases: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(
    runtime: Runtime, updates: Updates, path: Path, beside: Beside, *, keep: Keep = None, wait: bool = True
) -> None:
    """Write everything a run needs to go on; see `Engine.save`."""
    path = Path(path).absolute()
    settle_for_saving(runtime, updates, path, keep)
    write(runtime, _capture(runtime, path, beside, keep), wait=wait)


def write(runtime: Runtime, save: CapturedSave, *, wait: bool) -> None:
    """Write what has been captured: now, or behind training if there is room for that."""
    try:
        is_now = wait or not _has_room(runtime, save)
    except BaseException as error:
        save.abandon(error)
        raise
    if is_now:
        runtime.saver.write(save)
    else:
        runtime.saver.begin(save)


def settle_for_saving(runtime: Runtime, updates: Updates, path: Path, keep: Keep) -> None:
    """What is to be saved is complete and at rest, or the save is refused before anything is made."""
    check_keep(keep)
    runtime.saver.raise_failure()
    runtime.saver.make_room(path)
    updates.consistency.check()
    updates.gradients.refuse_adjusted("saving")
    updates.settle("saving")


def _capture(runtime: Runtime, path: Path, beside: Beside, keep: Keep) -> CapturedSave:
    packed = beside.pack()
    entries = optimizer_entries(beside.optimizer, runtime.groups) if beside.optimizer is not None else None
    with ExitStack() as stack:
        if keep is not None:
            stack.push(partial(note_in_series, path, keep))
        folder = stack.enter_context(replaced_folder(path, lambda there: (there / INDEX_FILE).exists()))
        files = [capture_group(runtime, group) for group in runtime.groups]
        gradients = save_gradients(runtime, folder)
        small = Small(
            packed=packed,
            buffers=copy_buffers(runtime.model),
            optimizer=entries,
            rng=[rng_state()],
            step=max((step for state in runtime.states.values() for step in state.steps), default=0),
            precision=runtime.config.precision.value,
            descriptions=describe_model(runtime.model),
            aliases=aliases_of(runtime.model),
        )
        held = hold_stored(runtime, files, stack)

        def finish(written: Mapping[str, FileEntry]) -> None:
            finish_folder(folder, small, entries_of(files, gradients), written)

        return CapturedSave(path, folder, files, held, finish, stack, begun=gradients.writer)


def hold_stored(runtime: Runtime, files: Sequence[ShardFile], stack: ExitStack) -> HeldKeys | None:
    """Hold what of the files lies in swap files, until it is let go or the stack ends; None if there is nothing."""
    keys = set[str]().union(*map(ShardFile.stored_keys, files))
    if runtime.store is None or not keys:
        return None
    held = runtime.store.hold(sorted(keys))
    stack.callback(held.close)
    return held


def entries_of(files: Sequence[ShardFile], gradients: SavedGradients) -> dict[str, ParameterEntry]:
    """What the index says about the parameters that a rank has captured."""
    return gradients.added_to(merged([file.entries() for file in files]))


def note_in_series(path: Path, keep: Keep, kind: type[BaseException] | None, error: object, trace: object) -> None:
    """The folder is in its place, if there is no error."""
    if kind is None:
        note_saved(path, keep)


def finish_folder(
    folder: Path, small: Small, parameters: Mapping[str, ParameterEntry], files: Mapping[str, FileEntry]
) -> None:
    """Write what is small, and the index last."""
    save_buffers(small.buffers, folder)
    write_synced(folder / EXTRA_FILE, small.packed)
    for name, data in small.descriptions.items():
        write_synced(folder / name, data)
    others = {
        name: FileEntry((folder / name).stat().st_size, checksum_of_file(folder / name))
        for name in (BUFFERS_FILE, EXTRA_FILE, *small.descriptions)
        if (folder / name).exists()
    }
    index = Index(
        step=small.step,
        precision=small.precision,
        parameters=dict(parameters),
        optimizer=small.optimizer,
        rng=small.rng,
        files={**files, **others},
        written_by=versions(),
        aliases=dict(small.aliases),
    )
    write_synced(folder / INDEX_FILE, index.to_text().encode())


def _has_room(runtime: Runtime, save: CapturedSave) -> bool:
    """Whether training may go on while a save holds bytes of the swap files, which are then written elsewhere."""
    store = runtime.store
    if store is None:
        return True
    times = 2 if isinstance(store, VersionedStore) else 1  # a step writes elsewhere anyway, until it is committed
    needed = times * (save.held_nbytes + runtime.saver.held_nbytes)
    room = store.room_nbytes
    if room < needed:
        _log.warning(
            "saving %s holds up training: a save behind it needs %d bytes more of swap space, and there are %d. Free "
            "space in nvme.paths, or raise nvme.budget",
            *(save.path, needed, room),
        )
    return room >= needed
