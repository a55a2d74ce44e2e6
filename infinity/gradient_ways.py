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
    # It passes host memory, to the swap file: that of the passage if its group is chunked, else the transit. See
    # [Note: passing gradients] in chunked_sink.py.
    IN_CHUNKS = "in chunks"


@dataclass(frozen=True, slots=True)
class GradientWays:
    """Which gradients of a run go which way.

    Attributes:
        spilled: indices of the groups whose gradients wait in the swap file whenever they are not used.
        lasting: of those, the ones that stay in host memory from the last backward to the update.
        chunked: indices of the groups that are never in host memory whole.
        part_numel: elements of a part of a gradient that comes in parts; None where none does, because updates wait for
            the end of backward.
    """

    spilled: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
    chunked: frozenset[int] = frozenset()
    part_numel: int | None = None

    @classmethod
    def under(cls, placement: Placement) -> GradientWays:
        """Those of a placement."""
        return cls(
            spilled=placement.spilled_gradients,
            lasting=placement.lasting_gradients,
            chunked=placement.chunked,
            part_numel=placement.chunk_numel if placement.schedule is Schedule.OVERLAPPED else None,
        )

    def of(
        self, index: int, gradient: GroupGradient | None, *, is_whole: bool, is_final: bool, is_measured: bool
    ) -> GradientWay:
        """The way of what arrives of a group's gradient now.

        Args:
            gradient: what is there of it already.
            is_whole: all of it arrives at once.
            is_final: nothing more will come of this backward. No matter for what passes in chunks.
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
