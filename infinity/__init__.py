"""Infinity: train PyTorch models bigger than GPU and CPU memory together.

Parameters, gradients and optimizer state lie in three tiers (device, host memory, NVMe swap files); an async
read-ahead scheduler brings every shard up just before the layer that needs it runs. The training loop stays plain
PyTorch:

    with infinity.empty_init():
        model = MyModel()
    engine = infinity.offload(model, infinity.Config(precision="bf16"))
    optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.config import (
        Config,
        DeviceConfig,
        DeviceKind,
        Durability,
        HostConfig,
        NvmeConfig,
        Precision,
        Schedule,
    )
    from infinity.editing import gathered
    from infinity.empty import empty_init
    from infinity.engine import Engine
    from infinity.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        ConfigError,
        DeviceOutOfMemoryError,
        InfinityError,
        IterationError,
        NotGatheredError,
        PlacementError,
        RankError,
        UnsupportedModelError,
    )
    from infinity.offloading import offload
    from infinity.optim.adamw import Adam, AdamW
    from infinity.optim.base import clip_grad_norm_
    from infinity.optim.lion import Lion
    from infinity.optim.scaler import GradScaler
    from infinity.optim.sgd import SGD

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Config",
    "ConfigError",
    "DeviceConfig",
    "DeviceKind",
    "DeviceOutOfMemoryError",
    "Durability",
    "Engine",
    "GradScaler",
    "HostConfig",
    "InfinityError",
    "IterationError",
    "Lion",
    "NotGatheredError",
    "NvmeConfig",
    "PlacementError",
    "Precision",
    "RankError",
    "Schedule",
    "UnsupportedModelError",
    "clip_grad_norm_",
    "empty_init",
    "gathered",
    "offload",
]

_CONFIG = ("Config", "DeviceConfig", "DeviceKind", "Durability", "HostConfig", "NvmeConfig", "Precision", "Schedule")
_HOMES = {
    "Adam": "infinity.optim.adamw",
    "AdamW": "infinity.optim.adamw",
    "Engine": "infinity.engine",
    "GradScaler": "infinity.optim.scaler",
    "Lion": "infinity.optim.lion",
    "SGD": "infinity.optim.sgd",
    "clip_grad_norm_": "infinity.optim.base",
    "empty_init": "infinity.empty",
    "gathered": "infinity.editing",
    "offload": "infinity.offloading",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that the command line answers without loading torch."""
    if name in ("Adafactor", "Muon"):
        raise AttributeError(
            f"infinity.{name} does not exist: its update needs whole matrices, and state is updated chunk by chunk. "
            "Use infinity.AdamW, Adam, Lion or SGD"
        )
    if name not in __all__:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    home = _HOMES.get(name, "infinity.config" if name in _CONFIG else "infinity.errors")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
