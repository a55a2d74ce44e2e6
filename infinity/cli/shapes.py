"""The transformer that options ask for: a preset, with what was given instead of its sizes."""

from __future__ import annotations

from infinity.errors import ConfigError
from infinity.models.gpt import GptShape
from infinity.models.presets import PRESETS, Preset

_HEAD_CHANNELS = 64


def preset_named(name: str | None) -> Preset:
    """A preset.

    Raises:
        ConfigError: there is none of that name.
    """
    preset = PRESETS.get(name or "")
    if preset is None:
        raise ConfigError(f"--preset {name}: unknown; allowed: {', '.join(PRESETS)}")
    return preset


def shape_of(preset: Preset, *, layers: int | None, hidden: int | None, heads: int | None, seq: int | None) -> GptShape:
    """The preset's shape with other sizes where they were given; heads follow the channels.

    Raises:
        ConfigError: the heads do not divide the channels.
    """
    channels = hidden or preset.hidden
    count = heads or (preset.heads if channels % preset.heads == 0 else _default_heads(channels))
    if channels % count:
        raise ConfigError(f"--hidden {channels} --heads {count}: hidden must be a multiple of heads")
    return GptShape(layers or preset.layers, channels, count, seq or preset.seq)


def _default_heads(channels: int) -> int:
    """Heads of about 64 channels, in a number that divides `channels`."""
    return next(heads for heads in range(max(channels // _HEAD_CHANNELS, 1), 0, -1) if channels % heads == 0)
