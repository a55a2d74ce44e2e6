"""How transformers and PEFT name weights in files, where that is not how the modules are named.

Nothing here imports them unless the model is one of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_PEFT_PREFIX = "base_model.model."
_WRAPPED = "base_layer"  # what every layer with an adapter calls the one that it wraps
_WRAPPERS = re.compile(rf"(\.({_WRAPPED}|original_module|token_adapter|modules_to_save\.[^.]+))+\.")
_MOVED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True, slots=True)
class Renamed:
    """A name as the model has it. `operations` and `pattern` say how it is put together with others, if it is."""

    name: str
    pattern: str | None = None
    patterns: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()


def pretrained_of(model: nn.Module) -> Any | None:
    """The model of transformers that `model` is, or that it wraps as PEFT does; None if there is none."""
    base = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    return base if hasattr(type(base), "base_model_prefix") and hasattr(type(base), "_init_weights") else None


def is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


def is_of_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter of a PEFT model is none of the model that it adapts."""
    return is_peft(model) and file_name_of(model, name) == name


def file_name_of(model: nn.Module, name: str) -> str:
    """The name without an adapter for a parameter of a PEFT model's base; else the name itself."""
    if not is_peft(model) or not name.startswith(_PEFT_PREFIX) or _is_beside_wrapped(model, name):
        return name
    return _WRAPPERS.sub(".", name.removeprefix(_PEFT_PREFIX))


def _is_beside_wrapped(model: nn.Module, name: str) -> bool:
    """Whether something of a layer with an adapter has this name, and nothing of the layer that it wraps."""
    module: nn.Module | None = model
    for part in name.split("."):
        if module is None:
            return False
        if _WRAPPED in module._modules and part != _WRAPPED:
            return True
        module = module._modules.get(part)
    return False


def ignored(model: nn.Module, kind: str) -> Callable[[str], bool]:
    """Which names transformers does not report; `kind` is "missing" or "unexpected"."""
    pretrained = pretrained_of(model)
    patterns = list(getattr(pretrained, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if pretrained is not None and kind == "unexpected":
        patterns += _MOVED_BUFFERS
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


class Renamer:
    """Gives the names of a file the names that the model of transformers has, as its `from_pretrained` does."""

    def __init__(self, pretrained: Any, known: Container[str]) -> None:
        self._known = known
        self._prefix = str(pretrained.base_model_prefix)
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        try:  # transformers before version 5 has neither
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter
        except ImportError:
            return
        for transform in get_model_conversion_mapping(pretrained):
            chosen = self._converters if isinstance(transform, WeightConverter) else self._renamings
            chosen.append(transform)

    def candidates(self, name: str) -> Iterable[Renamed]:
        """What the name may stand for, likeliest first."""
        renamed = name
        for renaming in self._renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for converter in self._converters:
            converted, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                operations = tuple(repr(operation) for operation in converter.operations)
                patterns = tuple(converter.source_patterns)
                for candidate in self._with_prefix(converted):
                    yield Renamed(candidate, pattern, patterns, operations)
                break
        for base in dict.fromkeys((renamed, name)):
            for candidate in self._with_prefix(base):
                yield Renamed(candidate)

    def _with_prefix(self, name: str) -> Iterable[str]:
        yield name
        if self._prefix:
            if name.startswith(f"{self._prefix}."):
                yield name.removeprefix(f"{self._prefix}.")
            yield f"{self._prefix}.{name}"
