"""What one step needs: the request for a placement, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from infinity.config import Schedule
from infinity.gradients import gradient_nbytes
from infinity.groups import FlatGroup, Unit, count_uses, enclosing
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.optim.hyper import StateField, most_nbytes_per_element, payload_nbytes
from storage.align import PAGE_NBYTES, align_down

MIN_CHUNK_NUMEL = 4 * SHARD_ALIGN_NUMEL
SMALLEST_CHUNKED_NUMEL = 4 * MIN_CHUNK_NUMEL


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a budget: what, how many bytes, and why."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a placement is made from.

    Attributes:
        staging_nbytes: host bytes that giving the parameters their first values takes.
        small_staging_nbytes: the same where large parameters get them in device memory; None where they cannot.
        n_drives: that swap files lie on.
        is_empty: parameters have no memory, and get first values that no file holds.
    """

    units: Sequence[Unit]
    groups: Sequence[FlatGroup]
    fields: tuple[StateField, ...]
    schedule: Schedule
    schedule_reason: str
    host_budget_nbytes: int
    device_budget_nbytes: int
    nvme_budget_nbytes: int | None
    chunk_nbytes: int | None
    staging_nbytes: int
    activations_nbytes: int = 0  # host memory for inputs of units
    stored_activations_nbytes: int = 0  # the same in the swap files
    small_staging_nbytes: int | None = None
    ranks_nbytes: int = 0  # on the device, for transfers between ranks
    local_size: int = 1  # ranks of this machine; each has its part of the budgets of host memory and swap files
    n_drives: int = 1
    is_durable: bool = False
    is_empty: bool = False


class Sizes:
    """Sizes that the planner compares, by group and by unit.

    Attributes:
        shard_nbytes, state_nbytes, gradient_nbytes: by group index.
        held_gradient_nbytes: the same of gradients that are whole in host memory.
        unit_gradients_nbytes: all of those of a unit, for every unit.
        chunk_nbytes_per_element: of a chunk in transit: its record, its parameters and, if spilled, its gradient.
        working_set_nbytes: most bytes of host copies in use at once.
        uses: by group index, how often a forward gathers the group.
    """

    def __init__(self, request: Request) -> None:
        self.state_nbytes_per_element = most_nbytes_per_element(request.fields)
        self.resident = {g.index for u in request.units if u.resident for g in u.groups}
        self.streamed = [g for g in request.groups if g.index not in self.resident]
        self.shard_nbytes: Mapping[int, int] = {g.index: g.shard_nbytes for g in request.groups}
        self.state_nbytes: Mapping[int, int] = {
            g.index: _state_nbytes(request, g) if g.trainable else 0 for g in request.groups
        }
        self.gradient_nbytes: Mapping[int, int] = {
            g.index: gradient_nbytes(g) if g.trainable else 0 for g in request.groups
        }
        self.uses: Mapping[int, int] = count_uses(request.units)
        param_size = max((g.shard_dtype.itemsize for g in request.groups), default=4)
        self.chunk_nbytes_per_element = self.state_nbytes_per_element + param_size + 4
        self._groups_of_units = [u.groups for u in request.units]
        # Under `overlapped` copies stay from backward to their update.
        is_overlapped = request.schedule is Schedule.OVERLAPPED
        self._updated_together = [groups for _, groups in held_together(request.units)] if is_overlapped else []
        self._choose(frozenset())

    def in_chunks(self, chunked: frozenset[int]) -> Sizes:
        """The same where neither the shards nor the gradients of these groups are ever whole in host memory."""
        sizes = copy(self)
        sizes._choose(chunked)
        return sizes

    def group_nbytes(self, index: int) -> int:
        """Everything of a group: shard, state and gradient."""
        return self.shard_nbytes[index] + self.state_nbytes[index] + self.gradient_nbytes[index]

    def _choose(self, chunked: frozenset[int]) -> None:
        self.chunked = chunked
        self.working_set_nbytes = self._working_set_nbytes()
        self.held_gradient_nbytes: Mapping[int, int] = {
            i: 0 if i in chunked else n for i, n in self.gradient_nbytes.items()
        }
        self.largest_gradient_nbytes = max(self.held_gradient_nbytes.values(), default=0)
        self.unit_gradients_nbytes = [
            sum(self.held_gradient_nbytes[g.index] for g in groups) for groups in self._groups_of_units
        ]

    def _working_set_nbytes(self) -> int:
        """Most bytes of host copies in use at once."""
        largest = max((self.shard_nbytes[g.index] for g in self.streamed if g.index not in self.chunked), default=0)
        for groups in self._updated_together:
            streamed = [g for g in groups if g.index not in self.resident and g.index not in self.chunked]
            updated = sum(self.shard_nbytes[g.index] for g in streamed if g.trainable)
            passing = max((self.shard_nbytes[g.index] for g in streamed if not g.trainable), default=0)
            largest = max(largest, updated + passing)
        return largest


def chunkings(sizes: Sizes) -> Iterator[frozenset[int]]:
    """Which groups may pass host memory in chunks: none, then the largest, and so on; groups of one size together.

    What counts is the part of a group that this rank holds; not what is hardly larger than the buffers.
    """
    able = [g for g in sizes.streamed if g.param_span.numel > SMALLEST_CHUNKED_NUMEL]
    yield frozenset()
    for numel in sorted({g.param_span.numel for g in able}, reverse=True):
        yield frozenset(g.index for g in able if g.param_span.numel >= numel)


def completed_late(units: Sequence[Unit]) -> set[int]:
    """Groups whose gradient is complete after the backward of other units: several units use them, or several places.

    Autograd holds what has arrived of it until the last contribution.
    """
    return {g.index for unit in units for g in unit.groups if len(g.units) > 1 or unit.n_places > 1}


def _state_nbytes(request: Request, group: FlatGroup) -> int:
    """Bytes of a group's records, however they are cut: each may end in pages that are not full."""
    cut = max(-(-group.state_span.numel // smallest_chunk_numel(request)), 1)
    spare = PAGE_NBYTES * sum(f.block_numel > 1 for f in request.fields)
    most = group.state_span.numel * most_nbytes_per_element(request.fields)
    return min(payload_nbytes(request.fields, group.state_span.numel) + cut * spare, most)


def smallest_chunk_numel(request: Request) -> int:
    """Elements of the smallest chunks that a placement may choose."""
    if request.chunk_nbytes is None:
        return MIN_CHUNK_NUMEL
    wanted = request.chunk_nbytes // max(most_nbytes_per_element(request.fields), 4)
    return max(align_down(wanted, SHARD_ALIGN_NUMEL), SHARD_ALIGN_NUMEL)


def held_together(units: Sequence[Unit]) -> Iterator[tuple[Unit, list[FlatGroup]]]:
    """For every unit, the groups that are gathered while it runs: its own and those of the units it lies in."""
    streamed = [unit for unit in units if not unit.resident]
    for unit, around in zip(streamed, enclosing(streamed), strict=True):
        yield unit, list({g.index: g for other in around for g in other.groups}.values())
