"""Gradients between backward and `step()`, as the user's loop sees them: read, replaced, clipped, unscaled, dropped.

Scaling by a clip coefficient or by a loss scale is remembered here and done by the update, which has the gradient in
fast memory anyway; who looks at a gradient before gets it scaled. Under `overlapped` a gradient is used up as soon as
it is complete, so whatever needs it afterwards is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from infinity.away_gradients import SpilledGradient
from infinity.config import Schedule
from infinity.errors import ConfigError, IterationError
from infinity.gradients import ReadPart, parts_of
from infinity.groups import FlatGroup
from infinity.lockstep import Want
from infinity.observe.stalls import StallCause
from infinity.optim.clip import clip_coefficient, total_norm
from infinity.optim.hyper import Hyper
from infinity.rank_gradients import RankGradientSink
from infinity.runtime import Runtime
from infinity.scaling import Scaling


class WaitingGradients:
    """What is done to gradients before their update. Used by the training thread.

    Args:
        applied: by index of a group, the hyperparameters by slot with which the running step has updated it already;
            written by `Updates`.
    """

    def __init__(self, runtime: Runtime, applied: Mapping[int, Sequence[Hyper | None]]) -> None:
        self._runtime = runtime
        self._applied = applied
        self._scales: dict[tuple[int, int], torch.Tensor] = {}  # clip coefficients by group and slot
        self._scaling = Scaling(runtime.sink)
        self.last_norm: torch.Tensor | None = None  # total norm before clipping, as last computed

    @property
    def _is_overlapped(self) -> bool:
        return self._runtime.placement.schedule is Schedule.OVERLAPPED

    # One gradient ----------------------------------------------------------------------------------------------

    def gradient_of(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """The gradient that waits for `step()`, or None.

        Raises:
            IterationError: `overlapped` has applied it already; a caller that clips or reads it would be misled.
        """
        used = self._applied.get(group.index)
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
        name, spread_over = group.layout.slots[slot].name, self._runtime.tensor_parallel
        if spread_over is not None and spread_over.spread_of(name) is not None:
            raise ConfigError(
                f"the gradient of {name!r} is in the swap file, and other ranks hold other parts of it: torch would "
                "take the norm of this part. Clip with infinity.clip_grad_norm_ or max_grad_norm"
            )
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
        self._refuse_at_once(place.name)
        if tuple(value.shape) != place.shape:
            raise ConfigError(f"the gradient of {place.name!r} has shape {place.shape}, got {tuple(value.shape)}")
        waiting = self.gradient_of(group, slot)
        if isinstance(waiting, SpilledGradient):
            self._scaling.drop(group, slot)
        if waiting is None or isinstance(waiting, SpilledGradient):
            self._finish_update(group)
            self._runtime.sink.put(group, slot, parts_of(value.detach()))
        else:
            waiting.copy_(value.detach())  # the same memory after an in-place change: nothing happens

    def load_gradient(self, group: FlatGroup, slot: int, read: ReadPart) -> None:
        """Make what `read` gives the gradient that waits for `step()`, where none does; it is never whole beside that.

        Raises:
            ConfigError: the schedule applies gradients as they arrive.
        """
        self._refuse_at_once(group.layout.slots[slot].name)
        self._finish_update(group)
        try:
            self._runtime.sink.put(group, slot, read)
        except BaseException:
            self._runtime.sink.drop(group, slot)  # what is only begun counts as none
            raise

    def _refuse_at_once(self, name: str) -> None:
        if self._is_overlapped:
            raise ConfigError(
                f"setting the gradient of {name!r} needs a step that waits for it; use schedule='synchronous'"
            )

    def drop_gradient(self, group: FlatGroup, slot: int) -> None:
        """Forget the gradient of one parameter, and how it was to be clipped. Idempotent."""
        self._runtime.sink.drop(group, slot)
        self._scales.pop((group.index, slot), None)
        self._scaling.drop(group, slot)

    def refuse_arrival(self, group: FlatGroup, slot: int) -> None:
        """A gradient arrives for a slot.

        Raises:
            IterationError: what waits there has been clipped or unscaled already, which would reach the new one too.
        """
        if self._scales.get((group.index, slot), 1.0) != 1.0:
            raise IterationError(
                f"a second gradient for {group.layout.slots[slot].name!r} arrived after its gradient had been clipped; "
                "clip once, after the last backward before optimizer.step()"
            )
        self._scaling.refuse_more(group, slot)

    # All of them -----------------------------------------------------------------------------------------------

    def agree(self, boundary: Want, what: str, value: int = 0) -> None:
        """Wait for all ranks at a boundary, and agree on the gradients that are there.

        Raises:
            RankError: another rank does something else, or with another `value`.
        """
        runtime = self._runtime
        if runtime.lockstep is None or not isinstance(runtime.sink, RankGradientSink):
            return
        discards = runtime.sink.discards
        runtime.lockstep.agree(boundary, f"{what}, or the gradients thrown away,", value, runtime.step, discards)
        runtime.sink.agree([group for group in runtime.groups if group.trainable])

    def prepare_clipping(self, what: str) -> None:
        """Norms are wanted from now on: they are measured while the gradients are in memory.

        Raises:
            ConfigError: the schedule cannot clip.
        """
        if self._is_overlapped:
            raise ConfigError(
                f"{what} needs the norm of all gradients before the first update, but schedule='overlapped' applies "
                "each gradient as it arrives. Use schedule='synchronous'"
            )
        self._runtime.sink.wants_norms = True

    def clip(self, slots: Iterable[tuple[FlatGroup, int]], max_norm: float) -> torch.Tensor:
        """Total norm of the gradients of these slots; what they are scaled by is applied in the next step.

        Raises:
            ConfigError: one of these gradients has been scaled down in this step already.
        """
        chosen = list(slots)
        norm = total_norm(self._norms(chosen))
        coefficient = clip_coefficient(norm, max_norm)
        for group, slot in chosen:
            self._refuse_scaled(group, slot)
            self._scales[group.index, slot] = coefficient
        self.last_norm = norm
        return norm

    def unscale(self, inverse: float) -> bool:
        """Take the loss scale out of every gradient. True when one of them is infinite or NaN.

        Raises:
            RankError: another rank takes out another scale.
        """
        self.agree(Want.UNSCALE, "the loss scales", hash(inverse))
        return self._scaling.unscale(inverse)

    def refuse_adjusted(self, purpose: str) -> None:
        """The gradients that wait are about to be saved.

        Raises:
            IterationError: they have been clipped or unscaled, and that may be done only in the step.
        """
        if self._scales or self._scaling.has_begun:
            raise IterationError(
                f"{purpose} between clipping or unscaling the gradients and optimizer.step() would lose what is still "
                "to be done to them. Do it before, or after the step"
            )

    def factors_of(self, group: FlatGroup) -> list[torch.Tensor | None]:
        """By slot, what its gradient is still to be multiplied by; None is one."""
        slots = range(len(group.layout.slots))
        return [self._scaling.times(group, slot, self._scales.get((group.index, slot))) for slot in slots]

    def discard(self) -> None:
        """Forget gradients that no step has used."""
        self._runtime.sink.discard()
        self.used()

    def used(self) -> None:
        """No gradient waits any more: nothing is to be scaled."""
        self._scales.clear()
        self._scaling.clear()

    # Parts -----------------------------------------------------------------------------------------------------

    def _refuse_scaled(self, group: FlatGroup, slot: int) -> None:
        if self._scales.get((group.index, slot), 1.0) != 1.0:
            raise ConfigError(
                f"the gradient of {group.layout.slots[slot].name!r} is clipped twice in one step; clip every "
                "parameter once, with max_grad_norm or with clip_grad_norm_"
            )

    def _norms(self, slots: Sequence[tuple[FlatGroup, int]]) -> list[torch.Tensor]:
        present = [(group, slot) for group, slot in slots if self._runtime.sink.has(group, slot)]
        norms = self._runtime.sink.norms(present)
        if self._runtime.tensor_parallel is not None:
            names = (group.layout.slots[slot].name for group, slot in present)
            norms = self._runtime.tensor_parallel.norms(names, norms)
        scaled = (self._scaling.times(*place, norm) for place, norm in zip(present, norms, strict=True))
        return [norm for norm in scaled if norm is not None]

    def _finish_update(self, group: FlatGroup) -> None:
        """A group's last update goes before anything that needs its result or the memory of its gradient."""
        runtime, update = self._runtime, self._runtime.copies[group.index].update
        if not update.done:
            runtime.io.post(runtime.read_ahead.want, group.index)
            runtime.stalls.wait(update, StallCause.OPTIMIZER)
