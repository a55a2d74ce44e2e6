"""How a host budget is shared out when only optimizer state lies in the tiers.

A *section* is the state of all parameters of one dtype, laid out like a flat buffer and cut into chunks. A chunk in
transit holds its state, its gradient in fp32 and, where parameters are on another device, their values. Three chunks in
transit let reading, computing and writing go on side by side; what the budget has left keeps state in host memory for
good, from the front, because the order of chunks is the same in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.errors import PlacementError
from infinity.layout import SHARD_ALIGN_NUMEL, FlatLayout
from infinity.rank_budgets import told_budget, told_need
from infinity.sizes import MIB, format_minimum_nbytes
from storage.align import align_down

DEPTH = 3
_TARGET_STATE_NBYTES = 16 * MIB
_GRAD_NBYTES = 4


@dataclass(frozen=True, slots=True)
class SectionSizes:
    """Bytes per element of a section: of its state, and of parameters that are copied to be updated (else 0)."""

    layout: FlatLayout
    state_nbytes: int
    param_nbytes: int

    @property
    def transit_nbytes(self) -> int:
        """Of what is on its way while it is updated."""
        return self.state_nbytes + self.param_nbytes + _GRAD_NBYTES


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Where the state lies. Sizes in bytes.

    Attributes:
        chunk_numel: elements of a chunk, in every section.
        kept: for every section, how many chunks from the front stay in host memory.
        transit_nbytes: what chunks in transit may hold together.
    """

    chunk_numel: int
    kept: tuple[int, ...]
    kept_nbytes: int
    transit_nbytes: int
    nvme_nbytes: int


def plan_state(
    sections: Sequence[SectionSizes], host_nbytes: int, chunk_nbytes: int | None, local_size: int = 1
) -> StatePlan:
    """Share a host budget out.

    Args:
        host_nbytes: of this rank.
        chunk_nbytes: state of one chunk, if it is given.
        local_size: ranks on this machine.

    Raises:
        PlacementError: the budget is too small, with the smallest that works.
    """
    state_nbytes = max(section.state_nbytes for section in sections)
    transit_nbytes = max(section.transit_nbytes for section in sections)
    longest = max(section.layout.numel for section in sections)
    wanted = _TARGET_STATE_NBYTES if chunk_nbytes is None else chunk_nbytes
    numel = min(align_down(wanted // (state_nbytes or transit_nbytes), SHARD_ALIGN_NUMEL), longest)
    if chunk_nbytes is None:
        numel = min(numel, align_down(host_nbytes // (2 * DEPTH * transit_nbytes), SHARD_ALIGN_NUMEL))
    numel = max(numel, SHARD_ALIGN_NUMEL)
    minimum_nbytes = DEPTH * numel * transit_nbytes
    if minimum_nbytes > host_nbytes:
        raise PlacementError(
            f"host budget: {told_budget(host_nbytes, local_size)} given, {format_minimum_nbytes(minimum_nbytes)} needed"
            f"{told_need(minimum_nbytes, local_size, 'host.budget')}: {DEPTH} chunks in transit, each of {numel} "
            f"elements of {transit_nbytes} bytes (state {state_nbytes}, gradient {_GRAD_NBYTES}, the rest parameters "
            "that are copied)"
        )
    left_nbytes = host_nbytes - minimum_nbytes
    kept, kept_nbytes, nvme_nbytes = [], 0, 0
    for section in sections:
        sizes = [(chunk.stop - chunk.start) * section.state_nbytes for chunk in section.layout.cut(numel)]
        count = 0
        while count < len(sizes) and kept_nbytes + sizes[count] <= left_nbytes:
            kept_nbytes += sizes[count]
            count += 1
        kept.append(count)
        nvme_nbytes += sum(sizes[count:])
    return StatePlan(numel, tuple(kept), kept_nbytes, host_nbytes - kept_nbytes, nvme_nbytes)
