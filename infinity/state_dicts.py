"""State dicts with real tensors, as `torch.distributed.checkpoint.state_dict` gives them for plain modules.

    model_state, optimizer_state = get_state_dict(engine, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id="folder")

Everything is keyed by parameter name, in fp32 on the CPU, and all of it is in memory: for what fits there, and for
moving to and from other tools. `engine.save` and `engine.load` stream instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.optim.base import OffloadedOptimizer
from infinity.released import ref_of


def get_model_state_dict(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all parameters (what trains as its fp32 master) and persistent buffers, named as by the model.

    Raises:
        CheckpointError: several ranks share the model.
        IterationError: an update was lost, or the running step has been applied in part.
    """
    return engine.read_model_state()


def get_optimizer_state_dict(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of numbers: `state[name]` and `param_groups[k]["params"]`."""
    numbered = optimizer.state_dict()
    names = _names(optimizer)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]]
    return {"state": {names[number]: state for number, state in numbered["state"].items()}, "param_groups": groups}


def get_state_dict(engine: Engine, optimizer: OffloadedOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Those of the model and of the optimizer."""
    return get_model_state_dict(engine), get_optimizer_state_dict(optimizer)


def set_model_state_dict(engine: Engine, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Replace all parameters and persistent buffers; the optimizer's state stays.

    Raises:
        ConfigError: names or shapes are not those of the model; nothing has changed.
        CheckpointError: several ranks share the model, or parameters are in use.
    """
    engine.write_model_state(state_dict)


def set_optimizer_state_dict(optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what `get_optimizer_state_dict` gave, this one or torch's.

    Raises:
        ConfigError: it is of other parameters, groups, or of another optimizer; nothing has changed.
    """
    numbers = {name: number for number, name in _names(optimizer).items()}
    try:
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        state = {numbers[name]: entry for name, entry in state_dict["state"].items()}
    except KeyError as error:
        raise ConfigError(f"the optimizer holds no parameter {error}; give the state of the same model") from error
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def set_state_dict(
    engine: Engine,
    optimizer: OffloadedOptimizer,
    *,
    model_state_dict: Mapping[str, torch.Tensor],
    optim_state_dict: Mapping[str, Any],
) -> None:
    """Both; see there."""
    set_model_state_dict(engine, model_state_dict)
    set_optimizer_state_dict(optimizer, optim_state_dict)


def _names(optimizer: OffloadedOptimizer) -> dict[int, str]:
    """The names of an optimizer's parameters, by the numbers that torch gives them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    refs = [ref_of(parameter) for parameter in parameters]
    return {number: ref.name for number, ref in enumerate(refs) if ref is not None}
