"""Gradient sinks of an engine whose gradients pass host memory in chunks.

[Note: passing gradients]
Those of chunked groups do, which host memory never holds whole (see passage.py), and those that go on to the swap file
at once. A whole one would wait for room for all of it, until the one before it has been written to its last byte: link
and drives would work by turns. Chunks follow each other through the same room, and the write of one goes on beside the
copy of the next. What is added to comes back whole, in one read from all drives; what is to be measured, for a norm or
for overflows, is measured where it lies whole; and what stays in that room until `step()` is whole as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.chunked_gradients import ChunkedGradients
from infinity.gradient_sink import GradientSink
from infinity.gradient_ways import GradientWay
from infinity.gradients import GRAD_DTYPE, GroupGradient, ReadPart, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.passage import Passage
from infinity.released import OffloadedParameter, fresh_grad, set_fresh_grad


class PassingGradientSink(GradientSink):
    """What the gradient sinks of one rank and of several have in common where gradients pass in chunks.

    Other parts as in `GradientSink`, to which all other gradients are left.

    Args:
        passage: the host memory that gradients of chunked groups pass.
        whole_passage: that of the others, over the budget `transit`.
    """

    def __init__(self, *, passage: Passage, whole_passage: Passage, **parts: Any) -> None:
        super().__init__(**parts)
        self._chunks, self._chunks_of_whole = (
            ChunkedGradients(each, self._spill, self._blocks, self._device, self._stalls)
            for each in (passage, whole_passage)
        )
        self._whole_chunk_nbytes = whole_passage.chunk_numel * GRAD_DTYPE.itemsize

    def expect(self, group: FlatGroup) -> None:
        if self.is_chunked(group):
            self.spill_kept()
            self._blocks.reserve(group)
        else:
            super().expect(group)

    def _open(self, group: FlatGroup) -> GroupGradient:
        if not self.is_chunked(group):
            return super()._open(group)
        return self._gradients.setdefault(group.index, GroupGradient(group, self._spill.store))

    def _passing(self, group: FlatGroup, *, is_whole: bool = True) -> ChunkedGradients | None:
        """What brings an arriving gradient down in chunks, final or not; None where it comes otherwise."""
        if self._way(group, is_whole=is_whole, is_final=False) is not GradientWay.IN_CHUNKS:
            return None
        return self._chunks if self.is_chunked(group) else self._chunks_of_whole

    def _open_passing(self, group: FlatGroup) -> GroupGradient:
        """The group's gradient, for which there is memory for a chunk, or will be when a write is over."""
        if not self.is_chunked(group):
            self._spill_open(group, min(gradient_nbytes(group), self._whole_chunk_nbytes))
        return self._gradients.setdefault(group.index, GroupGradient(group, self._spill.store))

    def is_chunked(self, group: FlatGroup) -> bool:
        """Whether the gradient of a group is never in host memory as a whole."""
        return group.index in self._spill.ways.chunked

    def read_span(self, group: FlatGroup, span: FlatSpan, use: Callable[[torch.Tensor], None]) -> None:
        """Hand a span of the gradient of a chunked group to `use`: a part at a time (1-D, fp32), in order."""
        self._chunks.read_span(self._gradients[group.index], span, self.step, use)


class ChunkedGradientSink(PassingGradientSink):
    """The gradient sink of one rank. Its gradients are measured on the device, slot by slot, for exact norms."""

    # Backward --------------------------------------------------------------------------------------------------

    def _take_down(
        self, group: FlatGroup, arrived: Sequence[tuple[int, OffloadedParameter]], *, is_final: bool
    ) -> None:
        is_whole = len(arrived) == len(group.layout.slots)  # a part would be read again for the rest of a chunk
        if (chunks := self._passing(group, is_whole=is_whole)) is None:
            super()._take_down(group, arrived, is_final=is_final)
            return
        gradient = self._open_passing(group)
        grads: dict[int, torch.Tensor] = {}
        for number, parameter in arrived:
            if (grad := fresh_grad(parameter)) is not None:
                grads[number] = grad.detach().reshape(-1)
            set_fresh_grad(parameter, None)
        is_exact = all(grad.dtype is GRAD_DTYPE for grad in grads.values())
        is_measured = self.wants_norms and not self.wants_peaks and is_final and self._is_last_backward and is_exact
        block = self._blocks.take(group)
        try:
            peaks = chunks.add(
                gradient, block, grads, self.step, puts_sums_back=is_measured, wants_peaks=self.wants_peaks
            )
            norms = {slot: self._norm(grad).cpu() for slot, grad in grads.items()} if is_measured else {}
            grads.clear()
        finally:
            self._blocks.free(block)
        self.n_passes += len(peaks)
        for slot, _ in arrived:
            gradient.present[slot] = True
            for known in (gradient.norms, gradient.peaks):
                known.pop(slot, None)
        gradient.norms |= norms
        gradient.peaks |= {slot: [peak] for slot, peak in peaks.items()}

    # Step ------------------------------------------------------------------------------------------------------

    def put(self, group: FlatGroup, slot: int, read: ReadPart) -> None:
        if not self.is_chunked(group):
            super().put(group, slot, read)
            return
        gradient = self._open(group)
        gradient.present[slot] = False  # what it was is not added to
        gradient.norms.pop(slot, None)
        gradient.peaks[slot] = [self._chunks.put(gradient, slot, read, self.step)]
        self.n_passes += 1
        gradient.present[slot] = True

    def _look_for_peaks(self, gradient: GroupGradient, slots: Sequence[int]) -> None:
        if not self.is_chunked(gradient.group):
            super()._look_for_peaks(gradient, slots)
            return
        self.n_passes += len(slots)
        gradient.peaks.update({slot: [self._chunks.peak(gradient, slot, self.step)] for slot in slots})

    def _measure_waiting(self, gradient: GroupGradient) -> None:
        if not self.is_chunked(gradient.group):
            super()._measure_waiting(gradient)
            return
        for slot, there in enumerate(gradient.present):
            if there and slot not in gradient.norms:
                with self._chunks.on_device(gradient, slot, self.step) as whole:
                    gradient.norms[slot] = self._norm(whole).cpu()
