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
from infinity.sizes import MIB, format_nbytes
from storage.align import align_down

DEPTH = 3
_TARGET_STATE_NBYTES = 16 * MIB
_GRAD_NBYTES = 4


@dataclass(frozen=True, slots=True)
class SectionSizes:
    """Bytes per element of a section: of its state, and of parameters that are copied to be updated (else 0)."""

    layout: FlatLayout
    state: int
    param: int

    @property
    def transit(self) -> int:
        return self.state + self.param + _GRAD_NBYTES


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


def plan_state(sections: Sequence[SectionSizes], host_nbytes: int, chunk_nbytes: int | None) -> StatePlan:
    """Share a host budget out.

    Args:
        chunk_nbytes: state of one chunk, if it is given.

    Raises:
        PlacementError: the budget is too small, with the smallest that works.
    """
    state = max(section.state for section in sections)
    transit = max(section.transit for section in sections)
    longest = max(section.layout.numel for section in sections)
    wanted = _TARGET_STATE_NBYTES if chunk_nbytes is None else chunk_nbytes
    numel = min(align_down(wanted // (state or transit), SHARD_ALIGN_NUMEL), longest)
    if chunk_nbytes is None:
        numel = min(numel, align_down(host_nbytes // (2 * DEPTH * transit), SHARD_ALIGN_NUMEL))
    numel = max(numel, SHARD_ALIGN_NUMEL)
    minimum = DEPTH * numel * transit
    if minimum > host_nbytes:
        raise PlacementError(
            f"host budget: {format_nbytes(host_nbytes)} given, {format_nbytes(minimum)} needed: {DEPTH} chunks in "
            f"transit, each of {numel} elements of {transit} bytes (state {state}, gradient {_GRAD_NBYTES}, the rest "
            "parameters that are copied)"
        )
    left = host_nbytes - minimum
    kept, kept_nbytes, nvme_nbytes = [], 0, 0
    for section in sections:
        sizes = [(chunk.stop - chunk.start) * section.state for chunk in section.layout.cut(numel)]
        count = 0
        while count < len(sizes) and kept_nbytes + sizes[count] <= left:
            kept_nbytes += sizes[count]
            count += 1
        kept.append(count)
        nvme_nbytes += sum(sizes[count:])
    return StatePlan(numel, tuple(kept), kept_nbytes, host_nbytes - kept_nbytes, nvme_nbytes)
