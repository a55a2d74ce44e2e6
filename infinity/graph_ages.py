"""Graphs that a backward must not go through: those older than an update of their parameters, and those of backwards.

[Note: stale graphs]
A graph that is older than an update of its parameters would be differentiated with the new values. Plain PyTorch
notices by the version counters of the parameters; here they do not move, so the numbers of updates are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.errors import IterationError, UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.optim.records import GroupState


class GraphAges:
    """Tells whether parameters have been updated since a graph was made. Used by the training thread.

    Args:
        states: by index of a group that trains, how often its parameters have been updated.
    """

    def __init__(self, states: Mapping[int, GroupState]) -> None:
        self._states = states

    def of(self, groups: Sequence[FlatGroup]) -> list[int]:
        """How often each group has been updated until now."""
        return [sum(self._states[group.index].steps) if group.trainable else 0 for group in groups]

    def refuse_stale(self, groups: Sequence[FlatGroup], ages: Sequence[int]) -> None:
        """A backward begins through a graph that was made when its groups were of these ages.

        Raises:
            IterationError: one of them has been updated since.
        """
        for group, before, now in zip(groups, ages, self.of(groups), strict=True):
            if before != now:
                raise IterationError(
                    f"the parameters of {group.key} were updated between this forward and its backward, by "
                    "optimizer.step() or, under schedule='overlapped', by an earlier backward. Run the forward again "
                    "after an update; for several backwards before step() use schedule='synchronous'"
                )


def refuse_create_graph() -> None:
    """A backward begins.

    Raises:
        UnsupportedModelError: it makes a graph of its own, which has no hooks: differentiating it would read parameters
            that have been released.
    """
    if torch.is_grad_enabled():
        raise UnsupportedModelError(
            "a backward with create_graph=True (double backward, gradient penalties) through an offloaded module is "
            "not supported: the parameters it needs again would be gone by then"
        )
