"""Gradients of chunked groups: they leave the device chunk by chunk, and wait in the swap file; see passage.py.

The norm has to be that of the whole gradient. The device has room for it, so it is measured there: when it arrives, or,
when several backwards add up, after the sum has been put back over what arrived. A norm that is asked for only later
brings the gradient to the device once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from infinity.chunk_order import spread_over_drives
from infinity.devices.base import Device, DeviceBlock
from infinity.gradient_blocks import GradientBlocks
from infinity.gradient_parts import first_in_slot, on_both_sides
from infinity.gradient_spill import GradientSpill
from infinity.gradients import GRAD_DTYPE, GroupGradient, ReadPart, gradient_key, largest_magnitude
from infinity.host_block import HostBlock
from infinity.layout import Chunk, ChunkPiece, FlatSpan
from infinity.observe.stalls import StallCause, StallClock
from infinity.passage import Passage, release_after
from infinity.square_sums import SquareSums
from storage.types import Priority, Ticket

_Use = Callable[[Chunk, torch.Tensor], None]


class ChunkedGradients:
    """Moves them. Used by the gradient sink, on the training thread.

    Args:
        passage: the host memory they pass.
        spill: watches the writes.
        blocks: device memory to measure them in.
    """

    def __init__(
        self, passage: Passage, spill: GradientSpill, blocks: GradientBlocks, device: Device, stalls: StallClock
    ) -> None:
        self._passage = passage
        self._spill = spill
        self._blocks = blocks
        self._device = device
        self._stalls = stalls

    def add(
        self,
        gradient: GroupGradient,
        block: DeviceBlock,
        arrived: Mapping[int, torch.Tensor],
        step: int,
        *,
        puts_sums_back: bool,
        wants_peaks: bool,
    ) -> dict[int, torch.Tensor]:
        """Take gradients down to the swap file, adding to what waits there.

        Args:
            block: device memory of the group's flat gradient.
            arrived: by slot, the gradient on the device, 1-D.
            puts_sums_back: what is in the swap file afterwards is also to be in `arrived`, which are fp32 then.

        Returns:
            With `wants_peaks`, by slot, the largest magnitude of what is in the swap file afterwards (0-dim, in host
            memory), NaN if there is one.
        """
        group = gradient.group
        peaks: dict[int, torch.Tensor] = {}
        for chunk in spread_over_drives(self._chunks(gradient), self._passage.n_drives):
            pieces = [piece for piece in chunk.pieces if piece.slot in arrived]
            if not pieces:
                continue
            with self._changing(gradient, chunk, step, reads=_is_there(gradient, chunk)) as values:
                for piece in pieces:
                    place = group.layout.slots[piece.slot]
                    part, on_host, offset_nbytes = on_both_sides(group, chunk, piece, arrived[piece.slot], values)
                    is_sum = gradient.present[piece.slot]
                    fence = self._device.download(
                        block, part, on_host, place.name, accumulate=is_sum, offset_nbytes=offset_nbytes
                    )
                    self._stalls.wait_fence(fence, place.name)
                    if is_sum and puts_sums_back:
                        label = f"grad {place.name}"
                        fence = self._device.upload(block, on_host, part, label, offset_nbytes=offset_nbytes)
                        self._stalls.wait_fence(fence, place.name)
                    if wants_peaks:
                        _raise_peak(peaks, piece.slot, on_host)
        return peaks

    def add_span(
        self,
        gradient: GroupGradient,
        block: DeviceBlock,
        average: torch.Tensor,
        step: int,
        *,
        offset_nbytes: int,
        sums: SquareSums | None,
    ) -> None:
        """Take a rank's span of a gradient down to the swap file, adding to what waits there.

        Args:
            average: the span on the device, 1-D and fp32.
            offset_nbytes: of it in the block.
            sums: measures what is in the swap file afterwards.
        """
        group, is_sum = gradient.group, gradient.is_filled
        for chunk in spread_over_drives(self._chunks(gradient), self._passage.n_drives):
            with self._changing(gradient, chunk, step, reads=is_sum) as values:
                place = group.in_grad(chunk)
                at_nbytes = offset_nbytes + place.start * GRAD_DTYPE.itemsize
                fence = self._device.download(
                    block, average[place], values, group.key, accumulate=is_sum, offset_nbytes=at_nbytes
                )
                self._stalls.wait_fence(fence, group.key)
                if sums is not None:
                    sums.add(chunk.span, values)

    def squares(self, gradient: GroupGradient, step: int) -> dict[int, torch.Tensor]:
        """By slot, the sum of the squares of a rank's part of what waits."""
        sums = SquareSums(gradient.group)
        self._read(gradient, self._chunks(gradient), step, lambda chunk, values: sums.add(chunk.span, values))
        return sums.totals()

    def fill_with_zeros(self, gradient: GroupGradient, step: int) -> None:
        """Let all of a gradient be there, and be zero."""
        for chunk in self._chunks(gradient):
            with self._changing(gradient, chunk, step, reads=False) as values:
                values.zero_()

    def read_span(
        self, gradient: GroupGradient, span: FlatSpan, step: int, use: Callable[[torch.Tensor], None]
    ) -> None:
        """Hand the elements of a span of the flat buffer to `use`, a part at a time (1-D, fp32) and in order."""
        overlapping = (c for c in self._chunks(gradient) if max(c.start, span.start) < min(c.stop, span.stop))

        def use_part(chunk: Chunk, values: torch.Tensor) -> None:
            use(values[max(span.start - chunk.start, 0) : span.stop - chunk.start])

        self._read(gradient, overlapping, step, use_part)

    def put(self, gradient: GroupGradient, slot: int, read: ReadPart, step: int) -> torch.Tensor:
        """Make what `read` gives the gradient of one slot; its largest magnitude, NaN if there is one."""
        peaks: dict[int, torch.Tensor] = {slot: torch.zeros(())}
        for chunk in self._chunks(gradient, slot):
            with self._changing(gradient, chunk, step, reads=_is_there(gradient, chunk)) as values:
                for piece in _of_slot(chunk, slot):
                    read(first_in_slot(gradient.group, chunk, piece), values[piece.start : piece.stop])
                    _raise_peak(peaks, slot, values[piece.start : piece.stop])
        return peaks[slot]

    def peak(self, gradient: GroupGradient, slot: int, step: int) -> torch.Tensor:
        """The largest magnitude of the gradient of one slot (0-dim, in host memory), NaN if there is one."""
        peaks: dict[int, torch.Tensor] = {slot: torch.zeros(())}

        def look(chunk: Chunk, values: torch.Tensor) -> None:
            for piece in _of_slot(chunk, slot):
                _raise_peak(peaks, slot, values[piece.start : piece.stop])

        self._read(gradient, self._chunks(gradient, slot), step, look)
        return peaks[slot]

    @contextmanager
    def on_device(self, gradient: GroupGradient, slot: int, step: int) -> Iterator[torch.Tensor]:
        """The whole gradient of one slot on the device for the length of a block, 1-D and fp32.

        Raises:
            DeviceOutOfMemoryError: there is no room for it beside what is gathered.
        """
        place = gradient.group.layout.slots[slot]
        block = self._blocks.allocate(place.numel * GRAD_DTYPE.itemsize, f"whole {gradient_key(gradient.group)}")
        try:
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.empty(place.numel, dtype=GRAD_DTYPE, device=self._device.torch_device)

            def upload(chunk: Chunk, values: torch.Tensor) -> None:
                for piece in _of_slot(chunk, slot):
                    first = first_in_slot(gradient.group, chunk, piece)
                    part = whole[first : first + piece.stop - piece.start]
                    fence = self._device.upload(
                        block,
                        values[piece.start : piece.stop],
                        part,
                        f"grad {place.name}",
                        offset_nbytes=first * GRAD_DTYPE.itemsize,
                    )
                    self._stalls.wait_fence(fence, place.name)

            self._read(gradient, self._chunks(gradient, slot), step, upload)
            yield whole
        finally:
            self._blocks.free(block)

    # Parts -----------------------------------------------------------------------------------------------------

    def _chunks(self, gradient: GroupGradient, slot: int | None = None) -> Iterator[Chunk]:
        """The chunks of a gradient, or those that hold a part of one slot."""
        group = gradient.group
        for chunk in group.layout.cut(self._passage.chunk_numel, group.grad_span):
            if slot is None or any(_of_slot(chunk, slot)):
                yield chunk

    def _read(self, gradient: GroupGradient, chunks: Iterable[Chunk], step: int, use: _Use) -> None:
        def read(chunk: Chunk, memory: memoryview) -> Ticket:
            return gradient.submit_read(chunk, memory, step, Priority.DEMAND)

        self._passage.read_each(chunks, GRAD_DTYPE, read, use, StallCause.GRADIENT_READ)

    @contextmanager
    def _changing(
        self, gradient: GroupGradient, chunk: Chunk, step: int, *, reads: bool
    ) -> Iterator[torch.Tensor]:
        """A chunk in host memory; its write is submitted at the end of the block.

        Args:
            reads: it is read before, for it holds something of a gradient that is there.
        """
        buffer = self._passage.take(chunk.numel * GRAD_DTYPE.itemsize, gradient_key(gradient.group))
        read = Ticket.completed()
        try:
            if reads:
                read = gradient.submit_read(chunk, buffer.memory, step, Priority.DEMAND)
                self._stalls.wait(read, StallCause.GRADIENT_READ)
            yield _values(buffer, chunk)
            self._spill.write_chunk(gradient, chunk, buffer, step)
        except BaseException:
            release_after(buffer, read)
            raise


def _values(buffer: HostBlock, chunk: Chunk) -> torch.Tensor:
    return torch.frombuffer(buffer.memory, dtype=GRAD_DTYPE, count=chunk.numel)


def _is_there(gradient: GroupGradient, chunk: Chunk) -> bool:
    """Whether the swap file holds a part of the gradient, with several ranks all of it, where the chunk lies."""
    return gradient.is_filled or any(gradient.present[piece.slot] for piece in chunk.pieces)


def _of_slot(chunk: Chunk, slot: int) -> Iterator[ChunkPiece]:
    return (piece for piece in chunk.pieces if piece.slot == slot)


def _raise_peak(peaks: dict[int, torch.Tensor], slot: int, values: torch.Tensor) -> None:
    here = largest_magnitude(values)
    peaks[slot] = torch.maximum(peaks[slot], here) if slot in peaks else here
