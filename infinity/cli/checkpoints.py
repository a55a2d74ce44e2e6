"""What the command line saves beside the engine's state, and reads back to go on where a run stopped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from infinity.cli.settings import RunSettings
from infinity.engine import Engine
from infinity.errors import CheckpointError
from infinity.optim.adamw import AdamW

_COMPARED = ("batch", "accumulate", "micro_batches", "seed", "data", "clip", "lr")


def position(settings: RunSettings, next_step: int, last_step: int) -> dict[str, Any]:
    """Where a run stands: what it needs, beside its engine's state, to go on."""
    config = settings.config
    return {
        "next_step": next_step,
        "last_step": last_step,
        "training": asdict(settings.training),
        "preset": settings.options.preset,
        "budgets": {
            "device": None if config.device.budget is None else str(config.device.budget),
            "host": None if config.host.budget is None else str(config.host.budget),
        },
    }


def save(engine: Engine, folder: Path, optimizer: AdamW, settings: RunSettings, next_step: int) -> None:
    """Save parameters, optimizer state and where the run stands."""
    engine.save(folder, optimizer=optimizer, extra=position(settings, next_step, next_step))


def load(engine: Engine, folder: Path, settings: RunSettings) -> tuple[int, list[str]]:
    """Load a checkpoint of `save`, or go on with a run. The settings of this run, such as its learning rate, stay.

    Returns:
        The number of the next step, and what of the training is different from the saved run's, in words.
    """
    if settings.continues is None:
        extra = engine.load(folder)
    else:
        engine.restore()
        extra = settings.continues.extra
    try:
        next_step = int(extra["next_step"])
        saved = dict(extra["training"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} was not saved by `infinity train`: it does not say which step comes next ({error!r})"
        ) from error
    now = asdict(settings.training)
    changed = [
        f"{name}: saved with {saved.get(name)!r}, now {now[name]!r}"
        for name in _COMPARED
        if _plain(saved.get(name)) != _plain(now[name])
    ]
    return next_step, changed


def _plain(value: object) -> object:
    """Sequences as JSON gives them back."""
    return list(value) if isinstance(value, tuple) else value
