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
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class _Progress:
    """What is known of the present step. Replaced as a whole, so that Ctrl-C leaves no mixture of two steps.

    Attributes:
        step: optimizer steps of the run.
        epoch: see [Note: the commit before] in together.py.
        engine_step: the step of the engine that this belongs to.
        extra: what the loop has noted, packed.
        rng: see [Note: random numbers of a commit].
        is_noted: the loop uses `note`.
        is_open: something has changed since the last commit was begun.
        has_extra: `extra` is of the present step.
        has_begun: a forward that trains has run since the last step.
        is_laid_out: this process has noted its layout.
    """

    step: int
    epoch: int
    engine_step: int
    extra: bytes
    rng: dict[str, Any]
    is_noted: bool = False
    is_open: bool = False
    has_extra: bool = True
    has_begun: bool = False
    is_laid_out: bool = False


class Journal:
    """Commits the steps of one engine."""

    def __init__(self, runtime: Runtime, updates: Updates, committer: Committer) -> None:
        self._runtime = runtime
        self._updates = updates
        self._committer = committer
        self._now = _Progress(0, 0, runtime.step, pack_extra(None), rng_state())

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far, those of earlier processes included."""
        return self._now.step

    def continue_from(self, run: StoredRun) -> None:
        """The state is that of a commit."""
        self._committer.epoch = run.state.epoch
        self._now = _Progress(
            run.step,
            run.state.epoch,
            self._runtime.step,
            pack_extra(run.extra),
            run.state.rng,
            is_noted=run.state.is_noted,
            is_laid_out=self._now.is_laid_out,
        )

    def replaced(self, step: int, extra: Mapping[str, Any] | None) -> None:
        """The whole state has been replaced: it is as after step `step`, and is committed at once."""
        self._now = replace(
            self._now,
            step=step,
            epoch=self._now.epoch + 1,
            engine_step=self._runtime.step,
            extra=pack_extra(extra),
            rng=rng_state(),
            is_open=True,
            has_extra=True,
            has_begun=False,
        )
        self.seal()
        self._committer.wait()

    def changed(self) -> None:
        """Stored bytes have been changed outside of a step; the next commit has them."""
        self._now = replace(self._now, is_open=True)

    def step_ended(self) -> None:
        """`optimizer.step()` is about to return; or Ctrl-C kept it from that, but the step was made. Idempotent."""
        now, engine_step = self._now, self._runtime.step
        if made := engine_step - now.engine_step:
            self._now = replace(
                now,
                step=now.step + made,
                epoch=now.epoch + made,
                engine_step=engine_step,
                rng=rng_state(),
                is_open=True,
                has_extra=False,
                has_begun=False,
            )

    def forward_begins(self, *, trains: bool) -> None:
        """An outermost forward starts."""
        self.seal()
        if trains and not self._now.has_begun:
            self._now = replace(self._now, has_begun=True)

    def note(self, extra: Mapping[str, Any]) -> None:
        """Commit the present step with what the loop needs to go on after it.

        Raises:
            CheckpointError: `extra` holds something that cannot be kept.
            IterationError: the next step has begun.
        """
        self._updates.consistency.check()
        self.step_ended()
        if self._now.has_begun or self._updates.has_begun:
            raise IterationError(
                "engine.note() after the next step has begun; call it between optimizer.step() and the next forward"
            )
        self._now = replace(
            self._now, extra=pack_extra(extra), rng=rng_state(), is_noted=True, has_extra=True, is_open=True
        )
        self.seal()

    def seal(self) -> None:
        """Begin to commit what has changed, unless a step is half done or its note is missing."""
        runtime = self._runtime
        if self._updates.has_begun or runtime.failure.error is not None:
            return
        self.step_ended()
        now = self._now
        if not now.is_open or not (now.has_extra or not now.is_noted):
            return
        self._committer.wait()
        writes = [update.written for update in runtime.in_flight]
        before = Before.FORGET
        if runtime.lockstep is not None:  # see [Note: the commit before] in together.py
            before = Before.KEEP if now.epoch != self._committer.epoch else Before.KEEP_OLDER
        self._committer.begin(now.step, self._notes(now), writes, epoch=now.epoch, before=before)
        self._now = replace(now, is_open=False, is_laid_out=True)

    def finish(self) -> None:
        """Commit what is finished, and wait for it.

        Raises:
            StorageError: it could not be committed.
        """
        self.seal()
        self._committer.wait()

    # Parts -----------------------------------------------------------------------------------------------------

    def _notes(self, now: _Progress) -> dict[str, bytes]:
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
            rng=now.rng,
            is_noted=now.is_noted,
            epoch=now.epoch,
        )
        notes = {
            RUN: state.to_bytes(),
            BUFFERS: pack_tensors(persistent_buffers(runtime.model)),
            EXTRA: now.extra if now.has_extra else pack_extra(None),
        }
        if not now.is_laid_out:
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
