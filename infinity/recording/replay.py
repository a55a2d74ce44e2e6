"""Doing what was recorded, in memory that is given for each storage from its first operation to its last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import UnsupportedModelError
from infinity.recording.lowering import new_results
from infinity.recording.origins import advance
from infinity.recording.plan import Need, Numbers, ReplayPlan, Step
from infinity.recording.tape import Block, Constant, Operation, Region, Reseeded, Tape

TakeMemory = Callable[[Block], torch.Tensor]
"""Gives 1-D memory of bytes for a block, when its first step comes."""
TakeScratch = Callable[[int], AbstractContextManager[torch.Tensor]]
"""Gives that many bytes for one operation."""


def replay(
    plan: ReplayPlan,
    take: TakeMemory,
    scratch: TakeScratch,
    on_step: Callable[[int], None],
) -> None:
    """Do the steps of a plan. The generators end as the constructions would have left them; one that has been used
    since the recording ended keeps its state.

    Args:
        on_step: told the number of every step that is done.

    Raises:
        UnsupportedModelError: a tensor that was an argument has been changed since.
    """
    memory: dict[Block, torch.Tensor] = {}
    closing: dict[int, list[Block]] = {}
    for block, (_, last) in plan.spans.items():
        closing.setdefault(last, []).append(block)
    with ExitStack() as stack, torch.no_grad():
        current: _Generators | None = None
        for number, step in enumerate(plan.steps):
            # Of one tape after another; each one's generators are as its construction found them.
            if current is None or current.tape is not step.tape:
                stack.close()
                current = stack.enter_context(_Generators(step.tape, plan))
            current.before(step)
            if isinstance(step.entry, Reseeded):
                current.set(step.entry)
            elif step.need is Need.VALUES:
                for region in (*step.entry.reads, *step.entry.writes):
                    if region.block not in memory:
                        memory[region.block] = take(region.block)
                _run(step.entry, lambda region: region.of(memory[region.block]))
            else:
                _draw(step.entry, scratch)
            current.drawn(step)
            for block in closing.get(number, ()):
                del memory[block]
            on_step(number)


def _run(operation: Operation, tensor_of: Callable[[Region], torch.Tensor]) -> None:
    def decode(value: Any) -> Any:
        if isinstance(value, Region):
            return tensor_of(value)
        return _value_of(value, operation) if isinstance(value, Constant) else value

    args, kwargs = tree_map(decode, (operation.args, operation.kwargs), is_leaf=_is_recorded)
    result = operation.function(*args, **kwargs)
    if operation.made:
        is_pure = operation.made == operation.writes
        returned = tree_leaves(result) if is_pure else new_results(operation.function, result)
        made = [value for value in returned if isinstance(value, torch.Tensor)]
        for region, value in zip(operation.made, made, strict=True):
            tensor_of(region).copy_(value)


def _draw(operation: Operation, scratch: TakeScratch) -> None:
    with ExitStack() as stack:
        lent = {}
        for region in operation.writes:
            nbytes = region.stop - region.start
            memory = stack.enter_context(scratch(nbytes)) if nbytes else torch.empty(0, dtype=torch.uint8)
            lent[region] = region._replace(offset=0).of(memory)
        _run(operation, lent.__getitem__)


def refuse_changed_constants(plan: ReplayPlan) -> None:
    """Find out before anything is done whether all can be.

    Raises:
        UnsupportedModelError: a tensor that was an argument has been changed since.
    """
    for operation in (step.entry for step in plan.steps if isinstance(step.entry, Operation)):
        for value in tree_leaves((operation.args, operation.kwargs), is_leaf=_is_recorded):
            if isinstance(value, Constant):
                _value_of(value, operation)


def _is_recorded(value: Any) -> bool:
    return isinstance(value, Region | Constant)


def _value_of(constant: Constant, operation: Operation) -> torch.Tensor:
    if constant.is_changed:
        raise UnsupportedModelError(
            f"a tensor of shape {tuple(constant.value.shape)} from which a constructor made values "
            f"({operation.function}) has been changed since, so that the values are lost. Give the constructor a copy, "
            "or build the model outside infinity.empty_init()"
        )
    return constant.value


class _Generators:
    """The generators of one tape while it is replayed."""

    def __init__(self, tape: Tape, plan: ReplayPlan) -> None:
        self.tape = tape
        returns = (step.entry for step in plan.steps if isinstance(step.entry, Reseeded))
        self._kept: dict[int, torch.Tensor | None] = {id(entry.after): None for entry in returns if entry.after}
        self._tapes = {id(step.tape): step.tape for step in plan.steps}
        self._before = [(track, track.generator.get_state()) for track in tape.tracks]
        self._noted: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.Tensor] = {}

    def __enter__(self) -> _Generators:
        for track in self.tape.tracks:
            track.generator.set_state(track.start)
        return self

    def before(self, step: Step) -> None:
        """Note the state from which a drawing will be done once more, or put it back."""
        if step.entry.track is None or step.numbers is Numbers.GO_ON:
            return
        generator = step.entry.track.generator
        if step.numbers is Numbers.NOTED:
            self._noted[id(step.entry)] = generator.get_state()
            return
        if id(step.entry.track) not in self._ends:  # the first one that is done again: all have been done once
            self._ends[id(step.entry.track)] = generator.get_state()
        generator.set_state(self._noted.pop(id(step.entry)))

    def set(self, entry: Reseeded) -> None:
        """As the constructor did it."""
        state = entry.state
        if state is None:
            state = entry.track.start if entry.after is None else self._kept[id(entry.after)]
        if state is not None:  # None where the drawing before it was not needed
            entry.track.generator.set_state(state)

    def drawn(self, step: Step) -> None:
        """Keep the state if it is gone back to."""
        if isinstance(step.entry, Operation) and step.entry.track is not None and id(step.entry) in self._kept:
            self._kept[id(step.entry)] = step.entry.track.generator.get_state()

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        for track, present in self._before:
            end, left = self._ends.get(id(track), track.generator.get_state()), track.left
            if kind is None:
                track.generator.set_state(end)
            if kind is not None or not torch.equal(present, left):
                track.generator.set_state(present)
            if kind is None:
                advance(track, left, end, self._tapes)
