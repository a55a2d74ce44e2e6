"""Taking in a model that has changed: modules added, replaced, resized or removed, parameters unfrozen.

[Note: adoption]
The changed model is planned as a whole, as `offload` does it; a plan that does not work is refused before anything has
changed. Then what is kept is carried over, parameter by parameter, in a temporary file: the old parts are closed and
give their budgets and swap files back before the new ones are made, so no budget is exceeded. The objects that stand
for kept parameters stay the same, with their hooks; so do their values, moments and numbers of updates, bit for bit.
New parameters start as `offload` would have taken them; parameters that are gone refuse to be read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn

from infinity.allocate import allocate
from infinity.assemble import draw_up
from infinity.blueprint import Blueprint
from infinity.carry import Carry, Load
from infinity.checkpoint.load import refuse_gathered
from infinity.checkpoint.tiers import Span, Tiers
from infinity.errors import ConfigError, IterationError, NotGatheredError, PlacementError, UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.iteration import Iteration
from infinity.placing import sources_of
from infinity.released import Access, ParameterRef
from infinity.runtime import Runtime
from infinity.sizes import format_nbytes
from infinity.swap_directories import default_directory
from infinity.units import Kept, Parameters
from infinity.updates import Updates
from storage.types import Ticket

_PARAM = "param"
_WAY_OUT = (
    "Save a checkpoint, close the engine, build the changed model anew and offload it with weights=CHECKPOINT, "
    "strict=False: it keeps the values of the parameters, the optimizer's state begins anew"
)
_Origins = Mapping[tuple[int, int], ParameterRef | None]
"""By index of a new group and number of its slot: where the parameter was before; None when it is new."""


def adopt_changes(runtime: Runtime, updates: Updates, iteration: Iteration, access: Access) -> Runtime | None:
    """Make the parts of an engine anew for its model as it is now; None, and nothing happens, if it has not changed.

    Raises: what `Engine.adopt` says.
    """
    kept = _kept(runtime)
    if not _is_changed(runtime, Parameters(runtime.model, kept)):
        return None
    _refuse_now(runtime, updates, iteration)
    runtime.saver.wait()
    config = runtime.config.with_(
        host={"budget": runtime.placement.host_budget_nbytes},
        device={"budget": runtime.device.budget.limit_nbytes},
        optimizer=runtime.optimizer,
    )
    with ExitStack() as stack:
        blueprint = draw_up(runtime.model, config, access, stack, kept=kept, wrap_backend=runtime.wrap_backend)
        origins = _origins(blueprint.groups, kept)
        with Carry(_folder(runtime), _loads(runtime, blueprint.groups, origins)) as carry:
            _refuse_little_space(runtime, blueprint)
            _save(runtime, carry)
            steps = {index: list(state.steps) for index, state in runtime.states.items()}
            runtime.shut_down()
            made = allocate(blueprint, stack)
            made.closing = stack.pop_all()
            try:
                _fill(made, origins, steps, carry)
            except BaseException:
                made.shut_down()
                raise
    _hand_over(made.groups, origins)
    _leave_behind(runtime, made.groups)
    made.step = made.sink.step = made.passage.step = made.activations.step = made.read_ahead.step = runtime.step
    return made


# What there is to do ---------------------------------------------------------------------------------------------


def _kept(runtime: Runtime) -> dict[int, Kept]:
    """All parameters that are offloaded, by the ids of both objects that stand for each.

    One that was trained keeps its state even while it is frozen; one that never was needs none.
    """
    found = {}
    for group in runtime.groups:
        steps = runtime.states[group.index].steps if group.trainable else [0] * len(group.layout.slots)
        for slot, (real, stand_in) in enumerate(zip(group.parameters, group.stand_ins, strict=True)):
            trains = slot in group.unfrozen or (group.trainable and (stand_in.requires_grad or steps[slot] > 0))
            one = Kept(cast("nn.Parameter", stand_in), group.source_dtype, trains)
            found[id(real)] = found[id(stand_in)] = one
    return found


def _is_changed(runtime: Runtime, now: Parameters) -> bool:
    def places(owners: Sequence[tuple[nn.Module, str]]) -> set[tuple[int, str]]:
        return {(id(module), name) for module, name in owners}

    before = {
        id(stand_in): places(owners)
        for group in runtime.groups
        for stand_in, owners in zip(group.stand_ins, group.owners, strict=True)
    }
    found = {id(entry.parameter): places(entry.owners) for entry in now}
    return before != found or any(group.unfrozen for group in runtime.groups)


def _refuse_now(runtime: Runtime, updates: Updates, iteration: Iteration) -> None:
    if runtime.lockstep is not None:
        raise ConfigError(
            f"{runtime.lockstep.collectives.ranks.size} ranks share this model, and a changed model is adopted by one "
            f"rank only. {_WAY_OUT}"
        )
    if runtime.placement.is_durable:
        raise ConfigError(
            "with durability='step' the swap files are laid out for the model as it was, and a step that is resumed "
            f"would be of another model. {_WAY_OUT}; with other nvme.paths"
        )
    iteration.refuse_inside("a changed model is adopted")
    waiting = [group.key for group in runtime.sink.pending()]
    if waiting:
        raise IterationError(
            f"a changed model is adopted between two steps, but gradients of {waiting[0]} wait. Call optimizer.step() "
            "or optimizer.zero_grad() first"
        )
    updates.consistency.check()
    updates.settle("adopting a changed model")
    refuse_gathered(runtime)


def _origins(groups: Sequence[FlatGroup], kept: Mapping[int, Kept]) -> dict[tuple[int, int], ParameterRef | None]:
    found: dict[tuple[int, int], ParameterRef | None] = {}
    for group in groups:
        for slot, parameter in enumerate(sources_of(group)):
            known = kept.get(id(parameter))
            found[group.index, slot] = None if known is None else known.parameter.ref  # type: ignore[attr-defined]
            if known is None and parameter.is_meta:
                raise UnsupportedModelError(
                    f"new parameter {group.layout.slots[slot].name!r} is on the meta device; give it values first"
                )
    return found


# Moving the bytes ------------------------------------------------------------------------------------------------


def _folder(runtime: Runtime) -> Path:
    paths = runtime.config.nvme.paths
    return paths[0] if paths else default_directory()


def _refuse_little_space(runtime: Runtime, blueprint: Blueprint) -> None:
    """The old swap files go before the new ones are made, so what they hold counts as free."""
    needed = blueprint.placement.nvme_nbytes
    drives = {os.stat(path).st_dev: path for path in runtime.config.nvme.paths or (default_directory(),)}
    free = sum(shutil.disk_usage(path).free for path in drives.values()) + runtime.placement.nvme_nbytes
    if needed > free:
        raise PlacementError(
            f"the changed model needs {format_nbytes(needed)} ({needed} bytes) of swap files, and the swap directories "
            f"have room for {format_nbytes(free)} ({free} bytes). Free space, or undo the change; nothing has changed"
        )


def _loads(runtime: Runtime, groups: Sequence[FlatGroup], origins: _Origins) -> Iterator[Load]:
    for group in groups:
        for slot, place in enumerate(group.layout.slots):
            before = origins[group.index, slot]
            if before is None:
                continue
            yield Load((before.group.index, before.slot, _PARAM), before.group.shard_dtype, place.numel)
            if group.trainable and _steps_of(runtime, before):
                for field in runtime.kernel.fields:
                    yield Load((before.group.index, before.slot, field.name), field.dtype, field.numel(place.numel))


def _steps_of(runtime: Runtime, ref: ParameterRef) -> int:
    state = runtime.states.get(ref.group.index)
    return 0 if state is None else state.steps[ref.slot]


def _save(runtime: Runtime, carry: Carry) -> None:
    with Tiers(runtime) as tiers:
        for group in runtime.groups:
            for span in tiers.spans(group):
                values = tiers.read(span)
                for slot, first, last, start in span.pieces():
                    if (group.index, slot, _PARAM) in carry:
                        carry.write((group.index, slot, _PARAM), start, values.param[first:last])
                    for field in runtime.kernel.fields:
                        if (group.index, slot, field.name) in carry:
                            mine = values.state[field.name][first // field.block_numel : field.numel(last)]
                            carry.write((group.index, slot, field.name), start // field.block_numel, mine)


def _fill(runtime: Runtime, origins: _Origins, steps: Mapping[int, Sequence[int]], carry: Carry) -> None:
    for group in runtime.groups:
        copy = runtime.copies[group.index]
        if copy.pinned:
            lease = runtime.pool.lease(group.shard_nbytes, group.key)
            copy.begin_read(HostBlock(lease), Ticket.completed(group.key))
            copy.landed()
    with Tiers(runtime) as tiers, torch.no_grad():
        for group in runtime.groups:
            befores = [origins[group.index, slot] for slot in range(len(group.layout.slots))]
            mine = [steps[b.group.index][b.slot] if b is not None and b.group.index in steps else 0 for b in befores]
            mine = mine if group.trainable else [0] * len(mine)
            for span in tiers.spans(group):
                _fill_span(runtime, tiers, span, befores, mine, carry)
            if group.trainable:
                runtime.states[group.index].steps[:] = mine


def _fill_span(
    runtime: Runtime,
    tiers: Tiers,
    span: Span,
    befores: Sequence[ParameterRef | None],
    steps: Sequence[int],
    carry: Carry,
) -> None:
    values = tiers.blank(span)
    fresh = sources_of(span.group)
    for slot, first, last, start in span.pieces():
        before, into = befores[slot], values.param[first:last]
        if before is None:
            into.copy_(fresh[slot].reshape(-1)[start : start + last - first])
        else:
            carry.read((before.group.index, before.slot, _PARAM), start, into)
    has_state = span.record is not None and any(steps[piece.slot] for piece in span.record.chunk.pieces)
    if span.record is not None and has_state:
        span.record.is_initialised = True
        runtime.kernel.begin(values.param, list(values.state.values()))
        for slot, first, last, start in span.pieces():
            before = befores[slot]
            if before is not None and steps[slot]:
                for field in runtime.kernel.fields:
                    mine = values.state[field.name][first // field.block_numel : field.numel(last)]
                    carry.read((before.group.index, before.slot, field.name), start // field.block_numel, mine)
    tiers.write(values, state=has_state)


# Handing over the objects ----------------------------------------------------------------------------------------


def _hand_over(groups: Sequence[FlatGroup], origins: _Origins) -> None:
    for group in groups:
        befores = [origins[group.index, slot] for slot in range(len(group.layout.slots))]
        if (same := _same_before(group, befores)) is not None:
            group.continue_from(same)
        else:
            for slot, before in enumerate(befores):
                if before is None:
                    group.take_over_slot(slot)
                else:
                    group.keep(slot, before)
    for group in groups:
        group.put_stand_ins()


def _same_before(group: FlatGroup, befores: Sequence[ParameterRef | None]) -> FlatGroup | None:
    """The group whose slots are all of this one's, in the same order; its tensors can go on."""
    first = befores[0]
    if first is None or len(first.group.layout.slots) != len(befores) or first.group.trainable != group.trainable:
        return None
    is_same = all(b is not None and b.group is first.group and b.slot == slot for slot, b in enumerate(befores))
    return first.group if is_same else None


def _leave_behind(runtime: Runtime, groups: Sequence[FlatGroup]) -> None:
    """Parameters that the model does not have any more say so to whoever kept them."""
    alive = {id(stand_in) for group in groups for stand_in in group.stand_ins}
    for group in runtime.groups:
        for slot, (real, stand_in) in enumerate(zip(group.parameters, group.stand_ins, strict=True)):
            if id(stand_in) not in alive:
                gone = Removed(group.layout.slots[slot].name)
                for parameter in (real, stand_in):
                    parameter.ref = ParameterRef(group, slot, gone)


class Removed:
    """`released.Access` of a parameter that an adoption found no more in the model."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def is_closed(self) -> bool:
        return False

    def owns_module(self, module: nn.Module) -> bool:
        """It serves none."""
        return False

    def use_released(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._refuse(getattr(func, "__name__", str(func)))

    def gradient_of(self, ref: ParameterRef) -> torch.Tensor | None:
        """It has none any more."""
        return None

    def set_gradient(self, ref: ParameterRef, value: torch.Tensor | None) -> None:
        """Only forgetting is possible."""
        if value is not None:
            self._refuse("setting the gradient")

    def _refuse(self, operation: str) -> NoReturn:
        raise NotGatheredError(
            f"{operation} on parameter {self._name!r}, which had been removed from its model when engine.adopt() was "
            "called: its values were given up then. Clone what is still needed before, inside "
            "`with infinity.gathered(module):`"
        )
