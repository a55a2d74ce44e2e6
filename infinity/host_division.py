"""How the host budget is divided: the smallest parts that work first, then what is left in the order of usefulness.

[Note: value of a byte]
A parameter byte kept in host memory saves a read in forward, a read in backward and a write (and, in the synchronous
schedule, a read in `step()`), and two more reads for every further unit that shares it; a state byte saves one read
and one write; a gradient byte that need not be spilled saves a write and a read. Pinning a fixed set is optimal for
cyclic access (PLANNING section 4), so no cache policy is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinity.config import Schedule
from infinity.demand import MIN_CHUNK_NUMEL, Request, Sizes, Term, chunkings, smallest_chunk_numel
from infinity.gradients import GRAD_DTYPE
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.passage import DEPTH as PASSAGE_DEPTH
from infinity.sizes import MIB, format_nbytes
from storage.align import align_down

_TARGET_CHUNK_NBYTES = 16 * MIB
_TARGET_PASSAGE_NBYTES = 4 * MIB
_PIPELINE_DEPTH = 3


def divide_host(request: Request, sizes: Sizes) -> HostDivision:
    """The division of the host budget in which as few groups as possible pass host memory in chunks; minimum only.

    Where none fits in the budget it is the one that needs least.
    """
    divisions = [HostDivision(request, sizes.in_chunks(chunked)) for chunked in chunkings(sizes)]
    for division in divisions:
        division.smallest_nbytes = min(other.minimum_nbytes for other in divisions)
        division.whole_nbytes = divisions[0].minimum_nbytes
    fitting = (division for division in divisions if division.minimum_nbytes <= request.host_budget_nbytes)
    return next(fitting, min(divisions, key=lambda division: division.minimum_nbytes))


class HostDivision:
    """Divides the host budget: minimum first, then the rest in the order of usefulness.

    Attributes:
        minimum_nbytes: of this division.
        smallest_nbytes: of the one that needs least.
        whole_nbytes: of the one in which no group passes host memory in chunks.
    """

    def __init__(self, request: Request, sizes: Sizes) -> None:
        self._request = request
        self._sizes = sizes
        self.notes: list[str] = []
        self.holds_gradients = request.schedule is not Schedule.OVERLAPPED
        self.chunk_numel = self._smallest_chunk()
        self.pinned_params = set(sizes.resident)
        self.pinned_states = set(sizes.resident)
        trainable = [g.index for g in sizes.streamed if g.trainable]
        self.chunked = sizes.chunked
        self.passage_numel = MIN_CHUNK_NUMEL
        self.passage = self._passage_nbytes(MIN_CHUNK_NUMEL) if sizes.chunked else 0
        self.window = sizes.working_set
        if self.holds_gradients:
            self.spilled = set(trainable)
            self.gradients = sum(sizes.gradient[i] for i in sizes.resident)
            self.transit = max((sizes.held_gradient[i] for i in trainable), default=0)
        else:
            self.spilled = set(sizes.chunked & set(trainable))
            self.gradients = max(sizes.largest_gradient, sum(sizes.gradient[i] for i in sizes.resident))
            self.transit = 0
        self.pipeline = self._chunk_nbytes(self.chunk_numel) if trainable else 0
        self.window = max(self.window, self._missing_for_staging())
        self.minimum_nbytes = sum(term.nbytes for term in self.terms())
        self.smallest_nbytes = self.whole_nbytes = self.minimum_nbytes

    def _smallest_chunk(self) -> int:
        largest = max((g.state_span.numel for g in self._sizes.streamed), default=SHARD_ALIGN_NUMEL)
        return min(smallest_chunk_numel(self._request), largest)

    def _chunk_nbytes(self, numel: int) -> int:
        return numel * self._sizes.chunk_per_element

    def _passage_nbytes(self, numel: int) -> int:
        """Buffers of so many elements, in the widest dtype that passes."""
        widest = max(GRAD_DTYPE.itemsize, *(g.shard_dtype.itemsize for g in self._request.groups))
        return PASSAGE_DEPTH * numel * widest

    def _missing_for_staging(self) -> int:
        """What the window adds to the parts that, empty before the first step, stage the initial values."""
        others = self.gradients + self.transit + self.pipeline + self.passage
        small_nbytes = self._request.small_staging_nbytes if self.chunked else None
        return max((self._request.staging_nbytes if small_nbytes is None else small_nbytes) - others, 0)

    def _pinned_nbytes(self) -> int:
        shard, state = self._sizes.shard, self._sizes.state
        return sum(shard[i] for i in self.pinned_params) + sum(state[i] for i in self.pinned_states)

    def terms(self) -> list[Term]:
        pinned = f"shards of {len(self.pinned_params)} and state of {len(self.pinned_states)} groups, for good"
        held = {
            Schedule.OVERLAPPED: "gradients on their way into the update",
            Schedule.DEFERRED: "gradients held from backward to their update in the next forward",
        }.get(self._request.schedule, "gradients held until step()")
        chunk = format_nbytes(self._chunk_nbytes(self.chunk_numel))
        activations = Term("activations", self._request.activations_nbytes, "inputs of units, until their backward")
        passage = Term("passage", self.passage, f"chunks of {len(self.chunked)} groups that are too large to lie here")
        terms = [
            Term("pinned", self._pinned_nbytes(), pinned),
            Term("window", self.window, "parameter shards read ahead, in use, or being updated"),
            Term("gradients", self.gradients, held),
            Term("transit", self.transit, f"gradients to and from the swap file ({len(self.spilled)} groups spill)"),
            Term("pipeline", self.pipeline, f"optimizer chunks of {chunk} being read, computed and written"),
        ]
        return [*terms, *(term for term in (passage, activations) if term.nbytes)]

    def _left(self) -> int:
        return self._request.host_budget_nbytes - sum(term.nbytes for term in self.terms())

    def give_out(self) -> None:
        """Spend what the minimum leaves: smooth flow first, then no spilling, then pinning by value, then window."""
        sizes = self._sizes
        self._deepen_pipeline()
        self._lengthen_passage()
        self._grow("window", 2 * sizes.working_set)
        if self.holds_gradients:
            self._grow("transit", 2 * self.transit)
            self._hold_gradients()
        else:
            self._grow("gradients", 2 * max(sizes.unit_gradients, default=0))
        self._grow("window", 4 * sizes.working_set)
        self._pin(self.pinned_params, sizes.shard, by_uses=True)
        streamed = [g for g in sizes.streamed if g.index not in self.pinned_params | self.chunked]
        if not streamed:
            self.window = self._missing_for_staging()  # nothing is read ahead any more
        self._pin(self.pinned_states, sizes.state)
        self._grow("window", sum(g.shard_nbytes for g in streamed))
        if not streamed:
            self.window = 0
        if not self.holds_gradients:  # some may have to wait for the end of backward; see GradientSpill
            self._grow("gradients", sum(sizes.held_gradient.values()))

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

    def _lengthen_passage(self) -> None:
        """Longer chunks of what passes host memory, at most a quarter of what is spare."""
        if not self.chunked:
            return
        largest = max(g.layout.numel for g in self._request.groups if g.index in self.chunked)
        per_element = self._passage_nbytes(1)
        wanted = min(_TARGET_PASSAGE_NBYTES, largest * per_element, self.passage + max(self._left(), 0) // 4)
        self.passage_numel = max(self.passage_numel, align_down(wanted // per_element, SHARD_ALIGN_NUMEL))
        self.passage = self._passage_nbytes(self.passage_numel)

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
        sizes, always_spilled = self._sizes, self.chunked & self.spilled
        everything = sum(sizes.held_gradient[i] for i in self.spilled)
        if everything <= self._left() + self.transit:
            self.gradients += everything
            self.spilled = set(always_spilled)
            self.transit = 0
            return
        for index in sorted(self.spilled - always_spilled):
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
            is_here = group.index in pinned or (group.index in self.chunked and pinned is self.pinned_params)
            if not is_here and 0 < nbytes[group.index] <= self._left():
                pinned.add(group.index)

    def kept(self, *, from_end: bool) -> list[int]:
        """Groups whose copies are kept across the turn (the last ones) or the step boundary (the first ones)."""
        # Beside what is kept, the window always has room for one unit, so keeping never costs a read.
        room = self.window - self._sizes.working_set
        chosen: list[int] = []
        total = 0
        streamed = [g for g in self._sizes.streamed if g.index not in self.pinned_params | self.chunked]
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
        total = self._request.stored_activations_nbytes
        for group in self._request.groups:
            i = group.index
            is_durable = self._request.is_durable
            copies = 2 if is_durable and group.trainable else 1
            total += copies * sizes.shard[i] if is_durable or i not in self.pinned_params else 0
            total += copies * sizes.state[i] if is_durable or i not in self.pinned_states else 0
            total += sizes.gradient[i] if i in self.spilled else 0
        return total
