"""Saving over ranks: every rank writes its own shards into one folder, and the first one writes the index.

The folder has to be on a file system that all ranks see. Of ranks that hold the same shards (hybrid sharding) those of
the first row write. What is loaded depends on names alone, so any other number of ranks can load it.

The ranks meet to capture what is to be saved. Each then writes by itself, behind training or not, and how it ends is
agreed on by notes (`outcome`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from infinity.checkpoint.agreement import AllRanks
from infinity.checkpoint.capture import capture_group
from infinity.checkpoint.description import describe_model
from infinity.checkpoint.folder import replaced_folder, writing
from infinity.checkpoint.format import INDEX_FILE, FileEntry, ParameterEntry, merged, parse_entry
from infinity.checkpoint.outcome import SharedOutcome
from infinity.checkpoint.parts import aliases_of, copy_buffers, optimizer_entries
from infinity.checkpoint.pending import SavedGradients, save_gradients
from infinity.checkpoint.rng import rng_state
from infinity.checkpoint.save import (
    Beside,
    Small,
    entries_of,
    finish_folder,
    hold_stored,
    note_in_series,
    settle_for_saving,
    write,
)
from infinity.checkpoint.saver import CapturedSave
from infinity.checkpoint.series import Keep
from infinity.checkpoint.shard_file import ShardFile
from infinity.errors import CheckpointError
from infinity.runtime import Runtime
from infinity.updates import Updates
from storage.held import HeldKeys


def save_over_ranks(
    runtime: Runtime,
    updates: Updates,
    path: Path,
    beside: Beside,
    ranks: AllRanks,
    *,
    keep: Keep = None,
    wait: bool = True,
) -> None:
    """Write everything a run needs to go on; see `Engine.save`. All ranks have met.

    Raises:
        CheckpointError: it failed here or on another rank; nothing is left of it.
    """
    path = Path(path).absolute()
    what = f"saving {path}"
    with ranks.together(what):
        packed = beside.pack()
        entries = optimizer_entries(beside.optimizer, runtime.groups) if beside.optimizer is not None else None
        settle_for_saving(runtime, updates, path, keep)
    with ExitStack() as stack:
        made = ""
        with ranks.together(what):
            if ranks.member == 0:
                if keep is not None:
                    stack.push(partial(note_in_series, path, keep))
                made = str(stack.enter_context(replaced_folder(path, lambda there: (there / INDEX_FILE).exists())))
            else:
                stack.enter_context(writing(path))
        folder = Path(ranks.texts(made)[0])
        files: list[ShardFile] = []
        gradients = SavedGradients({})
        with ranks.together(what):
            _refuse_unseen(folder, path)
            if ranks.collectives.ranks.replica == 0:
                shard = ranks.collectives.ranks.shard
                files = [capture_group(runtime, group, shard) for group in runtime.groups]
                gradients = save_gradients(runtime, folder, shard)
            small = Small(
                packed=packed,
                buffers=copy_buffers(runtime.model) if ranks.member == 0 else {},
                optimizer=entries,
                rng=[rng_state()],
                step=max((step for state in runtime.states.values() for step in state.steps), default=0),
                precision=runtime.config.precision.value,
                aliases=aliases_of(runtime.model),
                descriptions=describe_model(runtime.model),
            )
            part = _Part(files, gradients, hold_stored(runtime, files, stack), small)
        save = _save_of(path, folder, part, ranks, stack)
    write(runtime, save, wait=wait)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has captured; of what is small, the first rank's counts, and every rank's random numbers."""

    files: Sequence[ShardFile]
    gradients: SavedGradients
    held: HeldKeys | None
    small: Small

    def entries(self) -> dict[str, ParameterEntry]:
        return entries_of(self.files, self.gradients)


def _save_of(path: Path, folder: Path, part: _Part, ranks: AllRanks, ending: ExitStack) -> CapturedSave:
    """This rank's part of a checkpoint. `ending` puts the folder in its place, on the first rank, which has made it."""
    bulletin = ranks.collectives.bulletin()
    outcome = SharedOutcome(bulletin, ranks.member, ranks.members, f"saving {path}")

    def finish(written: Mapping[str, FileEntry]) -> None:
        if ranks.member == 0:
            _finish(folder, part, written, outcome.collect())
        else:
            outcome.post(_told(folder, part, written, ranks.member))

    with ExitStack() as closing:
        closing.push(outcome.end)  # what is pushed first ends last
        closing.push(ending.pop_all())
        save = CapturedSave(
            *(path, folder, part.files, part.held, finish, closing),
            begun=part.gradients.writer,
            on_progress=bulletin.tick,
        )
    outcome.on_progress = save.note_progress
    return save


def _refuse_unseen(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} is not on a file system that all ranks share: the folder that the first rank has made is not seen "
            "here. Save to one that all of them have mounted"
        )


# What a rank says about its parameters grows with the model. It is handed over in the folder, and gone in the end.


def _told(folder: Path, part: _Part, written: Mapping[str, FileEntry], member: int) -> dict[str, Any]:
    """What a rank tells the first one."""
    entries = {name: asdict(entry) for name, entry in part.entries().items()}
    handed_over = f"parameters.rank{member}.json"
    (folder / handed_over).write_text(json.dumps(entries), encoding="utf-8")
    files = {name: asdict(entry) for name, entry in written.items()}
    return {"files": files, "rng": part.small.rng, "parameters": handed_over}


def _finish(folder: Path, part: _Part, written: Mapping[str, FileEntry], others: Sequence[Mapping[str, Any]]) -> None:
    """The first rank puts together what all of them have written."""
    entries, files, rng = [part.entries()], dict(written), list(part.small.rng)
    for told in others:
        file = folder / told["parameters"]
        content = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        entries.append({name: parse_entry(entry) for name, entry in content.items()})
        files |= {name: FileEntry(**entry) for name, entry in told["files"].items()}
        rng += told["rng"]
    finish_folder(folder, replace(part.small, rng=rng), merged(entries), files)
