"""What an engine keeps beyond a process: durable steps, checkpoints, and the state dicts of model and optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from infinity.access import ParameterAccess
from infinity.checkpoint.agreement import AllRanks, OneRank
from infinity.checkpoint.live import LiveTensors, live_tensors
from infinity.checkpoint.load import load_checkpoint
from infinity.checkpoint.model_values import read_values, write_values
from infinity.checkpoint.moments import SlotStates, read_states, write_states
from infinity.checkpoint.over_ranks import save_over_ranks
from infinity.checkpoint.parts import pack_extra
from infinity.checkpoint.save import Beside, Stateful, save_checkpoint
from infinity.checkpoint.series import Keep
from infinity.durable.journal import Journal
from infinity.durable.notes import unpack
from infinity.durable.restore import restore
from infinity.errors import ConfigError
from infinity.iteration import Iteration
from infinity.lockstep import Want
from infinity.ranks import Ranks
from infinity.runtime import Runtime
from infinity.sizes import parse_nbytes
from infinity.updates import Updates
from infinity.weights.export import ExportOptions, export_weights
from storage.paths import StrPath


class EngineParts:
    """The parts that an engine's methods work with, and what several of them check first. Set by `Engine`."""

    _runtime: Runtime
    _updates: Updates
    _iteration: Iteration
    _access: ParameterAccess
    _journal: Journal | None = None  # where steps are durable

    @property
    def ranks(self) -> Ranks:
        """The ranks that share this engine's shards; one by itself if nobody does."""
        lockstep = self._runtime.lockstep
        return Ranks() if lockstep is None else lockstep.collectives.ranks

    def _meet(self, boundary: Want, what: str, value: str) -> AllRanks | None:
        """Wait until every rank does this with the same value; None with one rank."""
        lockstep = self._runtime.lockstep
        if lockstep is None:
            return None
        digest = int.from_bytes(blake2b(value.encode(), digest_size=7).digest())
        lockstep.agree(boundary, what, digest)
        return AllRanks(lockstep)

    def _accept_edits(self) -> None:
        """Parameters that are there (resident, or in a `gathered()` block) may be edited; the next update sees it."""
        gathered = self._runtime.gatherer.gathered()
        self._updates.refuse_edited(gathered)
        for group in gathered:
            self._access.accept(group)

    def _check_open(self) -> None:
        self._runtime.check_open()

    def _durable(self, what: str) -> Journal:
        if self._journal is None:
            raise ConfigError(f"engine.{what}() needs infinity.Config(durability='step', nvme={{'paths': [...]}})")
        return self._journal

    def _changed(self) -> None:
        if self._journal is not None:
            self._journal.changed()


class StatefulEngine(EngineParts):
    """The methods that save and restore. `infinity.Engine` is one."""

    # Durable steps ---------------------------------------------------------------------------------------------

    def note(self, extra: Mapping[str, Any]) -> None:
        """Say that everything that belongs to the last step is done, and what the loop needs to go on after it.

        With `durability="step"` this commits the step: parameters, optimizer state and settings, buffers, random number
        generators and `extra` become durable together, behind the next forward. Call it after every step, when the LR
        scheduler has been stepped. A loop that never calls it commits at the start of the next forward.

        Args:
            extra: numbers, text, tensors, and lists, tuples and dictionaries of them, for example
                `{"scheduler": scheduler.state_dict(), "batch": number}`.

        Raises:
            ConfigError: steps are not durable.
            CheckpointError: `extra` cannot be kept.
            IterationError: the next step has begun.
        """
        self._check_open()
        self._durable("note").note(extra)

    @property
    def committed_step(self) -> int:
        """Optimizer steps of the last commit, those of earlier processes included; -1 if steps are not durable."""
        committer = self._runtime.committer
        return committer.store.step if committer is not None else -1

    def restore(self, *, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Go back to the last committed step; the run goes on with the same bits. Returns its `extra`.

        For a process that continues a run (`infinity.offload(..., resume=True)`), once its optimizer is built; and for
        one that has lost a step (a full disk, a read that failed), when the cause is gone: the lost step is undone, its
        gradients are discarded. The random number generators and the model's buffers are set as they were.

        Args:
            optimizer: gets the settings of its parameter groups back; it must have the same groups.

        Raises:
            ConfigError: steps are not durable.
            CheckpointError: the optimizer has other groups, or parameters are in use.
            StorageError: what was committed cannot be read.
        """
        self._check_open()
        journal = self._durable("restore")
        return restore(self._runtime, self._updates, self._iteration, journal, optimizer)

    # Checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self,
        path: StrPath,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: Keep = None,
        wait: bool = True,
    ) -> None:
        """Save parameters, optimizer state, buffers and random number generators to a folder.

        The folder appears when it is complete and on the drive; a checkpoint that is there already is replaced only
        then. Gradients that no step has used are saved too. With several ranks all of them call it, each writes its own
        shards, and `path` is on a file system that all of them see.

        Args:
            optimizer: whose settings of parameter groups (lr, betas, ...) are saved; default is the one of this engine.
            scheduler, scaler: an LR scheduler and a loss scaler, saved by their `state_dict()`.
            extra: what else the run needs to go on: numbers, text, tensors, and lists, tuples and dictionaries of them.
            keep: `path` belongs to a series: the file `latest` beside it names it, and `load` finds it by the name of
                the folder. So many checkpoints of the series are kept, older ones are removed; "all" keeps them.
            wait: False returns as soon as it is known where everything lies; the checkpoint is written behind training,
                with the values of now. What goes wrong then is raised by the next `step()`, `save()` or `wait_saved()`.
                At most two are written at a time, to one place one: the next waits for the first.

        Raises:
            CheckpointError: `path` cannot be written or is something else, or `extra` cannot be saved.
            IterationError: an update was lost, the running step has been applied in part, or gradients have been
                clipped or unscaled and not been used.
        """
        self._check_open()
        mine = self._updates.optimizer
        if optimizer is None and isinstance(mine, torch.optim.Optimizer):
            optimizer = mine
        beside = Beside(optimizer, scheduler, scaler, extra)
        ranks = self._meet(Want.SAVE, "the checkpoints to save", os.fspath(path))
        with (ranks or OneRank()).together(f"saving {os.fspath(path)}"):
            self._accept_edits()
        if ranks is not None:
            save_over_ranks(self._runtime, self._updates, Path(path), beside, ranks, keep=keep, wait=wait)
        else:
            save_checkpoint(self._runtime, self._updates, Path(path), beside, keep=keep, wait=wait)

    def wait_saved(self) -> None:
        """Wait until every checkpoint of `save(..., wait=False)` is complete and on its drive.

        Raises:
            CheckpointError, StorageError: one could not be written; nothing is left of it.
        """
        self._check_open()
        self._runtime.saver.wait()

    def load(
        self,
        path: StrPath,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save`; the run goes on with the same bits. Returns its `extra`.

        Budgets, placement, schedule, precision, stage and number of ranks may differ from those of the engine that
        saved it; of several ranks all call it, and those beyond the ranks that saved keep their random numbers.
        Everything but the content of large files is checked before anything is changed. Gradients that no step has used
        are those of the checkpoint. The random number generators of torch, Python and numpy are set as they were.

        Args:
            path: a checkpoint, or the folder of a series: then the latest one that can be read.
            optimizer: gets the settings of its parameter groups back; it must have the same groups.
            scheduler, scaler: get their state back.

        Raises:
            CheckpointError: nothing there, damaged, or of another model. If damage shows only while loading, the
                engine refuses to step until a complete checkpoint has been loaded.
            IterationError: an update was lost, or the running step has been applied in part.
        """
        self._check_open()
        beside = Beside(optimizer, scheduler, scaler)
        ranks = self._meet(Want.LOAD, "the checkpoints to load", os.fspath(path))
        extra = load_checkpoint(self._runtime, self._updates, self._iteration, Path(path), beside, ranks)
        if self._journal is not None:
            steps = max((step for state in self._runtime.states.values() for step in state.steps), default=0)
            self._journal.replaced(steps, extra)
        return extra

    def export(
        self,
        path: StrPath,
        *,
        dtype: torch.dtype | None = None,
        shard_size: int | str | None = "5GB",
        merge: bool = False,
        adapter: str = "default",
        config: StrPath | None = None,
    ) -> None:
        """Write the weights as safetensors files that `from_pretrained` loads; a model of PEFT gives its adapter.

        What `infinity checkpoint export` writes of a checkpoint. Memory is a few MiB. With several ranks all of them
        call it; the first one writes, and gets from the others what they hold, chunk by chunk.

        Args:
            path: a folder to make, where the first rank is. An earlier export there is replaced when the new one is
                complete; files that were put beside it are kept.
            dtype: of the floating-point tensors; None for that in which the model computes.
            shard_size: most bytes of tensors in a file, such as "2GB"; None for one file.
            merge: write the model with the LoRA adapter added, not the adapter.
            adapter: which one.
            config: a folder whose configuration and tokenizer are copied, in place of the model's own configuration.

        Raises:
            CheckpointError: something else is at `path`, or it cannot be written; or it failed on another rank.
            ConfigError: `shard_size` is no size, or there is no adapter to merge.
            IterationError: an update was lost, or the running step has been applied in part.
        """
        self._check_open()
        options = ExportOptions(dtype, _size_of(shard_size), None if config is None else Path(config), adapter, merge)
        target = Path(path).absolute()
        ranks = self._meet(Want.EXPORT, "the folders to export to", os.fspath(path))
        with self._live(ranks, f"exporting to {target}") as live:
            if ranks is None or ranks.member == 0:
                export_weights(live, target, options)

    def read_model_state(self, *, first_only: bool = False, trains_only: bool = False) -> dict[str, torch.Tensor]:
        """Called by `infinity.state_dicts`: copies of all parameters and persistent buffers.

        Args:
            first_only: on the first rank only; the others get nothing.
            trains_only: without frozen parameters.
        """
        self._check_open()
        ranks = self._meet(Want.MODEL_STATE, "the state dicts asked for", f"read {first_only} {trains_only}")
        with self._live(ranks, "reading the parameters") as live:
            if ranks is None or ranks.member == 0 or not first_only:
                return read_values(self._runtime, live, trains_only=trains_only)
            return {}

    def write_model_state(self, state: Mapping[str, torch.Tensor], *, from_first: bool = False) -> None:
        """Called by `infinity.state_dicts`: replaces all parameters and persistent buffers.

        Args:
            from_first: the state of the first rank is that of all.
        """
        self._check_open()
        ranks = self._meet(Want.MODEL_STATE, "the uses of the state dict", f"write {from_first}")
        self._changed()
        write_values(self._runtime, self._updates, self._iteration, state, ranks, from_first=from_first)

    def read_optimizer_state(self, *, first_only: bool = False) -> SlotStates:
        """Called by the optimizer's `state_dict()`: copies of all moments; with `first_only` on the first rank only."""
        self._check_open()
        ranks = self._meet(Want.OPTIMIZER_STATE, "the uses of the optimizer's state_dict()", f"read {first_only}")
        with live_tensors(self._runtime, self._updates, ranks, "reading the optimizer's state") as live:
            if ranks is None or ranks.member == 0 or not first_only:
                return read_states(self._runtime, live)
            return {}

    def write_optimizer_state(self, states: SlotStates, *, from_first: bool = False) -> None:
        """Called by the optimizer's `load_state_dict()`: replaces all moments and step counts.

        Args:
            from_first: the first rank has the moments; the states of the others only tell the step counts.
        """
        self._check_open()
        ranks = self._meet(Want.OPTIMIZER_STATE, "the uses of the optimizer's state_dict()", f"load {from_first}")
        self._changed()
        write_states(self._runtime, self._updates, states, ranks, from_first=from_first)

    def from_first_rank(self, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Called by the optimizer: what the first rank makes, on all ranks.

        Raises:
            CheckpointError: it failed there, or made something that cannot be sent.
        """
        self._check_open()
        what = "the optimizer's state of the first rank"
        ranks = self._meet(Want.OPTIMIZER_STATE, what, "from first")
        if ranks is None:
            return dict(make())
        with ranks.together(what):
            packed = pack_extra(make()) if ranks.member == 0 else b""
        return unpack(ranks.exchange_bytes(packed)[0])

    @contextmanager
    def _live(self, ranks: AllRanks | None, what: str) -> Iterator[LiveTensors]:
        """The tensors as they are now, edits included."""
        with (ranks or OneRank()).together(what):
            self._accept_edits()
        with live_tensors(self._runtime, self._updates, ranks, what) as live:
            yield live


def _size_of(given: int | str | None) -> int | None:
    try:
        return None if given is None else parse_nbytes(given)
    except ValueError as error:
        raise ConfigError(f"shard_size: {error}") from error
