"""Which way a gradient goes from the device to its update, as the placement says: one rule for runs and for plans."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.config import Schedule
from infinity.gradients import GroupGradient
from infinity.placement import Placement


class GradientWay(Enum):
    """How a gradient comes to host memory."""

    WHOLE = "whole"
    IN_PARTS = "in parts"  # used up part by part; see [Note: gradients in parts] in gradient_parts.py
    IN_CHUNKS = "in chunks"  # passes it, to the swap file; see [Note: passing gradients] in chunked_sink.py


@dataclass(frozen=True, slots=True)
class GradientWays:
    """Of the gradients of a run.

    Attributes:
        spilled: indices of the groups whose gradients wait in the swap file whenever they are not used.
        lasting: of those, the ones that stay in host memory from the last backward to the update.
        chunked: indices of the groups that are never in host memory whole.
        part_numel: elements of an optimizer chunk, where updates begin as soon as their gradients are complete.
    """

    spilled: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
    chunked: frozenset[int] = frozenset()
    part_numel: int | None = None

    @classmethod
    def under(cls, placement: Placement) -> GradientWays:
        """Those of a placement."""
        return cls(
            placement.spilled_gradients,
            placement.lasting_gradients,
            placement.chunked,
            placement.chunk_numel if placement.schedule is Schedule.OVERLAPPED else None,
        )

    def of(
        self, index: int, gradient: GroupGradient | None, *, is_whole: bool, is_final: bool, is_measured: bool
    ) -> GradientWay:
        """The way of what arrives of a group's gradient now.

        Args:
            gradient: what is there of it already.
            is_whole: all of it arrives at once.
            is_final: nothing more will come of this backward.
            is_measured: it is to be looked at in host memory, for norms or for overflows.
        """
        if index in self.chunked:
            return GradientWay.IN_CHUNKS
        is_new = gradient is None or (gradient.block is None and not gradient.is_spilled)
        if is_measured or not (is_new and is_whole):
            return GradientWay.WHOLE
        if index in self.spilled:
            return GradientWay.WHOLE if index in self.lasting else GradientWay.IN_CHUNKS
        return GradientWay.IN_PARTS if is_final and self.part_numel is not None else GradientWay.WHOLE
