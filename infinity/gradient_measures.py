"""What is measured of the gradients that wait: norms for clipping, and the largest magnitudes, which show overflows.

A gradient is measured while it is in fast memory, if it is known by then that somebody will ask; what was not measured
is measured when somebody does. See "Gradients are measured as they arrive" in docs/design-notes.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from infinity.gradients import GroupGradient, largest_magnitude
from infinity.groups import FlatGroup
from infinity.optim.clip import parameter_norm


class MeasuredGradients(ABC):
    """The gradients that wait for their update, by index of their group. Used by the training thread.

    Attributes:
        wants_norms: norms will be asked for: they are measured when the last contribution has arrived.
        wants_peaks: the same of the largest magnitudes.
        n_passes: times that the gradient of a parameter was read to measure it.
    """

    def __init__(self) -> None:
        self._gradients: dict[int, GroupGradient] = {}
        self.wants_norms = False
        self.wants_peaks = False
        self.n_passes = 0

    @abstractmethod
    def in_memory(self, group: FlatGroup) -> AbstractContextManager[GroupGradient]:
        """The gradient of a group, complete and in host memory for the length of a block, wherever it waits."""

    @abstractmethod
    def _wait_arrived(self, gradient: GroupGradient) -> None:
        """Until every download into the gradient is over. Raises what went wrong with one."""

    def has(self, group: FlatGroup, slot: int) -> bool:
        gradient = self._gradients.get(group.index)
        return gradient is not None and gradient.present[slot]

    def overflowed(self) -> bool:
        """Whether a gradient that waits is infinite or NaN somewhere. From now on that is seen as they arrive."""
        self.wants_peaks = True
        for gradient in self._gradients.values():
            in_memory = gradient.block is not None  # what was added up may be infinite though no part of it is
            known = {s for s, parts in gradient.peaks.items() if len(parts) == 1 or not in_memory}
            missing = [s for s, there in enumerate(gradient.present) if there and s not in known]
            if missing:
                self._look_for_peaks(gradient, missing)
        peaks = [peak for g in self._gradients.values() for parts in g.peaks.values() for peak in parts]
        return any(not bool(torch.isfinite(peak)) for peak in peaks)

    def _look_for_peaks(self, gradient: GroupGradient, slots: Sequence[int]) -> None:
        with self.in_memory(gradient.group):
            gradient.peaks.update({slot: [self._peak(gradient.slot_view(slot))] for slot in slots})

    def norms(self, slots: Iterable[tuple[FlatGroup, int]]) -> list[torch.Tensor]:
        """The 2-norm of every given slot that has a gradient, in the given order."""
        return [self._gradients[group.index].norms[slot] for group, slot in self._measured(slots)]

    def _measured(self, slots: Iterable[tuple[FlatGroup, int]]) -> list[tuple[FlatGroup, int]]:
        """Those of the slots that have a gradient, after it has been measured."""
        wanted = [(group, slot) for group, slot in slots if self.has(group, slot)]
        for group in {group.index: group for group, _ in wanted}.values():
            gradient = self._gradients[group.index]
            if not self._is_measured(gradient):
                self._measure_waiting(gradient)
        return wanted

    def _measure_waiting(self, gradient: GroupGradient) -> None:
        """Measure what waits, wherever that is."""
        with self.in_memory(gradient.group):
            self._measure(gradient)

    def _is_measured(self, gradient: GroupGradient) -> bool:
        return all(slot in gradient.norms for slot, there in enumerate(gradient.present) if there)

    def _measure(self, gradient: GroupGradient) -> None:
        self._wait_arrived(gradient)
        slots: Sequence[bool] = gradient.present
        for slot, there in enumerate(slots):
            if there and slot not in gradient.norms:
                gradient.norms[slot] = self._norm(gradient.slot_view(slot))

    def _norm(self, grad: torch.Tensor) -> torch.Tensor:
        self.n_passes += 1
        return parameter_norm(grad)

    def _peak(self, grad: torch.Tensor) -> torch.Tensor:
        self.n_passes += 1
        return largest_magnitude(grad)
