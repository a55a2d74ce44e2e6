"""What the command line saves beside the engine's state, and reads back to go on where a run stopped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from infinity.cli.settings import Training
from infinity.engine import Engine
from infinity.errors import CheckpointError
from infinity.optim.adamw import AdamW

_COMPARED = ("batch", "accumulate", "seed", "data", "clip", "lr")


def save(engine: Engine, folder: Path, optimizer: AdamW, training: Training, next_step: int) -> None:
    """Save parameters, optimizer state and where the run stands."""
    extra = {"next_step": next_step, "training": asdict(training)}
    engine.save(folder, optimizer=optimizer, extra=extra)


def load(engine: Engine, folder: Path, optimizer: AdamW, training: Training) -> tuple[int, list[str]]:
    """Load a checkpoint of `save`. The settings of this run, such as its learning rate, stay.

    Returns:
        The number of the next step, and what of the training is different from the saved run's, in words.
    """
    extra = engine.load(folder)
    try:
        next_step = int(extra["next_step"])
        saved = dict(extra["training"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} was not saved by `infinity train`: it does not say which step comes next ({error!r})"
        ) from error
    now = asdict(training)
    changed = [
        f"{name}: saved with {saved.get(name)!r}, now {now[name]!r}"
        for name in _COMPARED
        if _plain(saved.get(name)) != _plain(now[name])
    ]
    return next_step, changed


def _plain(value: object) -> object:
    """Sequences as JSON gives them back."""
    return list(value) if isinstance(value, tuple) else value
