"""The engine: one offloaded model, from `infinity.offload` to `close()`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from infinity import hooks
from infinity.access import ParameterAccess
from infinity.adoption import adopt_changes
from infinity.assemble import assemble
from infinity.checkpoint.rng import restore_rng_state
from infinity.checkpoint.tiers import CHECKPOINT_STEP
from infinity.config import Config
from infinity.durable.journal import Journal
from infinity.durable.notes import StoredRun
from infinity.durable.restore import find_run, make_way, restore_shards
from infinity.durable.together import find_run_of_ranks
from infinity.engine_state import StatefulEngine
from infinity.gather import UserHold
from infinity.groups import FlatGroup
from infinity.init import fill_shards, leave_uninitialised
from infinity.iteration import Iteration
from infinity.materialise import FirstValues
from infinity.meshes import local_of
from infinity.observe.metrics import Traffic, TrafficBook, metrics_of
from infinity.observe.trace import Trace
from infinity.optim.foreign import refuse_foreign_optimizers
from infinity.optim.view import OptimizerView
from infinity.order import Phase
from infinity.plan.summary import Plan
from infinity.ranks import Ranks
from infinity.released import ParameterRef
from infinity.runtime import Runtime
from infinity.tensor_parallel import TensorParallel
from infinity.territory import Territory
from infinity.updates import Updates
from infinity.weights.match import LoadedWeights
from storage.drives import WrapBackend
from storage.space import DriveReport

_log = logging.getLogger(__name__)


class Engine(StatefulEngine):
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
        wrap_backend: WrapBackend | None = None,
    ) -> None:
        if ranks is not None:
            run = find_run_of_ranks(config, ranks, resume=resume)
        elif (run := find_run(config, resume=resume)) is None:
            make_way(config)
        self.loaded_weights: LoadedWeights | None = None
        self._territory = Territory(model)
        self._tensor_parallel = TensorParallel(model)
        self._tensor_parallel.check(config, ranks)
        with ExitStack() as undo:
            self._tensor_parallel.localise()
            undo.callback(self._tensor_parallel.restore)
            self._runtime: Runtime = assemble(model, config, self, ranks, run, values, wrap_backend)
            undo.push(self.__exit__)
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
        self._iteration.watch_structure(self._territory)
        resident = UserHold()
        for group in runtime.resident_groups:
            runtime.gatherer.gather(group, resident, Phase.FORWARD)
        _move_buffers(self._territory, runtime.device.torch_device)
        self._book = TrafficBook(runtime, before)
        self.plan = Plan(runtime)
        runtime.hooks = hooks.install(
            runtime.model,
            runtime.units,
            self._iteration,
            runtime.activations,
            micro_batches=runtime.config.micro_batches,
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
        self._territory.look()
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
        self._territory.look()
        return any(parameter is held for module in self._territory.modules() for held in module._parameters.values())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this engine serves, each once, in module order: what its optimizer is built over.

        Those of `model.parameters()`, unless another engine serves a module inside the model.
        """
        found = (p for m in self._territory.modules() for p in m._parameters.values() if p is not None)
        yield from {id(parameter): parameter for parameter in found}.values()

    def owns_module(self, module: nn.Module) -> bool:
        """Whether it serves a module: those of the model, without what other engines serve inside it."""
        return module in self._territory

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
    def config(self) -> Config:
        """The settings it was made with."""
        return self._runtime.config

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the parameters of a forward are in, by precision and device: what inputs are to be given in.

        bf16 on a GPU or CPU that multiplies bf16 natively, fp16 on a GPU, else fp32. With precision "fp32" frozen
        parameters keep the dtype they were built with.
        """
        return self._runtime.device.compute_dtype(self.config.precision)

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
            self._updates.gradients.set_gradient(ref.group, ref.slot, local_of(value))
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
        """Whether `close()` has been called: parameters and optimizer state are gone."""
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

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError("an engine cannot be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("an engine cannot be pickled")


def _move_buffers(territory: Territory, device: torch.device) -> None:
    for module in territory.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
