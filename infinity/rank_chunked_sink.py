"""The gradient sink of one rank among several whose gradients pass host memory in chunks.

The average of a gradient is on the device when it is complete, this rank's span of it. From there it passes host memory
in chunks of this rank's own size: other ranks notice nothing of it, and need not chunk the same groups.
"""

from __future__ import annotations

import torch

from infinity.chunked_sink import PassingGradientSink
from infinity.devices.base import DeviceBlock, Fence
from infinity.gradients import GroupGradient, ReadPart
from infinity.groups import FlatGroup
from infinity.rank_gradients import RankGradientSink
from infinity.square_sums import SquareSums


class ChunkedRankGradientSink(PassingGradientSink, RankGradientSink):
    """Parts as in both."""

    def _open_arriving(self, group: FlatGroup, *, in_parts: bool) -> GroupGradient:
        if self._passing(group) is not None:
            return self._open_passing(group)
        return super()._open_arriving(group, in_parts=in_parts)

    def _keep(
        self, gradient: GroupGradient, block: DeviceBlock, average: torch.Tensor, offset_nbytes: int
    ) -> list[Fence]:
        chunks = self._passing(gradient.group)
        if chunks is None:
            return super()._keep(gradient, block, average, offset_nbytes)
        sums = SquareSums(gradient.group) if self.wants_norms else None
        chunks.add_span(gradient, block, average, self.step, offset_nbytes=offset_nbytes, sums=sums)
        if sums is not None:  # while it is in fast memory; reading it again would cost more
            gradient.norms.update(sums.totals())
        return []

    def _measure_waiting(self, gradient: GroupGradient) -> None:
        if self.is_chunked(gradient.group):
            gradient.norms.update(self._chunks.squares(gradient, self.step))
        else:
            super()._measure_waiting(gradient)

    def _write(self, gradient: GroupGradient, slot: int, read: ReadPart) -> None:
        if self.is_chunked(gradient.group):
            self._chunks.put(gradient, slot, read, self.step)
        else:
            super()._write(gradient, slot, read)

    def _fill_with_zeros(self, gradient: GroupGradient) -> None:
        if self.is_chunked(gradient.group):
            self._chunks.fill_with_zeros(gradient, self.step)
        else:
            super()._fill_with_zeros(gradient)
