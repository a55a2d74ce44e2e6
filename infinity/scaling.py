"""Gradients that carry a loss scale: finding overflows, and taking the scale out.

A gradient in host memory is divided in place. One that was spilled to the swap file keeps its scale until its update,
which multiplies it by the inverse and by the clip coefficient at once; both inverse and scale are powers of two, so the
bits are the same.
"""

from __future__ import annotations

import torch

from infinity.errors import IterationError
from infinity.gradient_sink import GradientSink
from infinity.groups import FlatGroup

_Key = tuple[int, int]  # index of the group, number of the slot


class Scaling:
    """What became of the loss scale in the gradients that wait. Used by the training thread."""

    def __init__(self, sink: GradientSink) -> None:
        self._sink = sink
        self._unscaled: set[_Key] = set()
        self._inverses: dict[_Key, torch.Tensor] = {}  # of those that still carry the scale

    @property
    def has_begun(self) -> bool:
        """Whether the scale has been taken out of a gradient that waits."""
        return bool(self._unscaled)

    def unscale(self, inverse: float) -> bool:
        """Multiply every gradient that waits by `inverse`, a power of two. True when one is infinite or NaN."""
        factor = torch.tensor(inverse, dtype=torch.float32)
        overflowed = self._sink.overflowed()
        for group in self._sink.pending():
            for slot in range(len(group.layout.slots)):
                if self._sink.has(group, slot):
                    key = group.index, slot
                    self._unscaled.add(key)
                    if not self._sink.multiply(group, slot, factor):
                        self._inverses[key] = factor
        return overflowed

    def times(self, group: FlatGroup, slot: int, value: torch.Tensor | None) -> torch.Tensor | None:
        """`value` (None: one) times what a gradient is still to be multiplied by; None when that is one."""
        inverse = self._inverses.get((group.index, slot))
        if inverse is None:
            return value
        return inverse if value is None else value * inverse

    def refuse_more(self, group: FlatGroup, slot: int) -> None:
        """A gradient arrives for a slot.

        Raises:
            IterationError: what waits there carries no scale any more, and what arrives does.
        """
        if (group.index, slot) in self._unscaled:
            raise IterationError(
                f"a second gradient for {group.layout.slots[slot].name!r} arrived after the loss scale had been taken "
                "out of the first; unscale once, after the last backward before step(), and call zero_grad() after it"
            )

    def drop(self, group: FlatGroup, slot: int) -> None:
        """The gradient of a slot is forgotten or replaced. Idempotent."""
        self._unscaled.discard((group.index, slot))
        self._inverses.pop((group.index, slot), None)

    def clear(self) -> None:
        """No gradient waits any more."""
        self._unscaled.clear()
        self._inverses.clear()
