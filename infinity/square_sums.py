"""Sums of squares of a flat buffer's parts, with the same bits however the buffer is cut.

The norm of a gradient that ranks share is made of the squares of their parts. They are added in fp64, block by
block: blocks begin at multiples of `BLOCK_NUMEL` elements of the flat buffer, where chunks begin too, so the sums of
the blocks, and their sum, do not depend on whether the gradient is in host memory as a whole or passes it in chunks.
"""

from __future__ import annotations

import torch

from infinity.groups import FlatGroup
from infinity.layout import SHARD_ALIGN_NUMEL, FlatSpan
from storage.align import align_up

BLOCK_NUMEL = SHARD_ALIGN_NUMEL
_BLOCKS_AT_A_TIME = 32  # 1 MiB in fp64, whatever is measured


class SquareSums:
    """Of every slot of a group, the squares of the elements that have been added."""

    def __init__(self, group: FlatGroup) -> None:
        self._layout = group.layout
        self._sums: list[list[tuple[int, torch.Tensor]]] = [[] for _ in group.layout.slots]  # with where they begin

    @torch.no_grad()
    def add(self, span: FlatSpan, values: torch.Tensor) -> None:
        """Take in the elements of a span, which begins at a multiple of `BLOCK_NUMEL`; spans come in any order.

        Args:
            values: 1-D, in host memory.
        """
        for piece in self._layout.pieces_in(span):
            part, first = values[piece.start : piece.stop], span.start + piece.start
            sums, edge = self._sums[piece.slot], align_up(first, BLOCK_NUMEL) - first
            if edge and part.numel():
                sums.append((first, _squares(part[:edge].view(1, -1))))
            for start in range(min(edge, part.numel()), part.numel(), _BLOCKS_AT_A_TIME * BLOCK_NUMEL):
                batch = part[start : start + _BLOCKS_AT_A_TIME * BLOCK_NUMEL]
                whole = batch.numel() - batch.numel() % BLOCK_NUMEL
                if whole:
                    sums.append((first + start, _squares(batch[:whole].view(-1, BLOCK_NUMEL))))
                if whole < batch.numel():
                    sums.append((first + start + whole, _squares(batch[whole:].view(1, -1))))

    def totals(self) -> dict[int, torch.Tensor]:
        """By slot, 0-dim and fp64; zero where nothing was added."""
        nothing = torch.zeros((), dtype=torch.float64)
        ordered = [[part for _, part in sorted(sums, key=lambda sum_: sum_[0])] for sums in self._sums]
        return {slot: torch.cat(sums).sum() if sums else nothing.clone() for slot, sums in enumerate(ordered)}


def _squares(rows: torch.Tensor) -> torch.Tensor:
    """Of every row, the sum of its squares."""
    sums: torch.Tensor = rows.double().square_().sum(1)
    return sums
