"""State dicts with real tensors, as `torch.distributed.checkpoint.state_dict` gives them for plain modules.

    model_state, optimizer_state = get_state_dict(engine, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id="folder")

Everything is keyed by parameter name, in fp32 on the CPU, and all of it is in memory: for what fits there, and for
moving to and from other tools. `engine.save`, `engine.load` and `engine.export` stream instead.

[Note: options]
All ranks of an engine call each function, with the same options. Without options every rank gets, or gives, whole
tensors. Of torch's `StateDictOptions` these count: `full_state_dict` has to be True with several ranks, whose shards
are no DTensors; `cpu_offload` gives the state to the first rank of the engine alone, and `{}` to the others;
`broadcast_from_rank0` takes that of the first rank for all; `ignore_frozen_params`. Tensors are on the CPU always.
Other options may not be set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.optim.base import OffloadedOptimizer
from infinity.released import ref_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Options as they are meant; see [Note: options]."""

    first_only: bool = False
    from_first: bool = False
    trains_only: bool = False

    @classmethod
    def of(cls, options: StateDictOptions | None, engine: Engine) -> _Chosen:
        """Raises ConfigError for what an engine cannot do."""
        if options is None:
            return cls()
        unknown = {"keep_submodule_prefixes": True, "strict": True, "flatten_optimizer_state_dict": False}
        for name, needed in unknown.items():
            if getattr(options, name, needed) != needed:
                raise ConfigError(f"options.{name} is {not needed}; the state dict of an engine needs {needed}")
        if engine.ranks.size > 1 and not options.full_state_dict:
            raise ConfigError(
                "options.full_state_dict is False, which asks for DTensors, but the ranks of an engine hold flat "
                "shards of several parameters. Use StateDictOptions(full_state_dict=True), or engine.save(), which "
                "writes every rank's shards"
            )
        is_full = options.full_state_dict
        return cls(
            first_only=is_full and options.cpu_offload,
            from_first=is_full and options.broadcast_from_rank0,
            trains_only=options.ignore_frozen_params,
        )


def get_model_state_dict(engine: Engine, *, options: StateDictOptions | None = None) -> dict[str, torch.Tensor]:
    """Copies of all parameters (what trains as its fp32 master) and persistent buffers, named as by the model.

    Args:
        options: see [Note: options].

    Raises:
        ConfigError: an option that an engine does not have.
        CheckpointError: it failed on another rank.
        IterationError: an update was lost, or the running step has been applied in part.
    """
    chosen = _Chosen.of(options, engine)
    return engine.read_model_state(first_only=chosen.first_only, trains_only=chosen.trains_only)


def get_optimizer_state_dict(
    optimizer: OffloadedOptimizer, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of numbers: `state[name]` and `param_groups[k]["params"]`.

    Args:
        options: see [Note: options].
    """
    engine = _engine_of(optimizer)
    chosen = _Chosen.of(options, engine)
    numbered = optimizer.state_dict_of_first_rank() if chosen.first_only else optimizer.state_dict()
    if chosen.first_only and engine.ranks.member:
        return {}
    names = _names(optimizer)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]]
    return {"state": {names[number]: state for number, state in numbered["state"].items()}, "param_groups": groups}


def get_state_dict(
    engine: Engine, optimizer: OffloadedOptimizer, *, options: StateDictOptions | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Those of the model and of the optimizer."""
    return get_model_state_dict(engine, options=options), get_optimizer_state_dict(optimizer, options=options)


def set_model_state_dict(
    engine: Engine, state_dict: Mapping[str, torch.Tensor], *, options: StateDictOptions | None = None
) -> None:
    """Replace all parameters and persistent buffers; the optimizer's state stays.

    Args:
        options: see [Note: options].

    Raises:
        ConfigError: names or shapes are not those of the model, or an option that an engine does not have; nothing has
            changed.
        CheckpointError: parameters are in use, or it failed on another rank.
    """
    engine.write_model_state(state_dict, from_first=_Chosen.of(options, engine).from_first)


def set_optimizer_state_dict(
    optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Load what `get_optimizer_state_dict` gave, this one or torch's.

    Args:
        options: see [Note: options].

    Raises:
        ConfigError: it is of other parameters, groups, or of another optimizer; nothing has changed.
    """
    engine = _engine_of(optimizer)
    if _Chosen.of(options, engine).from_first:
        optimizer.load_state_dict_of_first_rank(_numbered(optimizer, state_dict) if engine.ranks.member == 0 else {})
    else:
        optimizer.load_state_dict(_numbered(optimizer, state_dict))


def set_state_dict(
    engine: Engine,
    optimizer: OffloadedOptimizer,
    *,
    model_state_dict: Mapping[str, torch.Tensor],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> None:
    """Both; see there."""
    set_model_state_dict(engine, model_state_dict, options=options)
    set_optimizer_state_dict(optimizer, optim_state_dict, options=options)


def _numbered(optimizer: OffloadedOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict by name as one by number."""
    numbers = {name: number for number, name in _names(optimizer).items()}
    try:
        groups = [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        state = {numbers[name]: entry for name, entry in state_dict["state"].items()}
    except KeyError as error:
        raise ConfigError(f"the optimizer holds no parameter {error}; give the state of the same model") from error
    return {"state": state, "param_groups": groups}


def _engine_of(optimizer: OffloadedOptimizer) -> Engine:
    engine = optimizer.engine
    if engine is None:
        raise ConfigError(
            "the optimizer's parameters are not offloaded; use the functions of torch.distributed.checkpoint.state_dict"
        )
    return engine


def _names(optimizer: OffloadedOptimizer) -> dict[int, str]:
    """The names of an optimizer's parameters, by the numbers that torch gives them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    refs = [ref_of(parameter) for parameter in parameters]
    return {number: ref.name for number, ref in enumerate(refs) if ref is not None}
