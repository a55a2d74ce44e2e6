"""Wrap policies: which modules are gathered together, chosen by a function of yours or of another distribution.

A policy gets the model and gives the modules that are to be units; what lies in another one of them is a part of that.
A distribution brings one under a name with an entry point of the group `infinity.wrap_policies`; in its
`pyproject.toml`:

    [project.entry-points."infinity.wrap_policies"]
    mine = "my_package:choose_blocks"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from infinity.config import Config
from infinity.config_values import POLICIES_GROUP
from infinity.errors import ConfigError
from infinity.units import Kept, UnitSpec, WrapPolicy, partition
from storage.errors import PluginError
from storage.plugins import load_plugin


def units_of(model: nn.Module, config: Config, kept: Mapping[int, Kept] | None = None) -> list[UnitSpec]:
    """`infinity.units.partition` with the settings of a config.

    Raises:
        ConfigError: a wrap policy cannot be used.
        UnsupportedModelError: see there.
    """
    policy = None if config.wrap_policy is None else _named(config.wrap_policy)
    return partition(
        model,
        resident_threshold_nbytes=config.resident_threshold,
        unit_classes=config.unit_classes,
        wrap_policy=policy,
        kept=kept,
    )


def _named(policy: str | Callable[..., Any]) -> tuple[str, WrapPolicy]:
    """The policy, and what errors call it."""
    if not isinstance(policy, str):
        return f"wrap_policy {getattr(policy, '__qualname__', repr(policy))}", policy
    try:
        plugin = load_plugin(POLICIES_GROUP, policy)
    except PluginError as error:
        raise ConfigError(f"wrap_policy = {policy!r}: {error}") from error
    name = f"wrap_policy {policy!r} of {plugin.origin}"
    if not callable(plugin.target):
        raise ConfigError(f"{name} is {plugin.target!r}, which cannot be called; it has to take the model")
    return name, plugin.target
