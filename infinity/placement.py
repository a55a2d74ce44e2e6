"""The placement manager: which shard lies on which tier, how the host budget is divided, and why.

The host budget is divided once, before anything is allocated, into parts that are ceilings of their own: shards that
stay in host memory, the read-ahead window, gradients, gradients in transit, and the update pipeline. Each part has a
smallest size with which a step makes progress by itself; their sum is the smallest host budget that works. What is
left is given out in a fixed order of usefulness, so the same input always gives the same plan.

[Note: durable steps]
With `durability="step"` everything lies in the swap files, so that a step can be committed there. What is in host
memory for good is still read from there alone, and written through in every step; it costs a write and saves the same
reads. A commit keeps the bytes of the step before until it is over, so what trains takes twice its space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from infinity.config import Schedule
from infinity.demand import Request, Sizes, Term, completed_late, held_together
from infinity.errors import PlacementError
from infinity.gradients import gradient_nbytes
from infinity.groups import FlatGroup
from infinity.host_division import divide_host
from infinity.rank_budgets import told_budget, told_need
from infinity.sizes import format_minimum_nbytes, format_nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies. Sizes in bytes.

    Attributes:
        pinned_params, pinned_states: group indices whose shard or state is in host memory for good.
        pinned_chunks: by index of a group whose state is there in part: how many of its first chunks.
        spilled_gradients: group indices whose gradients wait for the update in the swap file.
        lasting_gradients: those of them that stay in transit from the last backward on; see last_gradients.py.
        keep_at_turn, keep_at_boundary: groups whose copies stay from forward to backward, and from update to forward.
        updated_in_forward: groups whose updates wait for the next forward under `overlapped`; see balance.py.
        chunked: group indices whose shard and gradient pass host memory in chunks; see [Note: chunked groups].
        passage_numel: elements of such a chunk.
        host_minimum_nbytes: smallest host budget that works, with everything in chunks that can be.
        host_whole_nbytes: smallest host budget with which nothing is; see [Note: whole groups] in host_division.py.
        local_size: ranks of this machine; the figures are those of one of them.
        stages_on_device: large parameters get their first values in device memory; see staging.py.
        is_durable: what is in host memory for good is written to the swap files too; see [Note: durable steps].
        uses: by group index, how often a forward, or a backward, gathers the group: more than once when units share it.
    """

    schedule: Schedule
    schedule_reason: str
    chunk_numel: int
    host: tuple[Term, ...]
    device: tuple[Term, ...]
    host_budget_nbytes: int
    device_budget_nbytes: int
    host_minimum_nbytes: int
    host_whole_nbytes: int
    device_minimum_nbytes: int
    window_nbytes: int
    gradients_nbytes: int
    transit_nbytes: int
    pipeline_nbytes: int
    passage_nbytes: int
    passage_numel: int
    pinned_params: frozenset[int]
    pinned_states: frozenset[int]
    pinned_chunks: Mapping[int, int]
    spilled_gradients: frozenset[int]
    chunked: frozenset[int]
    keep_at_turn: frozenset[int]
    keep_at_boundary: frozenset[int]
    updated_in_forward: frozenset[int]
    uses: Mapping[int, int]
    nvme_nbytes: int
    lasting_gradients: frozenset[int] = frozenset()
    stages_on_device: bool = False
    is_durable: bool = False
    local_size: int = 1
    notes: tuple[str, ...] = field(default=())

    def stores_param(self, index: int) -> bool:
        """Whether the shard of a group lies in the swap files."""
        return self.is_durable or index not in self.pinned_params

    def updated_after_backward(self, groups: Sequence[FlatGroup]) -> frozenset[int]:
        """Indices of the groups whose updates follow their backward at once."""
        if self.schedule is not Schedule.OVERLAPPED:
            return frozenset()
        return frozenset(group.index for group in groups if group.trainable) - self.updated_in_forward

    def pins_state(self, index: int, chunk: int) -> bool:
        """Whether the optimizer state of a chunk, counted within its group, is in host memory for good."""
        return index in self.pinned_states or chunk < self.pinned_chunks.get(index, 0)

    def stores_state(self, index: int, chunk: int) -> bool:
        """Whether the optimizer state of a chunk of a group that trains lies in the swap files."""
        return self.is_durable or not self.pins_state(index, chunk)

    @property
    def state_pinned_nbytes(self) -> int:
        """Host memory of the shards and states that are there for good."""
        return next((term.nbytes for term in self.host if term.name == "pinned"), 0)


def make_placement(request: Request) -> Placement:
    """Divide the budgets.

    Raises:
        PlacementError: a budget is smaller than what one step needs at the same time, with the arithmetic.
    """
    sizes = Sizes(request)
    device_terms, device_minimum = _device_terms(request, sizes)
    host = divide_host(request, sizes)
    problems = []
    if request.device_budget_nbytes < device_minimum:
        problems.append(_refusal(request, "device", device_minimum, device_terms))
    if request.host_budget_nbytes < host.minimum_nbytes:
        problems.append(_refusal(request, "host", host.minimum_nbytes, host.terms()))
        if request.is_empty and host.first_values_nbytes:
            problems.append(_told_first_values(host.first_values_nbytes))
    if problems:
        raise PlacementError("\n".join(problems))
    if host.chunked:
        host.notes.append(
            f"{len(host.chunked)} groups are too large for the host budget: they are not read ahead, but pass host "
            "memory in chunks when they are used, and so do their gradients. A host budget of "
            f"{host.whole_nbytes * request.local_size} bytes holds any group whole, and reads the next one ahead"
        )
    host.give_out()
    nvme_nbytes = host.nvme_nbytes()
    if request.nvme_budget_nbytes is not None and nvme_nbytes > request.nvme_budget_nbytes:
        raise PlacementError(
            f"the swap files need {format_nbytes(nvme_nbytes)} ({nvme_nbytes} bytes)"
            f"{told_need(nvme_nbytes, request.local_size, 'nvme.budget')}, but nvme.budget is "
            f"{told_budget(request.nvme_budget_nbytes, request.local_size)}. Raise it, or give more host memory"
        )
    return Placement(
        schedule=request.schedule,
        schedule_reason=request.schedule_reason,
        chunk_numel=host.chunk_numel,
        host=tuple(host.terms()),
        device=tuple(device_terms),
        host_budget_nbytes=request.host_budget_nbytes,
        device_budget_nbytes=request.device_budget_nbytes,
        host_minimum_nbytes=host.smallest_nbytes,
        host_whole_nbytes=host.whole_nbytes,
        device_minimum_nbytes=device_minimum,
        window_nbytes=host.window_nbytes,
        gradients_nbytes=host.gradients_nbytes,
        transit_nbytes=host.transit_nbytes,
        pipeline_nbytes=host.pipeline_nbytes,
        passage_nbytes=host.passage_nbytes,
        passage_numel=host.passage_numel,
        pinned_params=frozenset(host.pinned_params),
        pinned_states=frozenset(host.pinned_states),
        pinned_chunks=dict(host.pinned_chunks),
        spilled_gradients=frozenset(host.spilled),
        chunked=frozenset(host.chunked),
        keep_at_turn=host.keep_at_turn,
        keep_at_boundary=host.keep_at_boundary,
        updated_in_forward=host.updated_in_forward,
        uses=sizes.uses,
        nvme_nbytes=nvme_nbytes,
        lasting_gradients=host.lasting(),
        stages_on_device=bool(host.chunked) and request.small_staging_nbytes is not None,
        is_durable=request.is_durable,
        local_size=request.local_size,
        notes=tuple(host.notes),
    )


def place_for_any_loop(request: Request, need: str) -> Placement:
    """The placement of `schedule="auto"` for a loop that needs all gradients before the first update, or may.

    Deferred where all gradients fit in host memory, else synchronous, whose reads of spilled gradients come together.
    Synchronous where steps are durable, because a step is committed when all of it has been updated.

    Args:
        need: why all gradients are needed, for the plan.

    Raises:
        PlacementError: as `make_placement`.
    """
    if request.is_durable:
        reason = f"auto: {need}, and a step is committed whole"
        return make_placement(replace(request, schedule=Schedule.SYNCHRONOUS, schedule_reason=reason))
    fits = f"auto: {need}, and host memory holds them until the next forward"
    deferred = make_placement(replace(request, schedule=Schedule.DEFERRED, schedule_reason=fits))
    if not deferred.spilled_gradients:
        return deferred
    spills = f"auto: {need}, and host memory does not hold all of them"
    return make_placement(replace(request, schedule=Schedule.SYNCHRONOUS, schedule_reason=spills))


def budget_for_all_gradients(request: Request) -> int:
    """The smallest host budget, from that of the request on, with which all gradients stay in host memory."""
    wanted_nbytes = sum(gradient_nbytes(group) for group in request.groups if group.trainable)

    def is_enough(budget_nbytes: int) -> bool:
        return make_placement(replace(request, host_budget_nbytes=budget_nbytes)).gradients_nbytes >= wanted_nbytes

    low = high = request.host_budget_nbytes
    while not is_enough(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high


def _refusal(request: Request, tier: Literal["device", "host"], minimum_nbytes: int, terms: Sequence[Term]) -> str:
    is_shared, local_size = tier == "host", request.local_size  # every rank has a device of its own
    budget_nbytes = request.host_budget_nbytes if is_shared else request.device_budget_nbytes
    given = told_budget(budget_nbytes, local_size, is_shared=is_shared)
    total = told_need(minimum_nbytes, local_size, "host.budget" if is_shared else None)
    lines = [f"the {tier} budget of {given} is too small for one step of this model:"]
    lines += [f"  {format_nbytes(term.nbytes):>12}  {term.name}: {term.why}" for term in terms]
    smallest = f"smallest {tier} budget that works ({minimum_nbytes} bytes){total}"
    lines.append(f"  {format_minimum_nbytes(minimum_nbytes):>12}  {smallest}")
    return "\n".join(lines)


def _told_first_values(nbytes: int) -> str:
    return (
        f"Of the window, {format_nbytes(nbytes)} ({nbytes} bytes) are not for a step but for the initialisation of the "
        "empty model (infinity.empty_init()), of which its constructors need so much at a time. Give a larger host "
        "budget; or a larger device budget, in which large parameters are initialised; or build the model with "
        "memory, outside infinity.empty_init(); or pass infinity.offload(..., init_fn=function), which initialises one "
        "module after another"
    )


def _device_terms(request: Request, sizes: Sizes) -> tuple[list[Term], int]:
    resident = sum(g.flat_nbytes for g in request.groups if g.index in sizes.resident)
    resident_grads = sum(g.flat_nbytes for g in request.groups if g.index in sizes.resident and g.trainable)
    late = completed_late(request.units)
    shared = [g for g in sizes.streamed if g.trainable and g.index in late]
    largest, name = 0, "none"
    for unit, groups in held_together(request.units):
        need = sum(g.flat_nbytes for g in groups if g.index not in sizes.resident)
        need += sum(g.flat_nbytes for g in groups if g.trainable and g.index not in sizes.resident and g not in shared)
        if need > largest:
            largest, name = need, unit.name
    terms = [
        Term("resident", resident, "parameters outside the units, always gathered"),
        Term("resident gradients", resident_grads, "their gradients, which are complete at the end of backward"),
        Term(
            "shared gradients",
            sum(g.flat_nbytes for g in shared),
            "gradients of what is used in several places, which are complete after the last of them",
        ),
        Term("largest unit", largest, f"parameters and gradients of {name} and what encloses it"),
    ]
    if request.ranks_nbytes:
        terms.append(Term("ranks", request.ranks_nbytes, "gradients being averaged, spans lent to other ranks"))
    return terms, sum(term.nbytes for term in terms)
