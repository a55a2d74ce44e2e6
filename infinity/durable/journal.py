"""When a finished step is committed, and what is noted with it. Used by the training thread.

[Note: when a step is committed]
A step is finished when `optimizer.step()` has returned; what the loop does after it (the LR scheduler, the data
position) belongs to it too. So it is committed when the loop says that it is done, with `engine.note(extra)`. A loop
that never calls `note` commits at the start of the next forward, or when the engine closes. A loop that has called
`note` once calls it after every step, and no step is committed without.

[Note: random numbers of a commit]
What is committed is the state of the generators when `note` was called, or, without, when `optimizer.step()` returned:
whatever the loop draws at its top (a batch, say) comes after it, and a resumed run starts at the top. Before the first
step it is their state at the end of `offload`, which is where a resumed run takes it up too; a seed that the program
sets after that is then left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.parts import optimizer_entries, pack_extra, persistent_buffers
from infinity.checkpoint.rng import rng_state
from infinity.durable.committer import Committer
from infinity.durable.notes import (
    BUFFERS,
    EXTRA,
    LAYOUT,
    RUN,
    StoredGroup,
    StoredLayout,
    StoredRun,
    StoredState,
    pack_tensors,
)
from infinity.errors import IterationError
from infinity.runtime import Runtime
from infinity.updates import Updates
from storage.manifest import Before


class Journal:
    """Commits the steps of one engine."""

    def __init__(self, runtime: Runtime, updates: Updates, committer: Committer) -> None:
        self._runtime = runtime
        self._updates = updates
        self._committer = committer
        self._step = 0
        self._epoch = 0
        self._extra = pack_extra(None)
        self._is_noted = False  # the loop uses `note`
        self._is_open = False  # something has changed since the last commit was begun
        self._has_extra = True  # `_extra` is of the present step
        self._has_begun = False  # a forward that trains has run since the last step
        self._is_laid_out = False  # this process has noted its layout
        self._rng = rng_state()  # see [Note: random numbers of a commit]

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far, those of earlier processes included."""
        return self._step

    def continue_from(self, run: StoredRun) -> None:
        """The state is that of a commit."""
        self._step, self._extra, self._is_noted = run.step, pack_extra(run.extra), run.state.is_noted
        self._is_open, self._has_extra, self._has_begun = False, True, False
        self._rng = run.state.rng
        self._epoch = self._committer.epoch = run.state.epoch

    def replaced(self, step: int, extra: Mapping[str, Any] | None) -> None:
        """The whole state has been replaced: it is as after step `step`, and is committed at once."""
        self._step, self._extra, self._rng = step, pack_extra(extra), rng_state()
        self._epoch += 1
        self._is_open, self._has_extra, self._has_begun = True, True, False
        self.seal()
        self._committer.wait()

    def changed(self) -> None:
        """Stored bytes have been changed outside of a step; the next commit has them."""
        self._is_open = True

    def step_ended(self) -> None:
        """`optimizer.step()` is about to return."""
        self._step += 1
        self._epoch += 1
        self._rng = rng_state()
        self._is_open, self._has_extra, self._has_begun = True, False, False

    def forward_begins(self, *, trains: bool) -> None:
        """An outermost forward starts."""
        self.seal()
        self._has_begun = self._has_begun or trains

    def note(self, extra: Mapping[str, Any]) -> None:
        """Commit the present step with what the loop needs to go on after it.

        Raises:
            CheckpointError: `extra` holds something that cannot be kept.
            IterationError: the next step has begun.
        """
        if self._has_begun or self._updates.has_begun:
            raise IterationError(
                "engine.note() after the next step has begun; call it between optimizer.step() and the next forward"
            )
        self._updates.consistency.check()
        self._extra, self._rng = pack_extra(extra), rng_state()
        self._is_noted = self._has_extra = self._is_open = True
        self.seal()

    def seal(self) -> None:
        """Begin to commit what has changed, unless a step is half done or its note is missing."""
        runtime = self._runtime
        is_ready = self._has_extra or not self._is_noted
        if not self._is_open or not is_ready or self._updates.has_begun or runtime.failure.error is not None:
            return
        self._committer.wait()
        writes = [update.written for update in runtime.in_flight]
        before = Before.FORGET
        if runtime.lockstep is not None:  # see [Note: the commit before] in together.py
            before = Before.KEEP if self._epoch != self._committer.epoch else Before.KEEP_OLDER
        self._committer.begin(self._step, self._notes(), writes, epoch=self._epoch, before=before)
        self._is_open = False
        self._is_laid_out = True

    def finish(self) -> None:
        """Commit what is finished, and wait for it.

        Raises:
            StorageError: it could not be committed.
        """
        self.seal()
        self._committer.wait()

    # Parts -----------------------------------------------------------------------------------------------------

    def _notes(self) -> dict[str, bytes]:
        runtime, optimizer = self._runtime, self._updates.optimizer
        groups = None
        if isinstance(optimizer, torch.optim.Optimizer):
            groups = optimizer_entries(optimizer, runtime.groups)
        state = StoredState(
            counts={runtime.groups[index].key: list(state.steps) for index, state in runtime.states.items()},
            initialised={
                runtime.groups[index].key: [record.is_initialised for record in state.records]
                for index, state in runtime.states.items()
            },
            optimizer=groups,
            rng=self._rng,
            is_noted=self._is_noted,
            epoch=self._epoch,
        )
        notes = {
            RUN: state.to_bytes(),
            BUFFERS: pack_tensors(persistent_buffers(runtime.model)),
            EXTRA: self._extra if self._has_extra else pack_extra(None),
        }
        if not self._is_laid_out:
            notes[LAYOUT] = layout_of(runtime).to_bytes()
        return notes


def layout_of(runtime: Runtime) -> StoredLayout:
    """How this engine lays its shards out."""
    return StoredLayout(
        precision=runtime.config.precision.value,
        chunk_numel=runtime.placement.chunk_numel,
        fields=tuple((f.name, str(f.dtype).removeprefix("torch.")) for f in runtime.kernel.fields),
        groups=tuple(StoredGroup.of(group) for group in runtime.groups),
        directories=tuple(str(Path(path).absolute()) for path in runtime.config.nvme.paths or ()),
        ranks=_ranks_of(runtime),
    )


def _ranks_of(runtime: Runtime) -> str:
    """Which part of every shard this rank holds, in words; with one rank nothing."""
    if runtime.lockstep is None:
        return ""
    ranks = runtime.lockstep.collectives.ranks
    place = f"shard {ranks.shard} of {ranks.shards}, row {ranks.replica} of {ranks.replicas}"
    return f"stage {runtime.config.stage}, {place}"
