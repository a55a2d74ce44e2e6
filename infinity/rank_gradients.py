"""Gradients of several ranks: averaged over all of them, and of which every rank keeps its span.

A gradient is put together in one flat fp32 buffer on the device, averaged as soon as its unit's backward is over, and
only this rank's span goes down to host memory, where it is added to what earlier backwards gave. So accumulating
micro-batches never holds a whole gradient, and `no_sync()` has nothing to leave out.

Averages are linear: a rank that has no gradient of a unit yet adds nothing, and what it finds later is averaged then.
Which parameters have a gradient at all is agreed on in front of every clipping and every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from infinity.away_gradients import ShardedGradient
from infinity.devices.base import DeviceBlock, Fence
from infinity.gradient_sink import GradientSink
from infinity.gradient_ways import GradientWay
from infinity.gradients import GRAD_DTYPE, GroupGradient, ReadPart
from infinity.groups import FlatGroup
from infinity.layout import Chunk
from infinity.lockstep import Lockstep
from infinity.observe.stalls import StallCause
from infinity.released import OffloadedParameter, fresh_grad, set_fresh_grad
from infinity.square_sums import SquareSums


def reduction_nbytes(group: FlatGroup, replicas: int) -> int:
    """Device bytes that averaging a gradient takes beside it: the flat buffers, this rank's span of the sum, spares."""
    whole = group.layout.numel * (1 if group.grad_span == group.state_span else 2)
    return (whole + group.state_span.numel * _spans(replicas)) * GRAD_DTYPE.itemsize


def _spans(replicas: int) -> int:
    return 3 if replicas > 1 else 2


class RankGradientSink(GradientSink):
    """The gradient sink of one rank among several. Parts as in `GradientSink`.

    Args:
        lockstep: brings the ranks together.
    """

    def __init__(self, *, lockstep: Lockstep, **parts: Any) -> None:
        super().__init__(**parts)
        self._lockstep = lockstep
        self._ranks = lockstep.collectives.ranks
        self.discards = 0
        self.agrees_early = False  # whether a gradient may be used as soon as it is complete on every rank
        self._complete: set[int] = set()

    # Backward --------------------------------------------------------------------------------------------------

    def _take_down(
        self, group: FlatGroup, arrived: Sequence[tuple[int, OffloadedParameter]], *, is_final: bool
    ) -> None:
        """Announce a gradient; `join` brings this rank's span of the average to host memory."""
        # What can go wrong goes wrong before others wait for this rank.
        gradient = self._open_arriving(group, in_parts=self._comes_in_parts(group, is_final=is_final))
        block = self._blocks.allocate(group.layout.numel * GRAD_DTYPE.itemsize, f"reduction of {group.key}")
        try:
            with torch.inference_mode(False), torch.no_grad():
                flat = torch.zeros(group.layout.numel, dtype=GRAD_DTYPE, device=self._device.torch_device)
                for number, parameter in arrived:
                    grad, slot = fresh_grad(parameter), group.layout.slots[number]
                    set_fresh_grad(parameter, None)
                    if grad is not None:
                        flat[slot.offset : slot.stop].copy_(grad.reshape(-1))
                        gradient.present[number] = True
            self._blocks.cancel(group)
            self._lockstep.reduce(group, flat, is_final=is_final)
        finally:
            self._device.free(block)

    @torch.no_grad()
    def join(
        self, group: FlatGroup, contributing: Collection[int], flat: torch.Tensor | None, is_complete: bool
    ) -> None:
        """Take part in the averaging of a gradient, in the round in which members announced it.

        Args:
            flat: this rank's contribution, fp32 on the device; None when it has none.
            is_complete: nothing more will come of this backward, from any rank.
        """
        gradient = self._open_arriving(group, in_parts=self._comes_in_parts(group, is_final=is_complete))
        if is_complete and self.agrees_early:
            present = self._lockstep.exchange(torch.tensor(gradient.present, dtype=torch.uint8)).amax(0)
            gradient.present[:] = [bool(there) for there in present]
            self._complete.add(group.index)
        own, keeps_whole = group.state_span, group.grad_span != group.state_span
        collectives = self._lockstep.collectives
        adds_zeros = flat is None and collectives.uses_nccl
        numel = own.numel * _spans(self._ranks.replicas) + group.layout.numel * (keeps_whole + adds_zeros)
        block = self._blocks.allocate(numel * GRAD_DTYPE.itemsize, f"average of {group.key}")
        fences: list[Fence] = []
        gradient.norms.clear()
        try:
            with torch.inference_mode(False):
                buffer = torch.zeros(numel, dtype=GRAD_DTYPE, device=self._device.torch_device)
            total, *spare = buffer[: own.numel * _spans(self._ranks.replicas)].view(-1, own.numel).unbind()
            if adds_zeros:
                flat = buffer[-group.layout.numel :]
            with self._stalls.charged(StallCause.RANKS):
                collectives.reduce(flat, total, spare, group.span_of, contributing)
            offset = 0
            if keeps_whole:
                offset = own.numel * _spans(self._ranks.replicas)
                whole = buffer[offset : offset + group.layout.numel]
                whole[own.start : own.stop] = total
                self._lockstep.gather_now(whole, group.span_of)
                total = whole
            fences += self._keep(gradient, block, total, offset * GRAD_DTYPE.itemsize)
        finally:
            self._blocks.leave([*fences, *gradient.fences], block)
        gradient.is_filled = True
        self._watch(gradient, fences)
        self._blocks.free_left()
        self.settle(group)

    def _comes_in_parts(self, group: FlatGroup, *, is_final: bool) -> bool:
        """Whether an average does, which is always of the whole gradient."""
        return self._way(group, is_whole=True, is_final=is_final) is GradientWay.IN_PARTS

    def _open_arriving(self, group: FlatGroup, *, in_parts: bool) -> GroupGradient:
        """The gradient of which a part of an average comes, with memory for it, unless that comes in parts as well."""
        if in_parts:
            return self._gradients.setdefault(group.index, GroupGradient(group, self._spill.store))
        return self._open(group)

    def _keep(
        self, gradient: GroupGradient, block: DeviceBlock, average: torch.Tensor, offset_nbytes: int
    ) -> list[Fence]:
        """Add this rank's part of an average to what waits. What is to pass before the block can be used again.

        Args:
            average: 1-D, fp32, on the device, at an offset in the block.
        """
        group, is_sum, key = gradient.group, gradient.is_filled, gradient.group.key
        if gradient.block is None:

            def copy(chunk: Chunk, values: torch.Tensor) -> Iterator[Fence]:
                place = group.in_grad(chunk)
                at_nbytes = offset_nbytes + place.start * GRAD_DTYPE.itemsize
                yield self._device.download(
                    block, average[place], values, key, accumulate=False, offset_nbytes=at_nbytes
                )

            self._take_parts(gradient, copy)
            return []
        return [
            self._device.download(block, average, gradient.tensor, key, accumulate=is_sum, offset_nbytes=offset_nbytes)
        ]

    def is_complete(self, group: FlatGroup) -> bool:
        return group.index in self._complete

    # Step ------------------------------------------------------------------------------------------------------

    def take(self, group: FlatGroup) -> GroupGradient:
        self._complete.discard(group.index)
        return super().take(group)

    def agree(self, groups: Iterable[FlatGroup]) -> None:
        """Agree with all ranks which parameters have a gradient: those that have one on any of them.

        In a place where all ranks have met.
        """
        places = [(group, slot) for group in groups for slot in range(len(group.layout.slots))]
        mine = torch.tensor([self.has(group, slot) for group, slot in places], dtype=torch.uint8)
        anywhere = self._lockstep.exchange(mine).amax(0).tolist()
        for (group, slot), there in zip(places, anywhere, strict=True):
            if there and not self.has(group, slot):
                self._open_filled(group).present[slot] = True
                self.settle(group)

    def norms(self, slots: Iterable[tuple[FlatGroup, int]]) -> list[torch.Tensor]:
        """As with one rank; the squares of the ranks' parts are added in fp64, with the same bits on every rank."""
        wanted = self._measured(slots)
        if not wanted:
            return []
        squares = torch.stack([self._gradients[group.index].norms[slot] for group, slot in wanted])
        if wanted[0][0].grad_span == wanted[0][0].state_span:  # in stage 1 every rank has all of it
            row = self._ranks.row
            squares = self._lockstep.exchange(squares)[row.start : row.stop].sum(0)
        return list(squares.sqrt().float())

    def overflowed(self) -> bool:
        """Whether a gradient is infinite or NaN somewhere, on any rank. In a place where all ranks have met."""
        self.wants_norms = True  # from now on it is seen while gradients are in memory
        every = [(g.group, slot) for g in self._gradients.values() for slot in range(len(g.present))]
        # Squares of fp32 numbers do not overflow in fp64, so their sum is finite where all of them are.
        finite = [self._gradients[group.index].norms[slot].isfinite() for group, slot in self._measured(every)]
        return bool(self._lockstep.exchange(torch.tensor([not all(finite)], dtype=torch.uint8)).any())

    def multiply(self, group: FlatGroup, slot: int, factor: torch.Tensor) -> bool:
        is_done = super().multiply(group, slot, factor)
        norms = self._gradients[group.index].norms
        if is_done and slot in norms:
            norms[slot] = norms[slot] * factor  # once more: these are squares
        return is_done

    def _is_measured(self, gradient: GroupGradient) -> bool:
        return len(gradient.norms) == len(gradient.present)

    def _measure(self, gradient: GroupGradient) -> None:
        """The sum of the squares of this rank's part of every slot; which slots count is not known yet."""
        self._wait_arrived(gradient)
        if not self._is_measured(gradient):
            sums = SquareSums(gradient.group)
            sums.add(gradient.group.grad_span, gradient.tensor)
            gradient.norms.update(sums.totals())

    def discard(self) -> None:
        self.discards += bool(self._gradients)
        self._complete.clear()
        super().discard()

    # Looking and changing --------------------------------------------------------------------------------------

    def view(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        if group.grad_span == group.layout.whole or not self.has(group, slot):
            return super().view(group, slot)
        place = group.layout.slots[slot]
        return ShardedGradient(place.name, place.shape, GRAD_DTYPE)

    def put(self, group: FlatGroup, slot: int, read: ReadPart) -> None:
        """The gradient of one parameter, unless another rank has one; all ranks have to do the same."""
        gradient = self._open_filled(group)
        self._write(gradient, slot, read)
        gradient.present[slot] = True
        gradient.norms.pop(slot, None)
        self.settle(group)

    def drop(self, group: FlatGroup, slot: int) -> None:
        if self.has(group, slot):
            gradient = self._open_filled(group)
            self._write(gradient, slot, lambda start, into: into.zero_())  # what comes next is added
            gradient.norms.pop(slot, None)
            self.settle(group)
        super().drop(group, slot)

    def _open_filled(self, group: FlatGroup) -> GroupGradient:
        gradient = self._open(group)
        self._wait_arrived(gradient)
        if not gradient.is_filled:
            self._fill_with_zeros(gradient)
            gradient.is_filled = True
        return gradient

    def _write(self, gradient: GroupGradient, slot: int, read: ReadPart) -> None:
        """Let this rank's part of a slot be what `read` gives."""
        part = gradient.slot_view(slot)
        if part.numel():
            read(gradient.first_in_slot(slot), part)

    def _fill_with_zeros(self, gradient: GroupGradient) -> None:
        gradient.tensor.zero_()
