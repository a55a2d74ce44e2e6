"""The one place where the command line meets the engine's checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from infinity.cli.settings import Training
from infinity.engine import Engine
from infinity.errors import CheckpointError
from infinity.optim.adamw import AdamW


class _Checkpoints(Protocol):
    """What of the engine is used here."""

    def save(self, path: Path, *, optimizer: AdamW, extra: dict[str, Any]) -> object: ...

    def load(self, path: Path, *, optimizer: AdamW) -> dict[str, Any]: ...


def can_checkpoint() -> bool:
    """Whether this version's engine saves and loads."""
    return hasattr(Engine, "save") and hasattr(Engine, "load")


def save(engine: Engine, folder: Path, optimizer: AdamW, training: Training, next_step: int) -> None:
    """Save parameters, optimizer state and where the run stands."""
    extra = {"next_step": next_step, "training": asdict(training)}
    cast(_Checkpoints, engine).save(folder, optimizer=optimizer, extra=extra)


def load(engine: Engine, folder: Path, optimizer: AdamW, training: Training) -> tuple[int, list[str]]:
    """Load a checkpoint of `save`.

    Returns:
        The number of the next step, and what of the training is different from the saved run's, in words.
    """
    extra = cast(_Checkpoints, engine).load(folder, optimizer=optimizer)
    try:
        next_step = int(extra["next_step"])
        saved = dict(extra["training"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} was not saved by `infinity train`: it does not say which step comes next ({error!r})"
        ) from error
    now = asdict(training)
    compared = ("batch", "accumulate", "seed", "data", "clip", "lr")
    changed = [
        f"{name}: saved with {saved.get(name)!r}, now {now[name]!r}"
        for name in compared
        if _plain(saved.get(name)) != _plain(now[name])
    ]
    return next_step, changed


def _plain(value: object) -> object:
    """Sequences as JSON gives them back."""
    return list(value) if isinstance(value, tuple) else value
