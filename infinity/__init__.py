"""Infinity: train PyTorch models bigger than GPU and CPU memory together.

Parameters, gradients and optimizer state lie in three tiers (device, host memory, NVMe swap files); an async
read-ahead scheduler brings every shard up just before the layer that needs it runs. The training loop stays plain
PyTorch:

    with infinity.empty_init():
        model = MyModel()
    engine = infinity.offload(model, infinity.Config(precision="bf16"))
    optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
"""

from infinity.config import Config, DeviceConfig, DeviceKind, HostConfig, NvmeConfig, Precision, Schedule
from infinity.engine import Engine, offload
from infinity.errors import (
    CheckpointError,
    ConfigError,
    DeviceOutOfMemoryError,
    InfinityError,
    IterationError,
    NotGatheredError,
    PlacementError,
    UnsupportedModelError,
)
from infinity.gathered import gathered
from infinity.init import empty_init
from infinity.optim.adamw import AdamW, clip_grad_norm_

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DeviceConfig",
    "DeviceKind",
    "DeviceOutOfMemoryError",
    "Engine",
    "HostConfig",
    "InfinityError",
    "IterationError",
    "NotGatheredError",
    "NvmeConfig",
    "PlacementError",
    "Precision",
    "Schedule",
    "UnsupportedModelError",
    "clip_grad_norm_",
    "empty_init",
    "gathered",
    "offload",
]
