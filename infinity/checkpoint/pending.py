"""Gradients that no step has used: a checkpoint between `backward()` and `step()` holds them too.

They are written while the caller waits, because the next backward adds to them where they are; that they are on the
drive is waited for with the rest of the checkpoint. Their memory is that of the sink; none of them is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from infinity.checkpoint.format import GRADIENT, ParameterEntry, Piece, gradients_file
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.tensor_file import bytes_of
from infinity.chunked_sink import PassingGradientSink
from infinity.gradients import GRAD_DTYPE, GroupGradient
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.runtime import Runtime
from infinity.updates import Updates


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """Gradients that have been written.

    Attributes:
        pieces: by parameter; empty for one of which another rank has all elements.
        writer: of the file, which is not finished; None if there were no gradients.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    writer: PartFileWriter | None = None

    def added_to(self, parameters: Mapping[str, ParameterEntry]) -> dict[str, ParameterEntry]:
        """What the index says about parameters, with their gradients."""
        entries = dict(parameters)
        for name, pieces in self.pieces.items():
            entries[name] = replace(entries[name], tensors={**entries[name].tensors, GRADIENT: pieces})
        return entries


def save_gradients(runtime: Runtime, folder: Path, rank: int = 0) -> SavedGradients:
    """Write the gradients that wait, this rank's part of them."""
    name = gradients_file(rank)
    waiting = [
        (group, slot, _span(group.layout.slots[slot].offset, group.layout.slots[slot].stop, group.span_of(rank)))
        for group in runtime.sink.pending()
        for slot in range(len(group.layout.slots))
        if runtime.sink.has(group, slot)
    ]
    if not waiting:
        return SavedGradients({})
    parts = {group.layout.slots[slot].name: (GRAD_DTYPE, (span.numel,)) for group, slot, span in waiting}
    writer = PartFileWriter(folder / name, parts)
    for group in {group.index: group for group, _, _ in waiting}.values():
        _write_group(runtime, writer, group, [(slot, span) for owner, slot, span in waiting if owner is group])
    pieces = {}
    for group, slot, span in waiting:
        place = group.layout.slots[slot]
        piece = Piece(span.start - place.offset, span.numel, name, place.name, 0)
        pieces[place.name] = (piece,) if span.numel else ()
    return SavedGradients(pieces, writer)


def _write_group(
    runtime: Runtime, writer: PartFileWriter, group: FlatGroup, slots: Sequence[tuple[int, FlatSpan]]
) -> None:
    sink = runtime.sink
    if isinstance(sink, PassingGradientSink) and sink.is_chunked(group):
        for slot, span in slots:
            with writer.appending(group.layout.slots[slot].name) as append:
                sink.read_span(group, span, lambda values, append=append: append(bytes_of(values)))  # type: ignore[misc]
        return
    with sink.in_memory(group) as gradient:
        for slot, span in slots:
            writer.write(group.layout.slots[slot].name, bytes_of(_values(gradient, span)))


def load_gradients(runtime: Runtime, updates: Updates, checkpoint: CheckpointReader) -> None:
    """Make the gradients of a checkpoint those that wait."""
    for group in runtime.groups:
        for number, slot in enumerate(group.layout.slots):
            if GRADIENT in checkpoint.entry(slot.name).tensors:
                updates.gradients.load_gradient(group, number, partial(checkpoint.read, slot.name, GRADIENT))


def _span(start: int, stop: int, within: FlatSpan) -> FlatSpan:
    first = min(max(start, within.start), within.stop)
    return FlatSpan(first, max(min(stop, within.stop), first))


def _values(gradient: GroupGradient, span: FlatSpan) -> torch.Tensor:
    start = gradient.group.grad_span.start
    return gradient.tensor[span.start - start : span.stop - start]
