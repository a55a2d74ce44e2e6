"""LoRA adapters of PEFT in a checkpoint: their names in PEFT's own files, and their products added to the base."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import CheckpointError

BASE_PREFIX = "base_model.model."
# What belongs to an adapter: `lora_A` and all that variants of LoRA add, and rows of an embedding that train alone.
_PART = r"(lora_\w+|trainable_tokens_delta)"
_IS_PART = re.compile(rf"\.{_PART}\.")
_WRAPPERS = re.compile(r"\.(base_layer|original_module)\.")
_MATRIX_NDIM = 2
# Settings of variants whose weights are no sum of the base and one product, though their names do not show it.
_NO_SUM = ("alora_invocation_tokens", "use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config")
_SEVERAL_USES = "layer_replication"  # layers of one base weight, each with an adapter of its own

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a checkpoint: its name, and PEFT's settings of it."""

    name: str
    settings: Mapping[str, Any]

    @property
    def is_lora(self) -> bool:
        """Whether PEFT's `peft_type` of it is LORA; those of its relatives, such as ADALORA, have other formulas."""
        return str(self.settings.get("peft_type", "")).upper().rpartition(".")[2] == "LORA"

    def scaling(self, module: str, rank: int) -> float:
        """By what the product of the two factors is multiplied."""
        alpha = self.settings.get("lora_alpha", 1)
        for pattern, value in (self.settings.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one adapted weight, by their names in the checkpoint.

    `is_transposed`: the weight is stored as (inputs, outputs), or is an embedding.
    """

    first: str
    second: str
    scaling: float
    is_transposed: bool


def has_adapter(names: Iterable[str]) -> bool:
    """Whether these are names of parameters in a model of PEFT; a wrapper of somebody else's may begin alike."""
    return any(name.startswith(BASE_PREFIX) and _IS_PART.search(name) for name in names)


def adapter_names(adapter: Adapter, names: Iterable[str]) -> dict[str, str]:
    """What PEFT's file of an adapter holds: name there by name in the checkpoint."""
    found = {}
    saved = f".modules_to_save.{adapter.name}."
    for name in names:
        part = _part_of(adapter, name)
        if part is not None:
            new = name[: part.end(1)] + name[part.end() - len(part.group(2)) :]
            found[name] = new.removesuffix(".weight") if part.group(1) == "lora_magnitude_vector" else new
        elif saved in name:
            found[name] = name.replace(saved, ".")
        elif _trains_bias(adapter, name):
            found[name] = name
    return found


def _part_of(adapter: Adapter, name: str) -> re.Match[str] | None:
    return re.search(rf"\.{_PART}\.{re.escape(adapter.name)}(\.|$)", name)


def _trains_bias(adapter: Adapter, name: str) -> bool:
    """Whether a name is that of a bias of the base which trains with the adapter, as its setting `bias` says."""
    which = adapter.settings.get("bias", "none")
    if which == "none" or not name.endswith(".bias") or _IS_PART.search(name) or ".modules_to_save." in name:
        return False
    return which == "all" or name.endswith(".base_layer.bias")


def base_names(adapter: Adapter, names: Iterable[str]) -> dict[str, str]:
    """The model with the adapter in it: name as if there were none, by name in the checkpoint."""
    found = {}
    names = list(names)
    saved = f".modules_to_save.{adapter.name}."
    replaced = {name.replace(saved, ".original_module.") for name in names if saved in name}
    for name in names:
        if _IS_PART.search(name) or name in replaced or not name.startswith(BASE_PREFIX):
            continue
        plain = name.removeprefix(BASE_PREFIX)
        if saved in plain:
            found[name] = plain.replace(saved, ".")
        elif ".modules_to_save." not in plain:
            found[name] = _WRAPPERS.sub(".", plain)
    return found


def factors_by_weight(adapter: Adapter, names: Shapes) -> dict[str, Factors]:
    """What is to be added to weights of the base, by their names in the checkpoint.

    Raises:
        CheckpointError: the adapter is of a kind whose sum is not known here, or has a part that belongs to none; it
            names what.
    """
    for setting in (*_NO_SUM, _SEVERAL_USES):
        if adapter.settings.get(setting):
            raise _unsupported(f"the adapter {adapter.name!r}, with {setting},")
    found = {name: factors for name in names if (factors := _factors_of(adapter, name, names)) is not None}
    used = {name for factors in found.values() for name in (factors.first, factors.second)}
    unused = next((name for name in names if name not in used and _part_of(adapter, name)), None)
    if unused is not None:
        raise _unsupported(repr(unused))
    return found


def _factors_of(adapter: Adapter, name: str, names: Shapes) -> Factors | None:
    if not name.endswith(".base_layer.weight") or len(names[name]) != _MATRIX_NDIM:
        return None
    layer = name.removesuffix(".base_layer.weight")
    linear = f"{layer}.lora_A.{adapter.name}.weight", f"{layer}.lora_B.{adapter.name}.weight"
    embedding = f"{layer}.lora_embedding_A.{adapter.name}", f"{layer}.lora_embedding_B.{adapter.name}"
    is_embedding = embedding[0] in names
    first, second = embedding if is_embedding else linear
    if first not in names or second not in names:
        return None
    is_transposed = is_embedding or bool(adapter.settings.get("fan_in_fan_out"))
    scaling = adapter.scaling(layer.removeprefix(BASE_PREFIX), names[first][0])
    return Factors(first, second, scaling, is_transposed)


def product(factors: Factors, first: torch.Tensor, second: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Elements of scaling · second @ first, or of its transpose if the weight is stored so, from `start` on, in fp32.

    Args:
        first, second: the factors, (rank, inputs) and (outputs, rank), in fp32.
    """
    left, right = (first.t(), second.t()) if factors.is_transposed else (second, first)
    width = right.shape[1]
    row, last = start // width, -(-(start + numel) // width)
    rows = (left[row:last] @ right).mul_(factors.scaling).view(-1)
    return rows[start - row * width : start - row * width + numel]


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is or belongs to a kind of adapter that cannot be merged here (DoRA and other variants, biases, "
        "convolutions, single parameters or rows of an embedding). Export the adapter, and merge it with PEFT: "
        "PeftModel.from_pretrained(...).merge_and_unload()"
    )
