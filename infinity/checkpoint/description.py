"""What a model of transformers or PEFT says about itself: kept in checkpoints, so that an export is complete.

| file | content |
|---|---|
| `config.json`, `generation_config.json` | as `save_pretrained` writes them |
| `adapter_config.<name>.json` | PEFT's settings of an adapter |
"""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import nn

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
DESCRIPTIONS = (CONFIG_FILE, GENERATION_FILE)


def adapter_file(name: str) -> str:
    return f"adapter_config.{name}.json"


def is_description(name: str) -> bool:
    """Whether a file of a checkpoint is one of these."""
    return name in DESCRIPTIONS or (name.startswith("adapter_config.") and name.endswith(".json"))


def describe_model(model: nn.Module) -> dict[str, bytes]:
    """The files by name; none for other models."""
    files: dict[str, bytes] = {}
    adapters = getattr(model, "peft_config", None)
    base: Any = model
    get_base: Any = getattr(model, "get_base_model", None)
    if isinstance(adapters, dict) and callable(get_base):
        base = get_base()
        files |= {adapter_file(name): _adapter(settings) for name, settings in adapters.items()}
    config = getattr(base, "config", None)
    if hasattr(type(base), "base_model_prefix") and hasattr(config, "to_json_string"):
        described: Any = copy.deepcopy(config)
        described.architectures = [type(base).__name__]
        files[CONFIG_FILE] = described.to_json_string().encode()
        generation = getattr(base, "generation_config", None)
        if generation is not None:
            files[GENERATION_FILE] = generation.to_json_string().encode()
    return files


def _adapter(settings: Any) -> bytes:
    content = settings.to_dict()
    return json.dumps({**content, "inference_mode": True}, indent=2, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
