"""When groups are updated: the step schedules, seen from the training thread.

`synchronous` updates everything in `step()`. `overlapped` submits a group as soon as its gradient is complete, while
backward goes on, and `step()` only waits; that excludes accumulation and clipping, which need all gradients first.
`deferred` only decides in `step()` what every update is (gradient, settings, clip coefficient); a group is updated in
the next forward, just before it is used, or on any other access to it. What is gathered during `step()` (the resident
unit, a `gathered()` block) is updated there. All give the same bits, because an update of a group depends on nothing
but its own state, gradient, settings and step number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from infinity.config import OptimizerKind, Schedule
from infinity.errors import ConfigError, IterationError
from infinity.exchange import ParameterExchange
from infinity.groups import FlatGroup
from infinity.lockstep import Want
from infinity.observe.stalls import StallCause
from infinity.optim.clip import clip_coefficient, total_norm
from infinity.optim.hyper import Hyper
from infinity.optim.pipeline import GroupUpdate
from infinity.optim.taking import take_optimizer
from infinity.rank_gradients import RankGradientSink
from infinity.released import ParameterRef, SpilledGradient
from infinity.runtime import Runtime
from infinity.scaling import Scaling
from storage.types import Ticket

_log = logging.getLogger(__name__)


class OptimizerView(Protocol):
    """What the engine needs to know of the user's optimizer."""

    @property
    def max_grad_norm(self) -> float | None: ...

    @property
    def kind(self) -> OptimizerKind:
        """Which state it needs."""

    def hyper_of(self, group: FlatGroup, slot: int) -> Hyper | None:
        """Hyperparameters of a slot as they are now; None when the optimizer does not hold it."""

    def slots(self) -> Iterable[tuple[FlatGroup, int]]:
        """Every slot the optimizer holds, in the order of its parameter groups."""


class Updates:
    """Submits updates and ends steps. Used by the training thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._optimizer: OptimizerView | None = None
        self._submitted: dict[int, Sequence[Hyper | None]] = {}
        self._scales: dict[tuple[int, int], torch.Tensor] = {}  # clip coefficients by group and slot
        self.scaling = Scaling(runtime.sink)
        self._exchange = None
        if runtime.lockstep is not None and runtime.config.stage < 3:
            self._exchange = ParameterExchange(runtime, runtime.lockstep)
        self._torn: str | None = None
        self._has_warned = False
        self.last_grad_norm: torch.Tensor | None = None

    @property
    def optimizer(self) -> OptimizerView | None:
        return self._optimizer

    @property
    def has_begun(self) -> bool:
        """Whether the running step has been applied in part."""
        return bool(self._submitted)

    @property
    def is_overlapped(self) -> bool:
        return self._runtime.placement.schedule is Schedule.OVERLAPPED

    @property
    def is_deferred(self) -> bool:
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
            self._refuse_clipping("max_grad_norm")
            self._runtime.sink.wants_norms = True
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
        self.raise_failure()
        if self.is_overlapped and self._optimizer is None:
            raise ConfigError(
                "schedule='overlapped' updates parameters during backward; build infinity.AdamW(model.parameters()) "
                "before the first backward"
            )

    def complete(self, groups: Iterable[FlatGroup]) -> None:
        """The gradients of these groups are final: under `overlapped` their updates start now."""
        if not self.is_overlapped:
            return
        self._submit([group for group in groups if self._has_gradient(group)])

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
        self._refuse_clipping("clip_grad_norm_")
        self._runtime.sink.wants_norms = True  # measured from now on while they are in memory
        chosen = list(slots)
        self._meet(Want.CLIP, "the parameters to clip", hash(tuple((group.index, slot) for group, slot in chosen)))
        return self._clip(chosen, max_norm)

    def _clip(self, chosen: Sequence[tuple[FlatGroup, int]], max_norm: float) -> torch.Tensor:
        norm = total_norm(self._norms(chosen))
        coefficient = clip_coefficient(norm, max_norm)
        for group, slot in chosen:
            self._refuse_scaled(group, slot)
            self._scales[group.index, slot] = coefficient
        self.last_grad_norm = norm
        return norm

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
                self._tear(error)
                self.raise_failure()
            raise error
        self._meet(Want.UNSCALE, "the loss scales", hash(inverse))
        return self.scaling.unscale(inverse)

    def step(self, optimizer: OptimizerView) -> None:
        """End the step: every update is computed, or deferred to the next use of its group.

        Writes to the swap files may still be under way behind it.
        """
        runtime = self._runtime
        self.raise_failure()
        later: list[GroupUpdate] = []
        if self.is_overlapped:
            self._check_unchanged(optimizer)
        else:
            self._meet(Want.STEP, "the steps taken")
            self._finish_deferred()
            if optimizer.max_grad_norm is not None:
                self._clip(list(optimizer.slots()), optimizer.max_grad_norm)
            runtime.sink.check_writes()
            later = self._submit_pending()
        runtime.step += 1
        runtime.sink.step = runtime.step
        runtime.io.post(runtime.read_ahead.step_submitted, runtime.step)
        try:
            self._wait_computed([update for update in runtime.in_flight if update not in later])
            if self._exchange is not None:
                self._exchange.run()
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.abandon(error)
            self._tear(error)
            raise
        for group in runtime.gatherer.gathered():  # resident, or held by a `gathered()` block around the step
            if group.index in self._submitted and runtime.gatherer.is_gathered(group):
                runtime.gatherer.refresh(group)
        self._submitted.clear()
        self._scales.clear()
        self.scaling.clear()

    def gradient_of(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """The gradient that waits for `step()`, or None.

        Raises:
            IterationError: `overlapped` has applied it already; a caller that clips or reads it would be misled.
        """
        used = self._submitted.get(group.index)
        if used is not None and used[slot] is not None:
            raise IterationError(
                f"the gradient of {group.layout.slots[slot].name!r} was applied during backward, because the "
                "schedule is 'overlapped'. Use schedule='synchronous' to read, change or clip gradients before step()"
            )
        gradient = self._runtime.sink.view(group, slot)
        scale = self._scales.get((group.index, slot))
        if type(gradient) is SpilledGradient:
            gradient.kept = (self, group, slot)
        elif gradient is not None and scale is not None and not isinstance(gradient, SpilledGradient):
            gradient.mul_(self._scales.pop((group.index, slot)))  # whoever looks sees what was clipped
        return gradient

    def norm_of_spilled(self, group: FlatGroup, slot: int) -> torch.Tensor:
        """The 2-norm of a gradient in the swap file.

        Raises:
            ConfigError: it has been scaled already; the norm of what it will be is not known to the last bit.
        """
        self._refuse_scaled(group, slot)
        self._runtime.sink.wants_norms = True  # measured from now on while they are in memory
        return self._runtime.sink.norms([(group, slot)])[0].clone()

    def scale_spilled(self, group: FlatGroup, slot: int, factor: torch.Tensor) -> None:
        """Multiply a gradient in the swap file by `factor` (0-dim), when the step reads it.

        Raises:
            ConfigError: it has been scaled already.
        """
        self._refuse_scaled(group, slot)
        self._scales[group.index, slot] = factor.detach().clone()

    def set_gradient(self, group: FlatGroup, slot: int, value: torch.Tensor) -> None:
        """Make `value` the gradient that waits for `step()`.

        Raises:
            ConfigError: the shape differs, or the schedule applies gradients as they arrive.
        """
        place = group.layout.slots[slot]
        if self.is_overlapped:
            raise ConfigError(
                f"setting the gradient of {place.name!r} needs a step that waits for it; use schedule='synchronous'"
            )
        if tuple(value.shape) != place.shape:
            raise ConfigError(f"the gradient of {place.name!r} has shape {place.shape}, got {tuple(value.shape)}")
        waiting = self.gradient_of(group, slot)
        if isinstance(waiting, SpilledGradient):
            self.scaling.drop(group, slot)
        if waiting is None or isinstance(waiting, SpilledGradient):
            self._finish_update(group)
            self._runtime.sink.put(group, slot, value.detach())
        else:
            waiting.copy_(value.detach())  # the same memory after an in-place change: nothing happens

    def drop_gradient(self, group: FlatGroup, slot: int) -> None:
        """Forget the gradient of one parameter, and how it was to be clipped. Idempotent."""
        self._runtime.sink.drop(group, slot)
        self._scales.pop((group.index, slot), None)
        self.scaling.drop(group, slot)

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

    def refuse_clipped(self, group: FlatGroup, slot: int) -> None:
        """A gradient arrives for a slot.

        Raises:
            IterationError: what is there already has been clipped; the clipping would reach the new one too.
        """
        if self._scales.get((group.index, slot), 1.0) != 1.0:
            raise IterationError(
                f"a second gradient for {group.layout.slots[slot].name!r} arrived after its gradient had been clipped; "
                "clip once, after the last backward before optimizer.step()"
            )

    def discard(self) -> None:
        """Forget gradients that no step has used."""
        self._runtime.sink.discard()
        self._scales.clear()
        self.scaling.clear()

    def wait_written(self) -> None:
        """Wait until the swap files hold every update, those that were deferred too."""
        self._runtime.land_updates()
        self._runtime.sink.check_writes()

    def raise_failure(self) -> None:
        """Raise what failed behind the training thread, once as itself and from then on as a lost state.

        Raises:
            IterationError: an update was lost; the parameters belong to two different steps.
        """
        if self._torn is not None:
            raise IterationError(self._torn) from self._runtime.failure.error
        if self._runtime.failure.error is not None:
            error = self._runtime.failure.error
            self._tear(error)
            raise error

    def notice_failure(self) -> None:
        """An iteration failed. If that was a lost update, which it has raised, the state is lost from now on."""
        if self._runtime.failure.error is not None and self._torn is None:
            self._tear(self._runtime.failure.error)

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

    @contextmanager
    def replacing(self, what: str) -> Iterator[None]:
        """All parameters and their state are replaced in this block; if it fails, they belong to two states.

        Raises:
            IterationError: an update was lost before.
        """
        if self._runtime.failure.error is not None:
            self.raise_failure()
        self._torn = f"{what} has not finished"
        try:
            yield
        except BaseException as error:
            self._torn = (
                f"{what} failed half-way ({type(error).__name__}: {error}); some parameters are the new ones and "
                "others are not. Load a complete checkpoint, or close this engine and start again"
            )
            raise
        self._torn = None

    @contextmanager
    def restoring(self, what: str) -> Iterator[None]:
        """The whole state is replaced in this block by one that was committed; what was lost before is forgotten."""
        self._torn = f"{what} has not finished"
        try:
            yield
        except BaseException as error:
            self._torn = (
                f"{what} failed ({type(error).__name__}: {error}); try again when the cause is gone, or close this "
                "engine and resume in a new process"
            )
            raise
        self._torn = None
        self._runtime.failure.error = None
        self._submitted.clear()
        self._scales.clear()

    def abandon(self) -> None:
        """The running iteration failed. What was already applied cannot be taken back."""
        if self._submitted:
            self._tear(RuntimeError("the backward failed after some parameters had been updated"))
        self._submitted.clear()

    # Parts -----------------------------------------------------------------------------------------------------

    def _meet(self, boundary: Want, what: str, value: int = 0) -> None:
        """Wait for all ranks, and agree on the gradients that are there."""
        runtime = self._runtime
        if runtime.lockstep is None or not isinstance(runtime.sink, RankGradientSink):
            return
        discards = runtime.sink.discards
        runtime.lockstep.agree(boundary, f"{what}, or the gradients thrown away,", value, runtime.step, discards)
        runtime.sink.agree([group for group in runtime.groups if group.trainable])

    def _tear(self, error: BaseException) -> None:
        self._runtime.failure.note(error)
        committer = self._runtime.committer
        way_out = "Close this engine and start again from the last saved state"
        if committer is not None:
            way_out = f"When the cause is gone, engine.restore() goes back to step {committer.store.step}"
        self._torn = (
            f"step {self._runtime.step} was lost half-way ({type(error).__name__}: {error}); some parameters are "
            f"updated and others are not. {way_out}"
        )

    def _refuse_scaled(self, group: FlatGroup, slot: int) -> None:
        if self._scales.get((group.index, slot), 1.0) != 1.0:
            raise ConfigError(
                f"the gradient of {group.layout.slots[slot].name!r} is clipped twice in one step; clip every "
                "parameter once, with max_grad_norm or with clip_grad_norm_"
            )

    def _refuse_clipping(self, what: str) -> None:
        if self.is_overlapped:
            raise ConfigError(
                f"{what} needs the norm of all gradients before the first update, but schedule='overlapped' applies "
                "each gradient as it arrives. Use schedule='synchronous'"
            )

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
            try:
                self._wait_computed(waiting)
            except BaseException as error:
                self._tear(error)
                raise

    def _finish_update(self, group: FlatGroup) -> None:
        """A group's last update goes before anything that needs its result or the memory of its gradient."""
        runtime, update = self._runtime, self._runtime.copies[group.index].update
        if not update.done:
            runtime.io.post(runtime.read_ahead.want, group.index)
            runtime.stalls.wait(update, StallCause.OPTIMIZER)

    def _wait_computed(self, updates: Iterable[GroupUpdate]) -> None:
        for update in updates:
            self._runtime.stalls.wait(update.computed, StallCause.OPTIMIZER)

    def _factors_of(self, group: FlatGroup) -> list[torch.Tensor | None]:
        """By slot, what its gradient is still to be multiplied by."""
        slots = range(len(group.layout.slots))
        return [self.scaling.times(group, slot, self._scales.get((group.index, slot))) for slot in slots]

    def _norms(self, slots: Sequence[tuple[FlatGroup, int]]) -> list[torch.Tensor]:
        present = [(group, slot) for group, slot in slots if self._runtime.sink.has(group, slot)]
        norms = self._runtime.sink.norms(present)
        scaled = (self.scaling.times(*place, norm) for place, norm in zip(present, norms, strict=True))
        return [norm for norm in scaled if norm is not None]

    def _submit(self, groups: Sequence[FlatGroup]) -> None:
        """Start the updates of groups, whose gradients are final."""
        self._runtime.io.post(self._runtime.pipeline.submit, self._make_updates(groups))

    def _submit_pending(self) -> list[GroupUpdate]:
        """Start the updates of every gradient there is, or defer them; returns those that are deferred."""
        runtime, pending = self._runtime, self._runtime.sink.pending()
        updates = self._make_updates(pending)
        is_present = runtime.gatherer.is_gathered
        later = [update for update in updates if self.is_deferred and not is_present(update.state.group)]
        runtime.io.post(runtime.pipeline.submit, [update for update in updates if update not in later])
        runtime.io.post(runtime.pipeline.defer, later)
        return later

    def _make_updates(self, groups: Sequence[FlatGroup]) -> list[GroupUpdate]:
        """Take the gradients of groups; with the settings of now, they are everything that their updates depend on."""
        runtime, optimizer = self._runtime, self._optimizer
        if optimizer is None:
            return []
        self.refuse_edited(groups)
        runtime.before_overwrite()
        runtime.gatherer.drop_ahead(groups)
        runtime.in_flight[:] = [u for u in runtime.in_flight if not u.written.done or u.written.exception is not None]
        # All of them first: one that is refused must not leave a gradient that nobody holds.
        settings = [self._hypers_of(optimizer, group) for group in groups]
        updates = []
        for group, hypers in zip(groups, settings, strict=True):
            gradient = runtime.sink.take(group)
            state = runtime.states[group.index]
            if not any(hyper is not None for hyper in hypers):
                gradient.release()
                continue
            for slot, hyper in enumerate(hypers):
                state.steps[slot] += hyper is not None
            update = GroupUpdate(
                state=state,
                copy=runtime.copies[group.index],
                gradient=gradient,
                hypers=hypers,
                steps=tuple(state.steps),
                grad_scales=self._factors_of(group),
                step=runtime.step,
                computed=Ticket(f"update of {group.key}"),
                written=Ticket(f"write-back of {group.key}"),
            )
            update.copy.update = self._exchange.expect(update) if self._exchange is not None else update.computed
            self._submitted[group.index] = hypers
            updates.append(update)
        runtime.in_flight.extend(updates)
        return updates


def slots_of(parameters: Iterable[torch.Tensor], refs: Iterable[ParameterRef | None]) -> list[tuple[FlatGroup, int]]:
    """The slots behind parameters; a parameter that is not offloaded is refused."""
    found = []
    for parameter, ref in zip(parameters, refs, strict=True):
        if ref is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is not offloaded; pass parameters of the "
                "offloaded model"
            )
        found.append((ref.group, ref.slot))
    return found
