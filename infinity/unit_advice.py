"""What to tell of a model whose units were not found: that most of it is one unit, and which classes may be meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from infinity.blocks import is_composite
from infinity.config import ActivationPolicy, Config
from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.units import UnitSpec

_MOST_CLASSES = 3


def unfound_units(model: nn.Module, specs: Sequence[UnitSpec]) -> str | None:
    """A sentence, if one unit made of several modules of a class holds most of the model's parameters; else None."""
    sizes = [sum(entry.nbytes for entry in spec.own) for spec in specs]
    largest = max(range(len(specs)), key=sizes.__getitem__)
    candidates = _candidates(specs[largest].module)
    if 2 * sizes[largest] <= sum(sizes) or not candidates:
        return None
    where = "stay on the device for good" if specs[largest].resident else "are gathered together"
    return (
        f"{format_nbytes(sizes[largest])} of the {format_nbytes(sum(sizes))} of parameters {where}: no repeated blocks "
        f"were found for them. {_hint(candidates)}"
    )


def refuse_without_units(model: nn.Module, specs: Sequence[UnitSpec], config: Config) -> None:
    """Micro-batches and activation policies are the units' own; without any they would do nothing.

    Raises:
        ConfigError: one of them is set, and the whole model stays on the device.
    """
    policy = config.activations.policy
    if any(not spec.resident for spec in specs):
        return
    if config.micro_batches > 1:
        setting = f"micro_batches = {config.micro_batches}"
    elif policy is not ActivationPolicy.NONE:
        setting = f"activations.policy = {policy.value!r}"
    else:
        return
    raise ConfigError(
        f"{setting} would do nothing: no repeated blocks were found, so the whole model stays on the device and there "
        f"is no unit to do it. {_hint(_candidates(model))}, or leave the setting out"
    )


def _candidates(module: nn.Module) -> list[str]:
    """Names of the classes of which there are most modules made of modules with parameters."""
    counts = Counter(type(part).__name__ for part in module.modules() if part is not module and is_composite(part))
    return [f"{name} ({count} times)" for name, count in counts.most_common(_MOST_CLASSES) if count > 1]


def _hint(candidates: Sequence[str]) -> str:
    if not candidates:
        return "Say which modules are gathered together: unit_classes=[...], or a smaller resident_threshold"
    name = candidates[0].partition(" ")[0]
    return f"Say which are: unit_classes=[{name!r}], say; seen most often: {', '.join(candidates)}"
