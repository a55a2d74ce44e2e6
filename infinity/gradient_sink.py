"""The gradient sink: takes gradients off the device as soon as they are complete, and keeps or spills them.

A gradient crosses the link once and is accumulated in fp32 in host memory. Where it waits for the update is decided by
the placement: in host memory (held, or handed to the update at once), or, when accumulation or clipping needs all
gradients and they do not fit, in the swap file (*spilled*): written after every backward, read back to accumulate.

Used by the training thread only; transfers complete on other threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infinity.away_gradients import SpilledGradient
from infinity.devices.base import Device, Fence
from infinity.errors import UnsupportedModelError
from infinity.gradient_blocks import GradientBlocks
from infinity.gradient_parts import on_both_sides
from infinity.gradient_room import GradientRoom
from infinity.gradient_spill import read_back_early
from infinity.gradient_ways import GradientWay
from infinity.gradients import GRAD_DTYPE, GroupGradient, ReadPart
from infinity.groups import FlatGroup
from infinity.layout import Chunk
from infinity.observe.stalls import StallCause
from infinity.released import OffloadedParameter, fresh_grad, set_fresh_grad
from storage.types import Priority


class GradientSink(GradientRoom):
    """Collects the gradients of one optimizer step.

    Args:
        room: what `GradientRoom` takes.
        blocks: device memory for gradients.
    """

    def __init__(self, *, device: Device, blocks: GradientBlocks, **room: Any) -> None:
        super().__init__(**room)
        self._device = device
        self._blocks = blocks
        self.step = 0
        self._n_backwards = 0  # since the last step
        self._expected_backwards = 1  # before the next step, as before the last one
        self._kept: set[int] = set()  # groups whose gradients waited for a step at the end of the last backward

    # Backward --------------------------------------------------------------------------------------------------

    def expect(self, group: FlatGroup) -> None:
        """A backward of the group begins: reserve device memory for its gradient; read back what was spilled."""
        self.spill_kept()
        self._blocks.reserve(group)
        gradient = self._gradients.get(group.index)
        if gradient is not None:
            read_back_early(gradient, self._transit, self._pool, self.step)

    def harvest(self, group: FlatGroup, *, is_final: bool) -> bool:
        """Move every `.grad` of the group's parameters to the sink. True when there was any.

        Args:
            is_final: nothing more will come of this backward.
        """
        arrived = []
        for number, parameter in enumerate(group.parameters):
            grad = fresh_grad(parameter)
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise UnsupportedModelError(
                    f"parameter {group.layout.slots[number].name!r} has a sparse gradient; build its module with "
                    "sparse=False"
                )
            arrived.append((number, parameter))
        if not arrived:
            return False
        self._take_down(group, arrived, is_final=is_final)
        self._blocks.free_left()
        return True

    def _take_down(
        self, group: FlatGroup, arrived: Sequence[tuple[int, OffloadedParameter]], *, is_final: bool
    ) -> None:
        """Move the gradients of some slots to host memory."""
        is_whole = len(arrived) == len(group.layout.slots)
        if self._way(group, is_whole=is_whole, is_final=is_final) is GradientWay.IN_PARTS:
            self._take_down_in_parts(group, arrived)
            return
        gradient = self._open(group)
        block = self._blocks.take(group)
        fences: list[Fence] = []
        self._blocks.leave(fences, block)  # at once: a download that fails must not keep the block
        for number, parameter in arrived:
            grad = fresh_grad(parameter)
            set_fresh_grad(parameter, None)
            if grad is None:
                continue
            fence = self._device.download(
                block,
                grad.reshape(-1),
                gradient.slot_view(number),
                group.layout.slots[number].name,
                accumulate=gradient.present[number],
                offset_nbytes=group.layout.slots[number].offset * group.compute_dtype.itemsize,
            )
            fences.append(fence)
            gradient.present[number] = True
            gradient.norms.pop(number, None)
            if self.wants_peaks:
                gradient.peaks.setdefault(number, []).append(self._peak(grad))
            elif self.wants_norms and is_final and self._is_last_backward and fence.done and not gradient.fences:
                gradient.norms[number] = self._norm(gradient.slot_view(number))  # while it is in fast memory
        self._watch(gradient, fences)

    def _take_down_in_parts(self, group: FlatGroup, arrived: Sequence[tuple[int, OffloadedParameter]]) -> None:
        gradient = self._gradients[group.index] = GroupGradient(group, self._spill.store)
        grads: dict[int, torch.Tensor] = {}
        for number, parameter in arrived:
            if (grad := fresh_grad(parameter)) is not None:
                grads[number] = grad.detach().reshape(-1)
            set_fresh_grad(parameter, None)
        block = self._blocks.take(group)

        def copy(chunk: Chunk, values: torch.Tensor) -> Iterator[Fence]:
            for piece in chunk.pieces:
                part, on_host, at_nbytes = on_both_sides(group, chunk, piece, grads[piece.slot], values)
                name = group.layout.slots[piece.slot].name
                yield self._device.download(block, part, on_host, name, accumulate=False, offset_nbytes=at_nbytes)

        try:
            self._take_parts(gradient, copy)
        finally:
            self._blocks.leave(list(gradient.fences), block)
        gradient.present[:] = [True] * len(gradient.present)
        self._watch(gradient, [])

    @property
    def _is_last_backward(self) -> bool:
        """Whether the step follows this backward, if it follows as many as the last one did.

        With a loss scale norms wait until it is out of the gradients: squares may overflow or vanish with it.
        """
        return self._n_backwards + 1 >= self._expected_backwards

    def _watch(self, gradient: GroupGradient, fences: Sequence[Fence]) -> None:
        """Keep downloads into a gradient in mind until they are over."""
        gradient.fences += fences
        for fence in [fence for fence in gradient.fences if fence.done]:
            fence.wait()  # raises what went wrong
            gradient.fences.remove(fence)

    def settle(self, group: FlatGroup) -> None:
        """A backward of the group is over: spill its gradient if that is where it is placed.

        One that may wait for the step in transit is spilled when it turns out that no step comes next; see
        last_gradients.py.
        """
        gradient = self._gradients.get(group.index)
        if gradient is None or gradient.block is None:
            return
        if self._spill.is_lasting(group):
            self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
            gradient.is_spilled = False  # what is in the swap file is older
        elif self._spill.is_planned(group):
            self._spill_now(gradient)

    def spill_kept(self) -> None:
        """Another forward or backward begins, whose gradients need the room of those that waited for a step."""
        while self._kept:
            gradient = self._gradients.get(self._kept.pop())
            if gradient is not None and gradient.block is not None:
                self._spill_now(gradient)

    def _spill_now(self, gradient: GroupGradient) -> None:
        self._wait_arrived(gradient)
        self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
        if self.wants_norms:
            self._measure(gradient)
        for slot, parts in gradient.peaks.items():
            if len(parts) > 1:
                gradient.peaks[slot] = [self._peak(gradient.slot_view(slot))]
        self._spill.write(gradient, self.step)

    def is_complete(self, group: FlatGroup) -> bool:
        """Whether a gradient that is final on this rank is so on all of them."""
        return True

    def end_backward(self) -> None:
        """No backward is running any more: reserved device memory that no gradient came for goes back."""
        self._blocks.cancel_all()
        self._n_backwards += 1
        self._kept = {index for index, each in self._gradients.items() if self._spill.is_lasting(each.group)}

    # Step ------------------------------------------------------------------------------------------------------

    def pending(self) -> list[FlatGroup]:
        """Groups that have a gradient, in the order of their index."""
        return [self._gradients[index].group for index in sorted(self._gradients)]

    def view(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """The gradient of one parameter as it waits in host memory (fp32, changes count); None when there is none."""
        if not self.has(group, slot):
            return None
        gradient, place = self._gradients[group.index], group.layout.slots[slot]
        if gradient.block is None:
            return SpilledGradient(place.name, place.shape, GRAD_DTYPE)
        self._wait_arrived(gradient)
        self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
        gradient.norms.pop(slot, None)  # whoever sees it may change it
        gradient.peaks.pop(slot, None)
        return gradient.slot_view(slot).view(place.shape)

    def put(self, group: FlatGroup, slot: int, read: ReadPart) -> None:
        """Make what `read` gives the gradient of one parameter."""
        gradient = self._open(group)
        read(0, gradient.slot_view(slot))
        gradient.peaks[slot] = [self._peak(gradient.slot_view(slot))]
        gradient.present[slot] = True
        gradient.norms.pop(slot, None)
        self.settle(group)

    def drop(self, group: FlatGroup, slot: int) -> None:
        """Forget the gradient of one parameter. Idempotent."""
        gradient = self._gradients.get(group.index)
        if gradient is not None:
            self._wait_arrived(gradient)  # what comes next overwrites, and must not meet a copy under way
            gradient.present[slot] = False
            gradient.norms.pop(slot, None)
            gradient.peaks.pop(slot, None)
            if not any(gradient.present) and gradient.arrival.done:
                gradient.release()
                del self._gradients[group.index]

    def multiply(self, group: FlatGroup, slot: int, factor: torch.Tensor) -> bool:
        """Multiply a gradient by a power of two in place. False, and nothing happens, when it is in the swap file."""
        gradient = self._gradients[group.index]
        if gradient.block is None:
            return False
        self._wait_arrived(gradient)
        self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
        gradient.slot_view(slot).mul_(factor)
        if slot in gradient.norms:
            gradient.norms[slot] = gradient.norms[slot] * factor
        return True

    def take(self, group: FlatGroup) -> GroupGradient:
        """Hand the gradient over to an update, which releases it."""
        self._expected_backwards, self._n_backwards = self._n_backwards or self._expected_backwards, 0
        return self._gradients.pop(group.index)

    def check_writes(self) -> None:
        """Wait for spilled gradients to land, and raise what went wrong."""
        self._spill.check()

    @contextmanager
    def in_memory(self, group: FlatGroup) -> Iterator[GroupGradient]:
        """See `MeasuredGradients.in_memory`; what waits in the swap file is read back for the block."""
        gradient = self._gradients[group.index]
        is_away = gradient.is_spilled and gradient.block is None
        if is_away:
            self._read_back(gradient)
        try:
            self._wait_arrived(gradient)
            self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
            yield gradient
        finally:
            if is_away:
                gradient.release()

    def discard(self) -> None:
        """Forget every gradient (zero_grad, or the iteration was reset), and what went wrong with it."""
        for gradient in self._gradients.values():
            for fence in gradient.fences:
                self._stalls.settle_fence(fence, gradient.group.key)
            if gradient.block is not None:
                self._stalls.settle(gradient.arrival, StallCause.GRADIENT_READ)
            gradient.release()
        self._gradients.clear()
        self._spill.settle()
        self._blocks.cancel_all()
        self._n_backwards = 0

    def close(self) -> None:
        """Give everything back without waiting: no transfer is in flight any more."""
        for gradient in self._gradients.values():
            gradient.release()
        self._gradients.clear()
        self._blocks.close()

    # Parts -----------------------------------------------------------------------------------------------------

    def _open(self, group: FlatGroup) -> GroupGradient:
        """The group's gradient with its host memory, waiting for space or for what was spilled."""
        gradient = self._gradients.get(group.index)
        if gradient is None:
            gradient = self._gradients[group.index] = GroupGradient(group, self._spill.store)
        if gradient.block is None:
            if gradient.is_spilled:
                self._read_back(gradient)
                gradient.is_spilled = self._spill.is_planned(group)  # others come back for good
            else:
                self._take_memory(gradient)
        self._stalls.wait(gradient.arrival, StallCause.GRADIENT_READ)
        return gradient

    def _read_back(self, gradient: GroupGradient) -> None:
        self._take_memory(gradient)
        self._stalls.wait(gradient.submit_read_back(self.step, Priority.DEMAND), StallCause.GRADIENT_READ)

    def _wait_arrived(self, gradient: GroupGradient) -> None:
        """See `MeasuredGradients`."""
        for fence in gradient.fences:
            self._stalls.wait_fence(fence, f"gradient of {gradient.group.key}")
        gradient.fences = []
