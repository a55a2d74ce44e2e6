"""Durable steps over ranks: every rank commits in its own swap folders, and all go on from the same commit.

[Note: the commit before]
Ranks commit a step one by one, and a job can be killed in between. So a commit keeps what the one before it needs until
every rank is known to have made it, which is so when all of them have met in front of the next step: nothing is written
before that. Killed at any moment, ranks have commits that differ by at most one; those that are ahead go back by one.

What is compared is an *epoch*, which counts the changes of state that all ranks make together: steps, and checkpoints
that are loaded. A commit of the same epoch (an edit between two steps) takes the place of the last one and leaves the
one before it where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinity.config import Config
from infinity.durable.notes import RUN, StoredRun, StoredState, read_run
from infinity.durable.restore import find_run, make_way
from infinity.errors import CheckpointError, InfinityError
from infinity.ranks import Ranks
from infinity.rendezvous import exchange_early
from infinity.swap_directories import directory_of_rank
from storage.durable import DurableFolder, durable_folder
from storage.errors import StorageError
from storage.manifest import MANIFEST_FILE, Manifest


def find_run_of_ranks(config: Config, ranks: Ranks, *, resume: bool) -> StoredRun | None:
    """The run that the engines of all ranks are to continue, each its own part of it; None for a new one.

    Raises:
        ConfigError, CheckpointError, StorageError: as `find_run`; or it failed on another rank, or the ranks' parts are
            of different runs.
    """
    paths = config.nvme.paths or ()
    own = config
    if paths:
        own = config.with_(nvme={"paths": [directory_of_rank(path, ranks.global_rank) for path in paths]})
    where = paths[0] if paths else Path()
    run = agree_on_run(ranks, lambda: find_run(own, resume=resume), where, config.rank_timeout_s)
    if run is None:
        make_way(own)
    return run


def agree_on_run(
    ranks: Ranks, look: Callable[[], StoredRun | None], where: Path, timeout_s: float
) -> StoredRun | None:
    """This rank's part of a run as of the last commit that all ranks have made; a rank that is ahead goes back by one.

    Args:
        look: gives this rank's part; None when it has none.
        where: the run is, for messages.

    Raises:
        CheckpointError: only some ranks have a part, the parts are of different runs, or looking failed elsewhere.
    """
    failure: InfinityError | StorageError | None = None
    run: StoredRun | None = None
    said: dict[str, Any] = {}
    try:
        run = look()
        if run is not None:
            said = {"epoch": run.state.epoch, "before": _epoch_before(run.path)}
    except (InfinityError, StorageError) as error:
        failure, said = error, {"error": f"{type(error).__name__}: {error}"}
    everyone = [json.loads(text) for text in exchange_early(ranks, json.dumps(said), timeout_s)]
    if failure is not None:
        raise failure
    for member, other in zip(ranks.members, everyone, strict=True):
        if "error" in other:
            raise CheckpointError(f"rank {member} cannot continue: {other['error']}")
    lacking = [member for member, other in zip(ranks.members, everyone, strict=True) if not other]
    if len(lacking) == ranks.size:
        return None
    if run is None or lacking:
        raise CheckpointError(
            f"ranks {lacking} have no part of the run in {where}. Give every rank the directories that it had"
        )
    epochs = [other["epoch"] for other in everyone]
    target = min(epochs)
    if any(epoch != target and other["before"] != target for epoch, other in zip(epochs, everyone, strict=True)):
        raise CheckpointError(
            f"the parts of the run in {where} do not belong together: the last commits of the ranks are {epochs}. "
            "Give every rank the directories that it had"
        )
    if run.state.epoch == target:
        return run
    return _gone_back(run)


def _epoch_before(folder: Path) -> int | None:
    manifest = Manifest(folder / MANIFEST_FILE, None)
    try:
        notes = manifest.notes_before()
        return StoredState.parse(json.loads(notes[RUN])).epoch if RUN in notes else None
    finally:
        manifest.close()


def _gone_back(run: StoredRun) -> StoredRun:
    """The run as of the commit before its last one, which other ranks have not made."""
    folder = DurableFolder(run.path, "going back by one commit")  # nobody else uses it meanwhile
    try:
        manifest = Manifest(run.path / MANIFEST_FILE, None)
        try:
            manifest.go_back()
        finally:
            manifest.close()
    finally:
        folder.close()
    found = read_run(durable_folder(run.path.parent))
    if found is None:
        raise CheckpointError(f"{run.path} has no commit left after going back by one")
    return found
