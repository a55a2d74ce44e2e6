"""The user's optimizer as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from infinity.config import OptimizerKind
from infinity.groups import FlatGroup
from infinity.optim.hyper import Hyper


class OptimizerView(Protocol):
    """What the engine needs to know of the user's optimizer."""

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that `step()` clips to; None where it does not clip."""

    @property
    def kind(self) -> OptimizerKind:
        """Which state it needs."""

    def hyper_of(self, group: FlatGroup, slot: int) -> Hyper | None:
        """Hyperparameters of a slot as they are now; None when the optimizer does not hold it."""

    def slots(self) -> Iterable[tuple[FlatGroup, int]]:
        """Every slot the optimizer holds, in the order of its parameter groups."""

    def adopted(self) -> None:
        """The model has changed and was planned anew: slots are others, and some parameters are gone."""
