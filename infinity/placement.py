"""The placement manager: which shard lies on which tier, how the host budget is divided, and why.

The host budget is divided once, before anything is allocated, into parts that are ceilings of their own: shards that
stay in host memory, the read-ahead window, gradients, gradients in transit, and the update pipeline. Each part has a
smallest size with which a step makes progress by itself; their sum is the smallest host budget that works. What is
left is given out in a fixed order of usefulness, so the same input always gives the same plan.

[Note: value of a byte]
A parameter byte kept in host memory saves a read in forward, a read in backward and a write (and, in the synchronous
schedule, a read in `step()`), and two more reads for every further unit that shares it; a state byte saves one read
and one write; a gradient byte that need not be spilled saves a write and a read. Pinning a fixed set is optimal for
cyclic access (PLANNING section 4), so no cache policy is needed.

[Note: durable steps]
With `durability="step"` everything lies in the swap files, so that a step can be committed there. What is in host
memory for good is still read from there alone, and written through in every step; it costs a write and saves the same
reads. A commit keeps the bytes of the step before until it is over, so what trains takes twice its space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from infinity.config import Schedule
from infinity.errors import PlacementError
from infinity.gradients import gradient_nbytes
from infinity.groups import FlatGroup, Unit, count_uses, enclosing
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.optim.hyper import StateField
from infinity.sizes import MIB, format_nbytes
from storage.align import align_down

_MIN_CHUNK_NUMEL = 4 * SHARD_ALIGN_NUMEL
_TARGET_CHUNK_NBYTES = 16 * MIB
_PIPELINE_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a budget: what, how many bytes, and why."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies. Sizes in bytes.

    Attributes:
        pinned_params, pinned_states: group indices whose shard or state is in host memory for good.
        spilled_gradients: group indices whose gradients wait for the update in the swap file.
        keep_at_turn, keep_at_boundary: groups whose copies stay from forward to backward, and from update to forward.
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
    device_minimum_nbytes: int
    window_nbytes: int
    gradients_nbytes: int
    transit_nbytes: int
    pipeline_nbytes: int
    pinned_params: frozenset[int]
    pinned_states: frozenset[int]
    spilled_gradients: frozenset[int]
    keep_at_turn: frozenset[int]
    keep_at_boundary: frozenset[int]
    uses: Mapping[int, int]
    nvme_nbytes: int
    is_durable: bool = False
    notes: tuple[str, ...] = field(default=())

    def stores_param(self, index: int) -> bool:
        """Whether the shard of a group lies in the swap files."""
        return self.is_durable or index not in self.pinned_params

    def stores_state(self, index: int) -> bool:
        """Whether the optimizer state of a group that trains lies in the swap files."""
        return self.is_durable or index not in self.pinned_states

    @property
    def state_pinned_nbytes(self) -> int:
        return next((term.nbytes for term in self.host if term.name == "pinned"), 0)


@dataclass(frozen=True, slots=True)
class Request:
    """What a placement is made from."""

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
    ranks_nbytes: int = 0  # on the device, for transfers between ranks
    is_durable: bool = False


class _Sizes:
    """Sizes that the planner compares, by group and by unit."""

    def __init__(self, request: Request) -> None:
        self.state_per_element = sum(f.dtype.itemsize for f in request.fields)
        self.resident = {g.index for u in request.units if u.resident for g in u.groups}
        self.streamed = [g for g in request.groups if g.index not in self.resident]
        self.shard: Mapping[int, int] = {g.index: g.shard_nbytes for g in request.groups}
        self.state: Mapping[int, int] = {
            g.index: g.state_span.numel * self.state_per_element if g.trainable else 0 for g in request.groups
        }
        self.gradient: Mapping[int, int] = {
            g.index: gradient_nbytes(g) if g.trainable else 0 for g in request.groups
        }
        self.uses: Mapping[int, int] = count_uses(request.units)
        self.working_set = self._working_set(request)
        self.largest_gradient = max(self.gradient.values(), default=0)
        self.unit_gradients = [sum(self.gradient[g.index] for g in u.groups) for u in request.units]
        param_size = max((g.shard_dtype.itemsize for g in request.groups), default=4)
        # A chunk in transit holds its record, its parameters and, if spilled, its gradient.
        self.chunk_per_element = self.state_per_element + param_size + 4

    def _working_set(self, request: Request) -> int:
        """Most bytes of host copies in use at once. Under `overlapped` they stay from backward to their update."""
        largest = max((self.shard[g.index] for g in self.streamed), default=0)
        if request.schedule is Schedule.OVERLAPPED:
            for _, groups in _held_together(request.units):
                streamed = [g for g in groups if g.index not in self.resident]
                updated = sum(self.shard[g.index] for g in streamed if g.trainable)
                passing = max((self.shard[g.index] for g in streamed if not g.trainable), default=0)
                largest = max(largest, updated + passing)
        return largest


def make_placement(request: Request) -> Placement:
    """Divide the budgets.

    Raises:
        PlacementError: a budget is smaller than what one step needs at the same time, with the arithmetic.
    """
    sizes = _Sizes(request)
    device_terms, device_minimum = _device_terms(request, sizes)
    host = _HostDivision(request, sizes)
    problems = []
    if request.device_budget_nbytes < device_minimum:
        problems.append(_refusal("device", request.device_budget_nbytes, device_minimum, device_terms))
    if request.host_budget_nbytes < host.minimum_nbytes:
        problems.append(_refusal("host", request.host_budget_nbytes, host.minimum_nbytes, host.minimum_terms()))
    if problems:
        raise PlacementError("\n".join(problems))
    host.give_out()
    nvme_nbytes = host.nvme_nbytes()
    if request.nvme_budget_nbytes is not None and nvme_nbytes > request.nvme_budget_nbytes:
        raise PlacementError(
            f"the swap files need {format_nbytes(nvme_nbytes)} ({nvme_nbytes} bytes), but nvme.budget is "
            f"{format_nbytes(request.nvme_budget_nbytes)}. Raise it, or give more host memory"
        )
    return Placement(
        schedule=request.schedule,
        schedule_reason=request.schedule_reason,
        chunk_numel=host.chunk_numel,
        host=tuple(host.terms()),
        device=tuple(device_terms),
        host_budget_nbytes=request.host_budget_nbytes,
        device_budget_nbytes=request.device_budget_nbytes,
        host_minimum_nbytes=host.minimum_nbytes,
        device_minimum_nbytes=device_minimum,
        window_nbytes=host.window,
        gradients_nbytes=host.gradients,
        transit_nbytes=host.transit,
        pipeline_nbytes=host.pipeline,
        pinned_params=frozenset(host.pinned_params),
        pinned_states=frozenset(host.pinned_states),
        spilled_gradients=frozenset(host.spilled),
        keep_at_turn=frozenset(host.kept(from_end=True)),
        keep_at_boundary=frozenset(host.kept(from_end=False)),
        uses=sizes.uses,
        nvme_nbytes=nvme_nbytes,
        is_durable=request.is_durable,
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


def _refusal(tier: str, budget: int, minimum: int, terms: Sequence[Term]) -> str:
    lines = [f"the {tier} budget of {format_nbytes(budget)} ({budget} bytes) is too small for one step of this model:"]
    lines += [f"  {format_nbytes(term.nbytes):>12}  {term.name}: {term.why}" for term in terms]
    lines.append(f"  {format_nbytes(minimum):>12}  smallest {tier} budget that works ({minimum} bytes)")
    return "\n".join(lines)


def _device_terms(request: Request, sizes: _Sizes) -> tuple[list[Term], int]:
    resident = sum(g.flat_nbytes for g in request.groups if g.index in sizes.resident)
    resident_grads = sum(g.flat_nbytes for g in request.groups if g.index in sizes.resident and g.trainable)
    shared = [g for g in sizes.streamed if g.trainable and len(g.units) > 1]
    largest, name = 0, "none"
    for unit, groups in _held_together(request.units):
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
            "gradients of parameters that several units use, which are complete after the last of them",
        ),
        Term("largest unit", largest, f"parameters and gradients of {name} and what encloses it"),
    ]
    if request.ranks_nbytes:
        terms.append(Term("ranks", request.ranks_nbytes, "gradients being averaged, spans lent to other ranks"))
    return terms, sum(term.nbytes for term in terms)


def _held_together(units: Sequence[Unit]) -> Iterator[tuple[Unit, list[FlatGroup]]]:
    """For every unit, the groups that are gathered while it runs: its own and those of the units it lies in."""
    streamed = [unit for unit in units if not unit.resident]
    for unit in streamed:
        around = enclosing(unit, streamed)
        yield unit, list({g.index: g for other in around for g in other.groups}.values())


class _HostDivision:
    """Divides the host budget: minimum first, then the rest in the order of usefulness."""

    def __init__(self, request: Request, sizes: _Sizes) -> None:
        self._request = request
        self._sizes = sizes
        self.notes: list[str] = []
        self.holds_gradients = request.schedule is not Schedule.OVERLAPPED
        self.chunk_numel = self._smallest_chunk()
        self.pinned_params = set(sizes.resident)
        self.pinned_states = set(sizes.resident)
        trainable = [g.index for g in sizes.streamed if g.trainable]
        self.window = sizes.working_set
        if self.holds_gradients:
            self.spilled = set(trainable)
            self.gradients = sum(sizes.gradient[i] for i in sizes.resident)
            self.transit = max((sizes.gradient[i] for i in trainable), default=0)
        else:
            self.spilled = set()
            self.gradients = max(sizes.largest_gradient, sum(sizes.gradient[i] for i in sizes.resident))
            self.transit = 0
        self.pipeline = self._chunk_nbytes(self.chunk_numel) if trainable else 0
        self.window = max(self.window, self._missing_for_staging())
        self.minimum_nbytes = sum(term.nbytes for term in self.minimum_terms())

    def _smallest_chunk(self) -> int:
        largest = max((g.state_span.numel for g in self._sizes.streamed), default=SHARD_ALIGN_NUMEL)
        if self._request.chunk_nbytes is not None:
            wanted = self._request.chunk_nbytes // max(self._sizes.state_per_element, 4)
            return min(max(align_down(wanted, SHARD_ALIGN_NUMEL), SHARD_ALIGN_NUMEL), largest)
        return min(_MIN_CHUNK_NUMEL, largest)

    def _chunk_nbytes(self, numel: int) -> int:
        return numel * self._sizes.chunk_per_element

    def _missing_for_staging(self) -> int:
        """What the window adds to the parts that, empty before the first step, stage the initial values."""
        return max(self._request.staging_nbytes - self.gradients - self.transit - self.pipeline, 0)

    def _pinned_nbytes(self) -> int:
        shard, state = self._sizes.shard, self._sizes.state
        return sum(shard[i] for i in self.pinned_params) + sum(state[i] for i in self.pinned_states)

    def minimum_terms(self) -> list[Term]:
        return self.terms()

    def terms(self) -> list[Term]:
        pinned = f"shards of {len(self.pinned_params)} and state of {len(self.pinned_states)} groups, for good"
        held = {
            Schedule.OVERLAPPED: "gradients on their way into the update",
            Schedule.DEFERRED: "gradients held from backward to their update in the next forward",
        }.get(self._request.schedule, "gradients held until step()")
        chunk = format_nbytes(self._chunk_nbytes(self.chunk_numel))
        return [
            Term("pinned", self._pinned_nbytes(), pinned),
            Term("window", self.window, "parameter shards read ahead, in use, or being updated"),
            Term("gradients", self.gradients, held),
            Term("transit", self.transit, f"gradients to and from the swap file ({len(self.spilled)} groups spill)"),
            Term("pipeline", self.pipeline, f"optimizer chunks of {chunk} being read, computed and written"),
        ]

    def _left(self) -> int:
        return self._request.host_budget_nbytes - sum(term.nbytes for term in self.terms())

    def give_out(self) -> None:
        """Spend what the minimum leaves: smooth flow first, then no spilling, then pinning by value, then window."""
        sizes = self._sizes
        self._deepen_pipeline()
        self._grow("window", 2 * sizes.working_set)
        if self.holds_gradients:
            self._grow("transit", 2 * self.transit)
            self._hold_gradients()
        else:
            self._grow("gradients", 2 * max(sizes.unit_gradients, default=0))
        self._grow("window", 4 * sizes.working_set)
        self._pin(self.pinned_params, sizes.shard, by_uses=True)
        streamed = [g for g in sizes.streamed if g.index not in self.pinned_params]
        if not streamed:
            self.window = self._missing_for_staging()  # nothing is read ahead any more
        self._pin(self.pinned_states, sizes.state)
        self._grow("window", sum(g.shard_nbytes for g in streamed))
        if not streamed:
            self.window = 0

    def _deepen_pipeline(self) -> None:
        """Room for several chunks at a time, then for larger ones.

        The pipeline takes what it is given byte by byte, never in jumps: more memory must not leave less for the rest.
        """
        if not self.pipeline:
            return
        spare = self._left()
        depth_nbytes = _PIPELINE_DEPTH * self._sizes.chunk_per_element  # per element of a chunk
        share = self.pipeline + spare // 3  # growing the chunks may take a third of what is spare
        wanted = max(depth_nbytes * self.chunk_numel, share)
        self.pipeline = min(wanted, depth_nbytes * self._largest_chunk(), self.pipeline + spare)
        self.chunk_numel = max(self.chunk_numel, align_down(self.pipeline // depth_nbytes, SHARD_ALIGN_NUMEL))

    def _largest_chunk(self) -> int:
        if self._request.chunk_nbytes is not None:
            return self.chunk_numel
        largest = max(g.state_span.numel for g in self._sizes.streamed if g.trainable)
        target = align_down(_TARGET_CHUNK_NBYTES // max(self._sizes.state_per_element, 4), SHARD_ALIGN_NUMEL)
        return max(self.chunk_numel, min(target, largest))

    def _grow(self, part: str, wanted: int) -> None:
        current: int = getattr(self, part)
        setattr(self, part, max(current, min(wanted, current + max(self._left(), 0))))

    def _hold_gradients(self) -> None:
        """Keep as many gradients as fit in host memory; none in transit if all do."""
        sizes = self._sizes
        everything = sum(sizes.gradient[i] for i in self.spilled)
        if everything <= self._left() + self.transit:
            self.gradients += everything
            self.spilled.clear()
            self.transit = 0
            return
        for index in sorted(self.spilled):
            if sizes.gradient[index] <= self._left():
                self.gradients += sizes.gradient[index]
                self.spilled.discard(index)
        self.notes.append(
            f"gradients of {len(self.spilled)} groups do not fit in host memory and go through the swap file; "
            "schedule='overlapped' avoids that where neither accumulation nor clipping is used"
        )

    def _pin(self, pinned: set[int], nbytes: Mapping[int, int], *, by_uses: bool = False) -> None:
        uses = self._sizes.uses
        for group in sorted(self._sizes.streamed, key=lambda g: -uses[g.index] if by_uses else 0):
            if group.index not in pinned and 0 < nbytes[group.index] <= self._left():
                pinned.add(group.index)

    def kept(self, *, from_end: bool) -> list[int]:
        """Groups whose copies are kept across the turn (the last ones) or the step boundary (the first ones)."""
        # Beside what is kept, the window always has room for one unit, so keeping never costs a read.
        room = self.window - self._sizes.working_set
        chosen: list[int] = []
        total = 0
        streamed = [g for g in self._sizes.streamed if g.index not in self.pinned_params]
        # A group that units share is kept from its last use on.
        streamed.sort(key=lambda g: (max(g.units) if from_end else min(g.units), g.index), reverse=from_end)
        for group in streamed:
            total += group.shard_nbytes
            if total > room:
                break
            chosen.append(group.index)
        return chosen

    def nvme_nbytes(self) -> int:
        """Space of the swap files. Where steps are durable, what trains takes it twice: the step before stays."""
        sizes = self._sizes
        total = 0
        for group in self._request.groups:
            i = group.index
            is_durable = self._request.is_durable
            copies = 2 if is_durable and group.trainable else 1
            total += copies * sizes.shard[i] if is_durable or i not in self.pinned_params else 0
            total += copies * sizes.state[i] if is_durable or i not in self.pinned_states else 0
            total += sizes.gradient[i] if i in self.spilled else 0
        return total
