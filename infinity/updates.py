"""When groups are updated: the step schedules, seen from the training thread.

`synchronous` updates everything in `step()`. `overlapped` submits a group as soon as its gradient is complete, while
backward goes on, and `step()` only waits; that excludes accumulation and clipping, which need all gradients first. A
few of its updates are left for the next forward, see [Note: balance of a step] in balance.py.
`deferred` only decides in `step()` what every update is (gradient, settings, clip coefficient); a group is updated in
the next forward, just before it is used, or on any other access to it. What is gathered during `step()` (the resident
unit, a `gathered()` block) is updated there. All give the same bits, because an update of a group depends on nothing
but its own state, gradient, settings and step number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from infinity.config import Schedule
from infinity.consistency import Consistency
from infinity.errors import ConfigError, IterationError
from infinity.exchange import ParameterExchange
from infinity.groups import FlatGroup, in_model_order
from infinity.lockstep import Want
from infinity.observe.stalls import StallCause
from infinity.optim.group_update import GroupUpdate
from infinity.optim.hyper import Hyper
from infinity.optim.taking import take_optimizer
from infinity.optim.view import OptimizerView
from infinity.rank_gradients import RankGradientSink
from infinity.runtime import Runtime
from infinity.waiting_gradients import WaitingGradients
from storage.errors import detached

_log = logging.getLogger(__name__)


class Updates:
    """Submits updates and ends steps. Used by the training thread.

    Attributes:
        consistency: whether the state is that of one step.
        gradients: what waits for `step()`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._optimizer: OptimizerView | None = None
        self._submitted: dict[int, Sequence[Hyper | None]] = {}
        self._left: list[GroupUpdate] = []  # by `overlapped` for the next forward
        self.consistency = Consistency(runtime)
        self.gradients = WaitingGradients(runtime, self._submitted)
        self._exchange = None
        if runtime.lockstep is not None and runtime.config.stage < 3:
            self._exchange = ParameterExchange(runtime, runtime.lockstep)
        self._has_warned = False
        self._trains = any(group.trainable for group in runtime.groups)  # a frozen model needs no optimizer
        if isinstance(runtime.sink, RankGradientSink):
            runtime.sink.agrees_early = self.is_overlapped

    @property
    def optimizer(self) -> OptimizerView | None:
        """The user's optimizer; None before there is one."""
        return self._optimizer

    @property
    def has_begun(self) -> bool:
        """Whether the running step has been applied in part."""
        return bool(self._submitted)

    @property
    def is_overlapped(self) -> bool:
        """Whether groups are updated during backward."""
        return self._runtime.placement.schedule is Schedule.OVERLAPPED

    @property
    def is_deferred(self) -> bool:
        """Whether groups are updated in the next forward."""
        return self._runtime.placement.schedule is Schedule.DEFERRED

    def attach(self, optimizer: OptimizerView) -> None:
        """Make `optimizer` the one that updates this engine's parameters.

        Raises:
            ConfigError: the schedule cannot do what the optimizer asks for, or another optimizer is attached.
        """
        if self._optimizer is not None and self._optimizer is not optimizer:
            raise ConfigError(
                "this engine already has an optimizer; one optimizer with several parameter groups updates all of them"
            )
        if optimizer.max_grad_norm is not None:
            self.gradients.prepare_clipping("max_grad_norm")
        take_optimizer(self._runtime, optimizer.kind)
        self._optimizer = optimizer

    def is_attached(self, optimizer: object) -> bool:
        """Whether this is the optimizer that updates this engine's parameters."""
        return optimizer is self._optimizer

    def warn_without_optimizer(self) -> None:
        """A forward begins: say once if gradients pile up that no optimizer of this engine will ever use."""
        if self._optimizer is None and not self._has_warned and self._runtime.sink.pending():
            self._has_warned = True
            _log.warning(
                "gradients are waiting, but no infinity optimizer has been built over this model. An optimizer built "
                "before infinity.offload holds the old parameters and trains nothing; build it afterwards"
            )

    def check_backward(self) -> None:
        """A backward begins."""
        self._runtime.check_open()  # a graph outlives the hooks
        self.consistency.check()
        if self.is_overlapped and self._trains and self._optimizer is None:
            raise ConfigError(
                "schedule='overlapped' updates parameters during backward; build infinity.AdamW(model.parameters()) "
                "before the first backward"
            )

    def complete(self, groups: Iterable[FlatGroup]) -> None:
        """The gradients of these groups are final: under `overlapped` their updates start now.

        Over ranks only if they are final on all of them; the others wait for `step()`.
        """
        if not self.is_overlapped:
            return
        is_complete = self._runtime.sink.is_complete
        self._submit([group for group in groups if self._has_gradient(group) and is_complete(group)])

    def refuse_second(self, group: FlatGroup) -> None:
        """A gradient arrives for a group.

        Raises:
            IterationError: the group has been updated in this step already.
        """
        if group.index in self._submitted:
            raise IterationError(
                f"a second gradient for {group.key} arrived before optimizer.step(), but schedule='overlapped' has "
                "already applied the first. Use schedule='synchronous' to accumulate gradients"
            )

    def clip(self, slots: Iterable[tuple[FlatGroup, int]], max_norm: float) -> torch.Tensor:
        """Total norm of the gradients of these slots; what they are scaled by is applied in the next step.

        Raises:
            ConfigError: the schedule cannot clip, or one of these gradients has been scaled down in this step already.
            RankError: another rank clips other gradients, or none.
        """
        self.gradients.prepare_clipping("clip_grad_norm_")
        chosen = list(slots)
        places = hash(tuple((group.index, slot) for group, slot in chosen))
        self.gradients.agree(Want.CLIP, "the parameters to clip", places)
        return self.gradients.clip(chosen, max_norm)

    def unscale(self, inverse: float) -> bool:
        """Take the loss scale out of the gradients that wait. True when one of them is infinite or NaN.

        Raises:
            IterationError: `overlapped` has applied gradients with the scale in them.
        """
        if self.is_overlapped:
            error = ConfigError(
                "schedule='overlapped' applies gradients as they arrive, with the loss scale in them and overflows "
                "too. Use schedule='synchronous' with a loss scale"
            )
            if self._submitted:
                self.consistency.lose_step(error)
                self.consistency.check()
            raise error
        return self.gradients.unscale(inverse)

    def step(self, optimizer: OptimizerView) -> None:
        """End the step: every update is computed, or deferred to the next use of its group.

        Writes to the swap files may still be under way behind it.
        """
        self.consistency.check()
        self._agree_on_step()
        if self.is_overlapped:
            self._check_unchanged(optimizer)
        else:
            self._finish_deferred()
            if optimizer.max_grad_norm is not None:
                self.gradients.clip(in_model_order(self._runtime.model, optimizer.slots()), optimizer.max_grad_norm)
            self._runtime.sink.check_writes()
        groups = self._runtime.sink.pending()  # under `overlapped`, what not every rank had in its backward
        hypers = self._prepare(groups)
        with self._applying():
            self._apply(self._make_updates(groups, hypers))
            self._submitted.clear()
            self.gradients.used()

    def _apply(self, updates: Sequence[GroupUpdate]) -> None:
        """Start or defer the last updates of the step, and wait for what is not deferred."""
        runtime = self._runtime
        later = [update for update in updates if self.is_deferred and not self._is_present(update)]
        runtime.io.post(runtime.pipeline.submit, [update for update in updates if update not in later])
        runtime.io.post(runtime.pipeline.defer, later)
        later += self._still_left()
        runtime.step += 1
        runtime.sink.step = runtime.passage.step = runtime.activations.step = runtime.step
        runtime.io.post(runtime.read_ahead.step_submitted, runtime.step)
        now = [update for update in runtime.in_flight if update not in later]
        try:
            if self._exchange is not None:
                self._exchange.run(lambda: self._wait_computed(now))
            else:
                self._wait_computed(now)
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.abandon(_told_later(error))
            raise
        for group in runtime.gatherer.gathered():  # resident, or held by a `gathered()` block around the step
            if group.index in self._submitted and runtime.gatherer.is_gathered(group):
                runtime.gatherer.refresh(group)

    def refuse_edited(self, groups: Iterable[FlatGroup]) -> None:
        """Groups are about to be updated, or have been during backward.

        Raises:
            IterationError: under `overlapped`, they were changed on the device and the update would undo that.
        """
        for group in groups:
            if self.is_overlapped and self._runtime.gatherer.edited(group):
                raise IterationError(
                    f"parameters of {group.key} were changed in place; schedule='overlapped' would lose that. Change "
                    "them after step(), inside `with infinity.gathered(module):`, or use schedule='synchronous'"
                )

    def refuse_outdated(self, groups: Iterable[FlatGroup]) -> None:
        """The user wants to see or edit groups.

        Raises:
            IterationError: `overlapped` has updated one that is gathered with its values of before.
        """
        for group in groups:
            if group.index in self._submitted and self._runtime.gatherer.is_gathered(group):
                raise IterationError(
                    f"gathered() on {group.key}, which schedule='overlapped' has updated during backward; its new "
                    "values are there after optimizer.step()"
                )

    def wait_written(self) -> None:
        """Wait until the swap files hold every update, those that were deferred too."""
        self._runtime.land_updates()
        self._runtime.sink.check_writes()

    def settle(self, purpose: str) -> None:
        """Wait until the swap files hold every update of the steps so far.

        Raises:
            IterationError: the running step has been applied in part.
        """
        if self._submitted:
            raise IterationError(
                f"{purpose} in the middle of a step: schedule='overlapped' has updated some parameters already and "
                "others not. Call optimizer.step() first"
            )
        self.wait_written()

    def settle_to_load(self) -> None:
        """Before the whole state is replaced. A step that was lost, and told so, is forgotten: its updates end here.

        Raises:
            IterationError: as `settle`; or a step was lost that `Engine.restore` brings back.
            StorageError: what a step was lost with, if that has not been raised before.
        """
        runtime, consistency = self._runtime, self.consistency
        is_lost = consistency.is_lost and runtime.failure.error is not None
        if not is_lost or runtime.committer is not None:
            try:
                if runtime.failure.error is not None:
                    consistency.check()
                self.settle("loading")
            finally:
                consistency.notice_failure()
            return
        runtime.io.post(runtime.read_ahead.force)
        for update in runtime.in_flight:
            runtime.stalls.settle(update.written, StallCause.NVME_WRITE)
        runtime.in_flight.clear()
        self._forget_step()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """The whole state is replaced in this block by a checkpoint; the running step is forgotten."""
        with self.consistency.loading(what):
            yield
        self._forget_step()

    @contextmanager
    def restoring(self, what: str) -> Iterator[None]:
        """The whole state is replaced in this block by one that was committed; the running step is forgotten."""
        with self.consistency.restoring(what):
            yield
        self._forget_step()

    def abandon(self) -> None:
        """The running iteration failed. What was already applied cannot be taken back."""
        if self._submitted:
            self.consistency.lose_step(RuntimeError("the backward failed after some parameters had been updated"))
        self._submitted.clear()

    def _forget_step(self) -> None:
        if self._exchange is not None:
            self._exchange.abandon(IterationError("the step was forgotten: another state has been loaded"))
        self._submitted.clear()
        self.gradients.used()

    # Parts -----------------------------------------------------------------------------------------------------

    def _is_present(self, update: GroupUpdate) -> bool:
        return self._runtime.gatherer.is_gathered(update.state.group)

    def _still_left(self) -> list[GroupUpdate]:
        """Updates that are left for the next forward; those of what is gathered now are wanted now."""
        runtime = self._runtime
        self._left = [update for update in self._left if not update.computed.done]
        present = [update for update in self._left if self._is_present(update)]
        for update in present:
            runtime.io.post(runtime.read_ahead.want, update.state.group.index)
        return [update for update in self._left if update not in present]

    def _agree_on_step(self) -> None:
        """All ranks take the same step, on top of the same commit; nobody goes back further than to that one."""
        committer = self._runtime.committer
        epoch = 0
        if committer is not None:
            committer.wait()
            epoch = committer.epoch
        self.gradients.agree(Want.STEP, "the steps taken or committed", epoch)
        if committer is not None:
            committer.store.forget_before()

    def _has_gradient(self, group: FlatGroup) -> bool:
        return any(self._runtime.sink.has(group, slot) for slot in range(len(group.layout.slots)))

    def _check_unchanged(self, optimizer: OptimizerView) -> None:
        for index, hypers in self._submitted.items():
            group = self._runtime.groups[index]
            for slot, used in enumerate(hypers):
                if used is not None and optimizer.hyper_of(group, slot) != used:
                    raise IterationError(
                        f"the hyperparameters of {group.layout.slots[slot].name!r} changed between backward and "
                        "step(), but schedule='overlapped' had already used them. Change them after step(), or use "
                        "schedule='synchronous'"
                    )

    def _hypers_of(self, optimizer: OptimizerView, group: FlatGroup) -> list[Hyper | None]:
        slots = range(len(group.layout.slots))
        return [optimizer.hyper_of(group, slot) if self._runtime.sink.has(group, slot) else None for slot in slots]

    def _finish_deferred(self) -> None:
        """What no forward has used since the last step is updated before the next update of it is made."""
        runtime = self._runtime
        waiting = [update for update in runtime.in_flight if not update.computed.done]
        if waiting:
            runtime.io.post(runtime.read_ahead.force)
            with self.consistency.applying():
                self._wait_computed(waiting)

    def _wait_computed(self, updates: Iterable[GroupUpdate]) -> None:
        for update in updates:
            self._runtime.stalls.wait(update.computed, StallCause.OPTIMIZER)

    def _submit(self, groups: Sequence[FlatGroup]) -> None:
        """Start the updates of groups, whose gradients are final, or leave them for the next forward."""
        hypers = self._prepare(groups)
        runtime, waiting = self._runtime, self._runtime.placement.updated_in_forward
        with self._applying():
            updates = self._make_updates(groups, hypers)
            left = [update for update in updates if update.state.group.index in waiting]
            self._left += left
            runtime.io.post(runtime.pipeline.defer, left)
            runtime.io.post(runtime.pipeline.submit, [update for update in updates if update not in left])

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """Updates are made and handed over in this block; those that are not handed over fail with what ends it."""
        runtime = self._runtime
        with self.consistency.applying():
            try:
                yield
            except BaseException as error:  # Ctrl-C, wherever it comes: who goes back waits for all that are in flight
                runtime.io.post(runtime.pipeline.give_up, list(runtime.in_flight), _told_later(error))
                raise

    def _prepare(self, groups: Sequence[FlatGroup]) -> list[Sequence[Hyper | None]]:
        """The settings of updates that are about to be made. What can be refused is refused here: nothing has changed.

        Returns:
            By group, the hyperparameters of each slot; None where the slot is left alone.
        """
        runtime, optimizer = self._runtime, self._optimizer
        if optimizer is None:
            return [[None] * len(group.layout.slots) for group in groups]
        self.refuse_edited(groups)
        runtime.before_overwrite()
        runtime.gatherer.drop_ahead(groups)
        runtime.gatherer.part(groups)
        return [self._hypers_of(optimizer, group) for group in groups]

    def _make_updates(
        self, groups: Sequence[FlatGroup], settings: Sequence[Sequence[Hyper | None]]
    ) -> list[GroupUpdate]:
        """Take the gradients of groups; with the settings of now, they are everything that their updates depend on."""
        runtime = self._runtime
        runtime.in_flight[:] = [u for u in runtime.in_flight if not u.written.done or u.written.exception is not None]
        updates = []
        for group, hypers in zip(groups, settings, strict=True):
            factors = self.gradients.factors_of(group)
            gradient = runtime.sink.take(group)
            if not any(hyper is not None for hyper in hypers):
                gradient.release()
                continue
            state, copy = runtime.states[group.index], runtime.copies[group.index]
            update = GroupUpdate.make(state, copy, gradient, hypers, factors, runtime.step)
            runtime.in_flight.append(update)  # at once: from now on somebody waits for it, or gives it up
            update.copy.update = self._exchange.expect(update) if self._exchange is not None else update.computed
            self._submitted[group.index] = hypers
            updates.append(update)
        return updates


def _told_later(error: BaseException) -> BaseException:
    """What those are told who come to an update that was lost with this: a Ctrl-C of before is none of theirs."""
    if isinstance(error, Exception):
        return detached(error)
    told = IterationError(f"the update was lost, because optimizer.step() was interrupted ({type(error).__name__})")
    told.__cause__ = detached(error)
    return told
