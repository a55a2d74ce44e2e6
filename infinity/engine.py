"""The engine: one offloaded model, from `infinity.offload` to `close()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from infinity import hooks
from infinity.access import ParameterAccess
from infinity.adoption import adopt_changes
from infinity.assemble import assemble
from infinity.checkpoint.agreement import AllRanks
from infinity.checkpoint.load import load_checkpoint
from infinity.checkpoint.model_values import read_values, write_values
from infinity.checkpoint.moments import SlotStates, read_states, write_states
from infinity.checkpoint.over_ranks import save_over_ranks
from infinity.checkpoint.rng import restore_rng_state
from infinity.checkpoint.save import Beside, Stateful, save_checkpoint
from infinity.checkpoint.series import Keep
from infinity.checkpoint.tiers import CHECKPOINT_STEP
from infinity.config import Config
from infinity.durable.journal import Journal
from infinity.durable.notes import StoredRun
from infinity.durable.restore import find_run, restore, restore_shards
from infinity.errors import CheckpointError, ConfigError
from infinity.gather import UserHold
from infinity.groups import FlatGroup
from infinity.init import fill_shards, leave_uninitialised
from infinity.iteration import Iteration
from infinity.lockstep import Want
from infinity.materialise import FirstValues
from infinity.observe.metrics import Traffic, TrafficBook, metrics_of
from infinity.observe.trace import Trace
from infinity.optim.foreign import refuse_foreign_optimizers
from infinity.order import Phase
from infinity.plan.summary import Plan
from infinity.ranks import Ranks
from infinity.released import ParameterRef
from infinity.runtime import Runtime
from infinity.tensor_parallel import TensorParallel, local_part
from infinity.updates import OptimizerView, Updates
from infinity.weights.match import LoadedWeights
from storage.space import DriveReport

_log = logging.getLogger(__name__)


class Engine:
    """Holds an offloaded model's state in the tiers and runs its iterations. Made by `infinity.offload`.

    Use it as a context manager, or call `close()`: swap files, threads and memory are given back then. An engine that
    is not closed cleans up when the process exits.

    Attributes:
        loaded_weights: what `infinity.offload(..., weights=...)` read, and which names did not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        *,
        values: FirstValues | None = None,
        on_progress: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
        resume: bool = False,
    ) -> None:
        run = find_run(config, resume=resume)
        self.loaded_weights: LoadedWeights | None = None
        self._tensor_parallel = TensorParallel(model)
        self._tensor_parallel.check(config, ranks)
        with ExitStack() as undo:
            self._tensor_parallel.localise()
            undo.callback(self._tensor_parallel.restore)
            self._runtime: Runtime = assemble(model, config, self, ranks, run, values)
            undo.callback(self.close)
            self._start(values or FirstValues(), on_progress, run)
            undo.pop_all()
        self._tensor_parallel.forget_originals()

    def _start(self, values: FirstValues, on_progress: Callable[[str], None] | None, run: StoredRun | None) -> None:
        runtime = self._runtime
        self._connect(runtime)
        runtime.kernel.warm_up()
        if run is None:
            fill_shards(runtime, values, on_progress)
            self.loaded_weights = None if values.match is None else values.match.loaded()
        elif self._journal is not None:
            leave_uninitialised(runtime)
            restore_shards(runtime, run)
            restore_rng_state(run.state.rng)
            self._journal.continue_from(run)
        self._go_live(runtime)
        if run is not None:
            runtime.io.post(runtime.read_ahead.read_kept, CHECKPOINT_STEP)
        elif self._journal is not None:
            self._journal.replaced(0, None)  # what a process killed in its first step goes on from
        _log.info("offloaded %d parameters\n%s", self.plan.parameters, self.plan.describe())

    def _connect(self, runtime: Runtime) -> None:
        """The parts that act on a runtime for the training thread."""
        runtime.tensor_parallel = self._tensor_parallel or None
        self._updates = Updates(runtime)
        self._journal = None
        if runtime.committer is not None:
            self._journal = Journal(runtime, self._updates, runtime.committer)
        self._iteration = Iteration(runtime, self._updates, self._journal)
        self._access = ParameterAccess(runtime, self._changed)

    def _go_live(self, runtime: Runtime, before: Traffic | None = None) -> None:
        """Every shard is there: from now on the model computes through this engine."""
        self._iteration.watch_structure()
        resident = UserHold()
        for group in runtime.resident_groups:
            runtime.gatherer.gather(group, resident, Phase.FORWARD)
        _move_buffers(runtime.model, runtime.device.torch_device)
        self._book = TrafficBook(runtime, before)
        self.plan = Plan(runtime)
        runtime.hooks = hooks.install(
            runtime.model, runtime.units, self._iteration, micro_batches=runtime.config.micro_batches
        )
        runtime.hooks.append(refuse_foreign_optimizers(self, self._updates.is_attached))

    def adopt(self) -> bool:
        """Take in what has changed in the model since it was offloaded, between two steps. False when nothing has.

        Modules and parameters that were added, replaced, resized or unfrozen are offloaded and can be given to the
        optimizer (`optimizer.add_param_group` adopts by itself); what was removed gives its place back and leaves the
        optimizer. Kept parameters stay the same objects, with their values and state. Everything is planned anew and
        moved once, by way of a temporary file beside the swap files; counters of `metrics()` start again.

        Raises:
            PlacementError, UnsupportedModelError, ConfigError: the changed model does not fit, or cannot be offloaded.
            IterationError: a forward, a backward or a step is under way, or gradients wait.
            CheckpointError: somebody holds parameters gathered, or the disk is full.
        """
        self._check_open()
        self._accept_edits()
        self._runtime.saver.wait()
        optimizer, before = self._updates.optimizer, self.traffic
        made = adopt_changes(self._runtime, self._updates, self._iteration, self)
        if made is None:
            return False
        self._runtime = made
        try:
            self._connect(made)
            self._go_live(made, before)
            if optimizer is not None:
                self._updates.attach(optimizer)
                optimizer.adopted()
        except BaseException:
            self.close()
            raise
        _log.info("adopted the changed model\n%s", self.plan.describe())
        return True

    def has_module_parameter(self, parameter: torch.Tensor) -> bool:
        """Whether a module of the model holds this very object."""
        return any(parameter is held for held in self._runtime.model.parameters())

    # Training --------------------------------------------------------------------------------------------------

    def attach_optimizer(self, optimizer: OptimizerView) -> None:
        """Called by an optimizer that is built over this engine's parameters."""
        self._check_open()
        self._updates.attach(optimizer)
        self.plan = Plan(self._runtime)  # it may keep less state than was planned for

    def step(self, optimizer: OptimizerView) -> None:
        """Called by the optimizer's `step()`."""
        self._check_open()
        self._runtime.saver.raise_failure()
        self._iteration.refuse_failed()
        self._accept_edits()
        with self._runtime.trace.phase(str(self._runtime.step), "step"):
            self._updates.step(optimizer)
        self._iteration.end_step()
        self._book.step_ended()
        if self._journal is not None:
            self._journal.step_ended()

    def discard_gradients(self) -> None:
        """Called by the optimizer's `zero_grad()`."""
        self._check_open()
        self._iteration.discard()

    def clip(self, slots: Iterable[tuple[FlatGroup, int]], max_norm: float) -> torch.Tensor:
        """Total norm of the gradients of these slots; the next step applies the clip coefficient."""
        self._check_open()
        return self._updates.clip(slots, max_norm)

    def unscale(self, inverse: float) -> bool:
        """Called by the optimizer for `infinity.GradScaler`."""
        self._check_open()
        return self._updates.unscale(inverse)

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """Total gradient norm before clipping, as last computed."""
        return self._updates.gradients.last_norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in `DistributedDataParallel`: gradients of this block are averaged over the ranks before the next step.

        It saves no transfer: gradients are averaged after every backward, because a whole one need not fit anywhere.
        """
        yield

    def reset_iteration(self) -> None:
        """Abandon the running iteration after a failure: release everything, discard its gradients."""
        self._check_open()
        self._iteration.reset()

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

    def _durable(self, what: str) -> Journal:
        if self._journal is None:
            raise ConfigError(f"engine.{what}() needs infinity.Config(durability='step', nvme={{'paths': [...]}})")
        return self._journal

    def _changed(self) -> None:
        if self._journal is not None:
            self._journal.changed()

    # Checkpoints -----------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
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
                At most two are written at a time, to one place one: the next waits for the first. Several ranks
                always wait.

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
        ranks = self._meet(Want.SAVE, "the checkpoints to save", str(path))
        self._accept_edits()
        if ranks is not None:
            save_over_ranks(self._runtime, self._updates, Path(path), beside, ranks, keep=keep)
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
        path: str | Path,
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
        ranks = self._meet(Want.LOAD, "the checkpoints to load", str(path))
        extra = load_checkpoint(self._runtime, self._updates, self._iteration, Path(path), beside, ranks)
        if self._journal is not None:
            steps = max((step for state in self._runtime.states.values() for step in state.steps), default=0)
            self._journal.replaced(steps, extra)
        return extra

    def read_model_state(self) -> dict[str, torch.Tensor]:
        """Called by `infinity.state_dicts`: copies of all parameters and persistent buffers."""
        self._refuse_ranks()
        self._accept_edits()
        return read_values(self._runtime, self._updates)

    def write_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Called by `infinity.state_dicts`: replaces all parameters and persistent buffers."""
        self._refuse_ranks()
        self._changed()
        write_values(self._runtime, self._updates, self._iteration, state)

    def _refuse_ranks(self) -> None:
        self._check_open()
        if self._runtime.lockstep is not None:
            raise CheckpointError(
                "several ranks share the model, and no rank holds all of it; use engine.save() and engine.load(). What "
                "they write infinity.checkpoint.dcp_reader gives to other tools"
            )

    def read_optimizer_state(self) -> SlotStates:
        """Called by the optimizer's `state_dict()`: copies of all moments."""
        self._check_open()
        ranks = self._meet(Want.OPTIMIZER_STATE, "the uses of the optimizer's state_dict()", "read")
        return read_states(self._runtime, self._updates, ranks)

    def write_optimizer_state(self, states: SlotStates) -> None:
        """Called by the optimizer's `load_state_dict()`: replaces all moments and step counts."""
        self._check_open()
        self._meet(Want.OPTIMIZER_STATE, "the uses of the optimizer's state_dict()", "load")
        self._changed()
        write_states(self._runtime, self._updates, states)

    # Looking inside --------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """All counters as one flat dictionary, after everything under way has landed."""
        self._check_open()
        self._updates.wait_written()
        return metrics_of(self._runtime)

    def counters(self) -> dict[str, float]:
        """The same as they stand now: waits for nothing, so it can be read after every step."""
        self._check_open()
        return metrics_of(self._runtime)

    @property
    def traffic(self) -> Traffic:
        """Bytes moved per step and in total, after everything under way has landed."""
        self._check_open()
        self._updates.wait_written()
        return self._book.read()

    @property
    def trace(self) -> Trace:
        """Timed events of this run, newest kept."""
        return self._runtime.trace

    @property
    def io_engine(self) -> str:
        """How swap files are read and written, with the reason; "none" when nothing lies on NVMe."""
        store = self._runtime.store
        return store.engine_name if store is not None else "none"

    @property
    def drives(self) -> list[DriveReport]:
        """What each drive with swap files has done and holds, and whether it takes new bytes; none without any."""
        store = self._runtime.store
        return store.drive_report() if store is not None else []

    def report(self) -> str:
        """Where every shard is and what is in flight."""
        return self._runtime.inspection.report()

    # Access ----------------------------------------------------------------------------------------------------

    def use_released(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Called by a released parameter that an operation touches."""
        self._check_open()
        return self._iteration.use_released(func, args, kwargs)

    def gradient_of(self, ref: ParameterRef) -> torch.Tensor | None:
        """What `parameter.grad` shows between backward and step."""
        if self._runtime.is_closed:
            return None
        gradient = self._updates.gradients.gradient_of(ref.group, ref.slot)
        spread = self._tensor_parallel.spread_of(ref.name)
        return spread.whole(gradient) if spread is not None and type(gradient) is torch.Tensor else gradient

    def set_gradient(self, ref: ParameterRef, value: torch.Tensor | None) -> None:
        """What `parameter.grad = value` does; None forgets the gradient."""
        if value is not None:
            self._check_open()
            self._updates.gradients.set_gradient(ref.group, ref.slot, local_part(value))
        elif not self._runtime.is_closed:
            self._updates.gradients.drop_gradient(ref.group, ref.slot)

    def hold(self, groups: list[FlatGroup]) -> AbstractContextManager[None]:
        """Hold groups gathered for a block; see `infinity.gathered`."""
        self._check_open()
        self._updates.refuse_outdated(groups)
        return self._access.hold(groups)

    # Life ------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._runtime.is_closed

    def close(self) -> None:
        """Give back swap files, threads and memory. Idempotent. The model's parameters are gone afterwards.

        With `durability="step"` the last finished step is committed first, and the swap files stay.

        Raises:
            StorageError: it could not be committed; everything has been given back all the same.
            CheckpointError: a checkpoint of `save(..., wait=False)` could not be written; likewise.
        """
        self._tensor_parallel.remove_hooks()
        with ExitStack() as closing:
            closing.callback(self._runtime.shut_down)
            if not self.is_closed:
                closing.callback(self._runtime.saver.wait)
                if self._journal is not None:
                    self._journal.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._runtime.lockstep is not None:
            self._runtime.lockstep.collectives.note_error(error)
        self.close()

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

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError("an engine cannot be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an engine cannot be pickled")


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
