"""Named sizes of the transformer, from one that a test trains in seconds up to 7 billion parameters.

Every preset carries budgets that are far smaller than its state, so that training it exercises all tiers. This module
imports no torch: the command line shows the names in its help.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PRESET = "small"


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and what to train it with. Budgets are texts such as "512MiB"."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    recompute: bool
    device_budget: str
    host_budget: str


PRESETS: dict[str, Preset] = {
    "tiny": Preset(8, 96, 4, 64, 4, 8, 3e-3, False, "2MiB", "3MiB"),
    "small": Preset(16, 512, 8, 128, 4, 30, 3e-4, True, "40MiB", "80MiB"),
    "110m": Preset(16, 768, 12, 256, 4, 20, 2e-4, True, "80MiB", "192MiB"),
    "350m": Preset(28, 1024, 16, 256, 2, 10, 1e-4, True, "160MiB", "512MiB"),
    "1b": Preset(20, 2048, 16, 512, 2, 10, 6e-5, True, "640MiB", "1536MiB"),
    "3b": Preset(38, 2560, 20, 512, 2, 5, 5e-5, True, "1GiB", "3GiB"),
    "7b": Preset(35, 4096, 32, 1024, 1, 5, 3e-5, True, "3GiB", "8GiB"),
}


def describe_presets() -> str:
    """The names with their sizes, for help texts."""
    return ", ".join(f"{name} ({p.layers} x {p.hidden})" for name, p in PRESETS.items())
