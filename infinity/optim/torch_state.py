"""The state of an optimizer in torch's format, where parameters are numbered through all parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from infinity.checkpoint.moments import SlotState, SlotStates
from infinity.config import OptimizerKind
from infinity.errors import ConfigError
from infinity.layout import FlatLayout
from infinity.optim.kernels import ALGORITHMS


class SlotOwner(Protocol):
    """Whose slots have state: a flat group, or a section of parameters that are not offloaded."""

    @property
    def index(self) -> int: ...

    @property
    def layout(self) -> FlatLayout: ...

    @property
    def trainable(self) -> bool: ...


def torch_state(kind: OptimizerKind, state: SlotState) -> dict[str, torch.Tensor]:
    """What torch's optimizer keeps of a parameter with this state."""
    counts = {"step": torch.tensor(float(state.step))} if ALGORITHMS[kind].counts_steps else {}
    return {**counts, **state.moments}


def states_of(
    state_dict: Mapping[str, Any], slots: Sequence[Sequence[tuple[SlotOwner, int]]], kind: OptimizerKind
) -> SlotStates:
    """What a `state_dict()` says about slots, given as one list per parameter group; the rest is left out.

    Raises:
        ConfigError: it has other parameter groups, is of another optimizer, or of parameters of other shapes.
    """
    try:
        saved_groups, saved_states = list(state_dict["param_groups"]), dict(state_dict["state"])
        numbers = [list(group["params"]) for group in saved_groups]
    except (KeyError, TypeError) as error:
        raise ConfigError("this is not an optimizer's state_dict(): 'state' or 'param_groups' is missing") from error
    if list(map(len, numbers)) != list(map(len, slots)):
        raise ConfigError(
            f"the state has parameter groups of {list(map(len, numbers))} parameters, the optimizer of "
            f"{list(map(len, slots))}; build the optimizer with the same groups"
        )
    if any(group.get("amsgrad") for group in saved_groups):
        raise ConfigError("the state is of an optimizer with amsgrad=True, which no optimizer of infinity has")
    found: SlotStates = {}
    for saved, ours in zip(numbers, slots, strict=True):
        for number, (group, slot) in zip(saved, ours, strict=True):
            if number in saved_states:
                found[group.index, slot] = _slot_state(saved_states[number], group, slot, kind)
    return found


def _slot_state(saved: Mapping[str, Any], group: SlotOwner, number: int, kind: OptimizerKind) -> SlotState:
    slot, algorithm = group.layout.slots[number], ALGORITHMS[kind]
    names = algorithm.rule().moments
    wanted = ("step", *names) if algorithm.counts_steps else names
    missing = [name for name in wanted if saved.get(name) is None]
    if missing:
        raise ConfigError(f"the state of {slot.name!r} has no {missing[0]!r}; give the state of {algorithm.called}")
    if not group.trainable:
        raise ConfigError(f"the state has moments of {slot.name!r}, which is frozen here")
    moments = {}
    for name in names:
        tensor = saved[name]
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != slot.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConfigError(f"{name} of {slot.name!r} is {shape} in the state, but the parameter is {slot.shape}")
        moments[name] = tensor.detach()
    return SlotState(int(saved["step"]) if algorithm.counts_steps else 1, moments)
