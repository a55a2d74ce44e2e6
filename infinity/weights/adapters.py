"""LoRA adapters of PEFT in a checkpoint: their names in PEFT's own files, and their products added to the base."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import CheckpointError

BASE_PREFIX = "base_model.model."
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
_WRAPPERS = re.compile(r"\.(base_layer|original_module)\.")
_MATRIX_NDIM = 2

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a checkpoint: its name, and PEFT's settings of it."""

    name: str
    settings: Mapping[str, Any]

    @property
    def is_lora(self) -> bool:
        """Whether PEFT's `peft_type` of it is LORA."""
        return str(self.settings.get("peft_type", "")).upper().endswith("LORA")

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


def is_adapted(name: str) -> bool:
    """Whether a name is that of a parameter in a model of PEFT."""
    return name.startswith(BASE_PREFIX)


def adapter_names(adapter: Adapter, names: Shapes) -> dict[str, str]:
    """What PEFT's file of an adapter holds: name there by name in the checkpoint."""
    found = {}
    for name in names:
        lora = re.search(rf"\.({'|'.join(_PARTS)})\.{re.escape(adapter.name)}(\.|$)", name)
        whole = f".modules_to_save.{adapter.name}."
        if lora is not None:
            found[name] = name[: lora.end(1)] + name[lora.end() - len(lora.group(2)) :]
        elif whole in name:
            found[name] = name.replace(whole, ".")
    return found


def base_names(adapter: Adapter, names: Shapes) -> dict[str, str]:
    """The model with the adapter in it: name as if there were none, by name in the checkpoint."""
    found = {}
    saved = f".modules_to_save.{adapter.name}."
    replaced = {name.replace(saved, ".original_module.") for name in names if saved in name}
    for name in names:
        if re.search(rf"\.({'|'.join(_PARTS)})\.", name) or name in replaced or not is_adapted(name):
            continue
        plain = name.removeprefix(BASE_PREFIX)
        if saved in plain:
            found[name] = plain.replace(saved, ".")
        elif ".modules_to_save." not in plain:
            found[name] = _WRAPPERS.sub(".", plain)
    return found


def factors_of(adapter: Adapter, name: str, names: Shapes) -> Factors | None:
    """What is to be added to a weight of the base; None if nothing is.

    Raises:
        CheckpointError: the adapter is of a kind whose sum is not known here; it names what.
    """
    if not name.endswith((".base_layer.weight", ".base_layer.bias")):
        return None
    layer, _, attribute = name.rpartition(".base_layer.")
    module = layer.removeprefix(BASE_PREFIX)
    linear = f"{layer}.lora_A.{adapter.name}.weight", f"{layer}.lora_B.{adapter.name}.weight"
    embedding = f"{layer}.lora_embedding_A.{adapter.name}", f"{layer}.lora_embedding_B.{adapter.name}"
    is_embedding = embedding[0] in names
    first, second = embedding if is_embedding else linear
    if first not in names:
        return None
    for refused in (f"{layer}.lora_magnitude_vector.{adapter.name}.weight", f"{layer}.lora_B.{adapter.name}.bias"):
        if refused in names:
            raise _unsupported(refused)
    if attribute != "weight":
        return None
    if len(names[name]) != _MATRIX_NDIM:
        raise _unsupported(first)
    is_transposed = is_embedding or bool(adapter.settings.get("fan_in_fan_out"))
    return Factors(first, second, adapter.scaling(module, names[first][0]), is_transposed)


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


def _unsupported(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} belongs to a kind of adapter that cannot be merged here (DoRA, bias or convolution). Export the "
        "adapter, and merge it with PEFT: PeftModel.from_pretrained(...).merge_and_unload()"
    )
