"""Sums of squares have the same bits however a flat buffer is cut into chunks and spans."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.chunk_order import spread_over_drives
from infinity.config import Precision
from infinity.devices.cpu import CpuDevice
from infinity.grouping import make_groups
from infinity.groups import FlatGroup
from infinity.layout import FlatSpan
from infinity.optim.kernels import kernel_for
from infinity.square_sums import BLOCK_NUMEL, SquareSums
from infinity.units import partition
from storage.align import align_up

CHUNKS = [BLOCK_NUMEL, 4 * BLOCK_NUMEL, 33 * BLOCK_NUMEL]


def _group() -> FlatGroup:
    """Slots that begin and end in the middle of blocks, one within a block, one over many."""
    sizes = [350_701, 501, 63, 7, 5000, 5000, 210_000]
    model = nn.ParameterList(nn.Parameter(torch.empty(size, device="meta")) for size in sizes)
    specs = partition(model, resident_threshold_nbytes=0)
    groups, _ = make_groups(specs, Precision.FP32, kernel_for(Precision.FP32), CpuDevice(1 << 30))
    (group,) = groups
    return group


def _sums(group: FlatGroup, flat: torch.Tensor, chunk_numel: int, span: FlatSpan) -> list[float]:
    sums = SquareSums(group)
    for chunk in spread_over_drives(group.layout.cut(chunk_numel, span), 2):  # in the order in which they arrive
        sums.add(chunk.span, flat[chunk.start : chunk.stop])
    totals = sums.totals()
    return [totals[slot].item() for slot in range(len(group.layout.slots))]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_do_not_depend_on_the_chunks(threads: int) -> None:
    group, before = _group(), torch.get_num_threads()
    flat = torch.randn(group.layout.numel, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(threads)
    try:
        for span in (group.layout.whole, FlatSpan(3 * BLOCK_NUMEL, 90 * BLOCK_NUMEL)):
            whole = _sums(group, flat, align_up(span.numel, BLOCK_NUMEL), span)
            assert all(_sums(group, flat, chunk_numel, span) == whole for chunk_numel in CHUNKS)
            for slot, found in zip(group.layout.slots, whole, strict=True):
                part = flat[max(slot.offset, span.start) : max(min(slot.stop, span.stop), span.start)]
                assert found == pytest.approx(part.double().square().sum().item(), rel=1e-14, abs=0.0)
    finally:
        torch.set_num_threads(before)
