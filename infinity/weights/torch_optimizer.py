"""A model's and an optimizer's `state_dict()` in files of `torch.save`, and which state belongs to which parameter.

torch numbers the state by the order in which the optimizer was given its parameters, and saves no names unless it was
given them. So the names are, in this order: those that the caller gives; those in `param_names`; those of the model's
`state_dict()` without buffers, if they are as many and of the same shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import listed
from infinity.errors import CheckpointError
from infinity.weights.torch_file import load_torch_file, precision_of, state_dict_of, understanding
from infinity.weights.zero_checkpoint import MOMENTS

_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class SavedState:
    """State of one parameter."""

    step: int
    moments: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TorchRun:
    """What files of `torch.save` hold.

    Attributes:
        parameters, buffers: by name; a tied parameter only under its first name.
        states: by name of the parameter; those never updated are left out.
        groups: per parameter group the names of its parameters, and its settings.
        aliases: other names of tied parameters.
        trained: names of parameters that the optimizer has; without one, of those that could be trained.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    states: Mapping[str, SavedState]
    groups: Sequence[tuple[list[str], dict[str, Any]]]
    aliases: Mapping[str, str]
    trained: frozenset[str]

    @property
    def precision(self) -> str:
        """In which it was trained, told by the parameters."""
        return precision_of(self.parameters[name] for name in self.parameters if name in self.trained)


def read_torch_run(model: Path, optimizer: Path | None, names: Sequence[str] | None) -> TorchRun:
    """Read the files' structure; tensors are memory-mapped.

    Args:
        model: a file with the model's state, alone or under one of the usual keys.
        optimizer: a file with the optimizer's state; None looks for it beside the model's.
        names: the parameters in the order in which the optimizer has them.

    Raises:
        CheckpointError: a file is damaged, the optimizer is no AdamW, or its state cannot be told apart.
    """
    content = load_torch_file(model)
    tensors, aliases = _untied(state_dict_of(model, content))
    saved = _optimizer_of(model, content, optimizer)
    if saved is None:
        buffers = {name: t for name, t in tensors.items() if _is_buffer(name, t)}
        parameters = _without(tensors, buffers)
        trained = frozenset(name for name, t in parameters.items() if t.is_floating_point())
        return TorchRun(parameters, buffers, {}, [], aliases, trained)
    with understanding(optimizer or model, "the state of torch.optim.AdamW"):
        return _with_optimizer(optimizer or model, saved, tensors, aliases, names)


def _with_optimizer(
    where: Path,
    saved: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    names: Sequence[str] | None,
) -> TorchRun:
    groups, states = [dict(group) for group in saved["param_groups"]], dict(saved["state"])
    if names is None and all(group.get("param_names") for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    given = None if names is None else [aliases.get(name, name) for name in names]
    ordered = _names(where, groups, states, tensors, given)
    _check(where, states, ordered, tensors)
    trained = frozenset(ordered.values())
    parameters = {name: t for name, t in tensors.items() if name in trained or not _is_buffer(name, t)}
    return TorchRun(
        parameters,
        _without(tensors, parameters),
        {ordered[number]: _state(where, ordered[number], state) for number, state in states.items() if state},
        [([ordered[number] for number in group["params"]], group) for group in groups],
        aliases,
        trained,
    )


def _untied(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that are the same memory, under the first of their names only."""
    first: dict[tuple[Any, ...], str] = {}
    kept, aliases = {}, {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            kept[name] = tensor
    return kept, aliases


def _without(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in others}


def _is_buffer(name: str, tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or name.rpartition(".")[2] in _BUFFERS


def _optimizer_of(model: Path, content: Any, optimizer: Path | None) -> Mapping[str, Any] | None:
    candidates = [content.get(key) for key in _OPTIMIZER_KEYS] if isinstance(content, Mapping) else []
    if optimizer is not None:
        loaded = load_torch_file(optimizer)
        inner = [loaded.get(key) for key in _OPTIMIZER_KEYS] if isinstance(loaded, Mapping) else []
        candidates = [loaded, *inner]
    for candidate in candidates:
        if isinstance(candidate, Mapping) and {"state", "param_groups"} <= candidate.keys():
            return candidate
    if optimizer is not None:
        raise CheckpointError(f"{optimizer} holds no optimizer's state_dict(): 'state' or 'param_groups' is missing")
    return None


def _names(
    path: Path,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[int, Any],
    tensors: Mapping[str, torch.Tensor],
    given: Sequence[str] | None,
) -> dict[int, str]:
    """The name of every numbered parameter."""
    numbers = [number for group in groups for number in group["params"]]
    if given is not None:
        unknown = [name for name in given if name not in tensors]
        twice = [name for name, count in Counter(given).items() if count > 1]
        if len(given) != len(numbers) or unknown or twice:
            raise CheckpointError(
                f"{path}: the optimizer has {len(numbers)} parameters, named were {len(given)}"
                + (f", of which the model does not have {listed(unknown)}" if unknown else "")
                + (f", and more than once {listed(twice)}" if twice else "")
                + "; name its parameters in the order in which it was given them"
            )
        return dict(zip(numbers, given, strict=True))
    names = [name for name, tensor in tensors.items() if not _is_buffer(name, tensor)]
    fits = len(groups) == 1 and len(names) == len(numbers) and all(
        tuple(state["exp_avg"].shape) == tuple(tensors[name].shape)
        for number, name in zip(numbers, names, strict=True)
        if "exp_avg" in (state := states.get(number) or {})
    )
    if not fits:
        raise CheckpointError(
            f"{path} has state of {len(numbers)} parameters in {len(groups)} groups, without names, and the model has "
            f"{len(names)} tensors that may be parameters; so it cannot be told whose the state is. Give a file with "
            "their names in the optimizer's order, one a line (--names)"
        )
    return dict(zip(numbers, names, strict=True))


def _check(
    path: Path, states: Mapping[int, Any], names: Mapping[int, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    for number, state in states.items():
        name = names.get(number)
        if name is None:
            raise CheckpointError(f"{path} has state of a parameter {number} that is in none of its groups")
        for moment in MOMENTS:
            found = state.get(moment)
            if state and (not isinstance(found, torch.Tensor) or found.shape != tensors[name].shape):
                what = tuple(found.shape) if isinstance(found, torch.Tensor) else "missing"
                raise CheckpointError(
                    f"{path}: {moment} of {name!r} is {what}, and the parameter is {tuple(tensors[name].shape)}; only "
                    "states of AdamW and Adam are taken over, with the names in the optimizer's order"
                )
        if "max_exp_avg_sq" in state:
            raise CheckpointError(f"{path} is of an optimizer with amsgrad=True, which no optimizer of infinity has")


def _state(path: Path, name: str, state: Mapping[str, Any]) -> SavedState:
    if "step" not in state:
        raise CheckpointError(f"{path}: the state of {name!r} has no step; give the state of torch.optim.AdamW")
    return SavedState(int(state["step"]), {moment: state[moment] for moment in MOMENTS})
