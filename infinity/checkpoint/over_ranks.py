"""Saving over ranks: every rank writes its own shards into one folder, and the first one writes the index.

The folder has to be on a file system that all ranks see. Of ranks that hold the same shards (hybrid sharding) those of
the first row write. What is loaded depends on names alone, so any other number of ranks can load it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from infinity.checkpoint.agreement import AllRanks
from infinity.checkpoint.capture import capture_group
from infinity.checkpoint.description import describe_model
from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.format import INDEX_FILE, FileEntry, ParameterEntry, merged, parse_entry
from infinity.checkpoint.parts import aliases_of, copy_buffers, optimizer_entries
from infinity.checkpoint.pending import save_gradients
from infinity.checkpoint.rng import rng_state
from infinity.checkpoint.save import Beside, Small, finish_folder, note_in_series, settle_for_saving
from infinity.checkpoint.saver import CapturedSave
from infinity.checkpoint.series import Keep
from infinity.checkpoint.shard_file import ShardFile
from infinity.errors import CheckpointError
from infinity.runtime import Runtime
from infinity.updates import Updates


def save_over_ranks(
    runtime: Runtime, updates: Updates, path: Path, beside: Beside, ranks: AllRanks, *, keep: Keep = None
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
        folder = Path(ranks.texts(made)[0])
        mine: dict[str, Any] = {}
        with ranks.together(what):
            _refuse_unseen(folder, path)
            if ranks.collectives.ranks.replica == 0:
                mine = _write_shards(runtime, path, folder, ranks.collectives.ranks.shard)
        said = [json.loads(text) for text in ranks.texts(json.dumps({**mine, "rng": rng_state()}))]
        with ranks.together(what):
            if ranks.member == 0:
                small = Small(
                    packed=packed,
                    buffers=copy_buffers(runtime.model),
                    optimizer=entries,
                    rng=[one["rng"] for one in said],
                    step=max((step for state in runtime.states.values() for step in state.steps), default=0),
                    precision=runtime.config.precision.value,
                    parameters=merged([_entries(one) for one in said]),
                    aliases=aliases_of(runtime.model),
                    descriptions=describe_model(runtime.model),
                )
                finish_folder(folder, small, _files(said))
                stack.close()  # the folder takes its place


def _refuse_unseen(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} is not on a file system that all ranks share: the folder that the first rank has made is not seen "
            "here. Save to one that all of them have mounted"
        )


def _write_shards(runtime: Runtime, path: Path, folder: Path, shard: int) -> dict[str, Any]:
    """Write this rank's files; what the index is to say about them."""
    files = [capture_group(runtime, group, shard) for group in runtime.groups]
    parameters, pending = save_gradients(runtime, folder, merged([file.entries for file in files]), shard)
    written: dict[str, FileEntry] = dict(pending)
    files = [file for file in files if file.parts]
    with ExitStack() as stack:
        held = None
        if runtime.store is not None:
            held = runtime.store.hold(sorted(set[str]().union(*map(ShardFile.stored_keys, files))))
            stack.callback(held.close)
        runtime.saver.write(CapturedSave(path, folder, files, held, written.update, stack.pop_all()))
    return {
        "parameters": {name: asdict(entry) for name, entry in parameters.items()},
        "files": {name: asdict(entry) for name, entry in written.items()},
    }


def _entries(said: Mapping[str, Any]) -> dict[str, ParameterEntry]:
    return {name: parse_entry(entry) for name, entry in said.get("parameters", {}).items()}


def _files(said: list[dict[str, Any]]) -> dict[str, FileEntry]:
    return {name: FileEntry(**entry) for one in said for name, entry in one.get("files", {}).items()}
