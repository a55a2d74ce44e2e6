"""How the host budget is divided: the smallest parts that work first, then what is left in the order of usefulness.

[Note: value of a byte]
A parameter byte kept in host memory saves a read in forward, a read in backward and a write (and, in the synchronous
schedule, a read in `step()`), and two more reads for every further unit that shares it; a state byte saves one read
and one write; a gradient byte that need not be spilled saves a write and a read. Pinning a fixed set is optimal for
cyclic access (PLANNING section 4), so no cache policy is needed.

[Note: small groups]
A transfer takes time beside its bytes: it waits in queues, and the first and last ones of a pass are waited for. Small
groups (embeddings of a few rows, heads, single layers) cost as much of that as large ones and next to no memory, so
everything of theirs comes to host memory first, smallest first, as long as that takes a small part of the minimum.
A larger budget never takes it away again: a division in which fewer groups pass in chunks has to hold it as well.

[Note: whole groups]
A group that just fits, with a window that holds nothing but the shard in use, is waited for at every access, and a
pipeline of one chunk reads, computes and writes by turns. That is slower than passing in chunks, which takes little
memory and leaves the pipeline the rest. So groups are held whole from the budget on with which the next shard is read
ahead and chunks of the pipeline overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.balance import updated_in_forward
from infinity.chunk_order import spread
from infinity.config import Schedule
from infinity.demand import MIN_CHUNK_NUMEL, Request, Sizes, Term, chunkings, smallest_chunk_numel
from infinity.gradients import GRAD_DTYPE
from infinity.groups import FlatGroup
from infinity.last_gradients import lasting_gradients
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.optim.hyper import stored_nbytes
from infinity.passage import DEPTH as PASSAGE_DEPTH
from infinity.sizes import MIB, format_nbytes
from storage.align import align_down

_TARGET_CHUNK_NBYTES = 16 * MIB
_TARGET_PASSAGE_NBYTES = 4 * MIB
_PIPELINE_DEPTH = 3
_PARTS_FOR_DRIVES = 2  # of such a chunk, where there are several drives
_LEAST_PART_NUMEL = 1 << 18  # elements of such a part: hand-overs of smaller ones cost more than their order gains
_SMALL_PART = 8  # small groups take at most one part in so many of what a step needs at least
_GRADIENTS_AHEAD = 4  # gradients of so many units wait for their updates, so that backward does not wait for these


def divide_host(request: Request, sizes: Sizes) -> HostDivision:
    """The division of the host budget in which as few groups as possible pass host memory in chunks; minimum only.

    It holds small groups and reads ahead as well, see [Note: small groups] and [Note: whole groups]. Where none that
    does fits in the budget it is the one that needs least.
    """
    whole = HostDivision(request, sizes)
    small = groups_held_first(sizes, whole)
    divisions = [HostDivision(request, sizes.in_chunks(chunked), small) for chunked in chunkings(sizes)]
    smallest = min(divisions, key=lambda division: (division.minimum_nbytes, division.flowing_nbytes))
    chosen = next((d for d in divisions if d.flowing_nbytes <= request.host_budget_nbytes), smallest)
    chosen.smallest_nbytes = smallest.minimum_nbytes
    chosen.whole_nbytes = divisions[0].flowing_nbytes if smallest.chunked else whole.minimum_nbytes
    return chosen


def groups_held_first(sizes: Sizes, whole: HostDivision) -> list[int]:
    """Indices of the groups that come to host memory before others, smallest first; see [Note: small groups].

    Args:
        whole: the division in which no group passes host memory in chunks.
    """
    chosen: list[int] = []
    limit_nbytes = whole.minimum_nbytes // _SMALL_PART
    for index in sorted((g.index for g in sizes.streamed), key=lambda i: (sizes.group_nbytes(i), i)):
        limit_nbytes -= sizes.group_nbytes(index)
        if limit_nbytes < 0:
            break
        chosen.append(index)
    return chosen


class HostDivision:
    """Divides the host budget: minimum first, then the rest in the order of usefulness.

    Attributes:
        window_nbytes, gradients_nbytes, transit_nbytes, pipeline_nbytes, passage_nbytes: of the parts.
        chunk_numel, passage_numel: elements of a chunk of the pipeline, and of one that passes host memory.
        chunked, spilled, pinned_params, pinned_states, pinned_chunks, keep_at_turn, keep_at_boundary,
            updated_in_forward: indices of groups; see `Placement`.
        minimum_nbytes: of this division.
        smallest_nbytes: of the one that needs least.
        whole_nbytes: of the one in which no group passes host memory in chunks.
        small_nbytes: beside the minimum, to hold small groups.
        flowing_nbytes: with which small groups are held and the next shard is read ahead; see [Note: whole groups].
    """

    def __init__(self, request: Request, sizes: Sizes, small: Sequence[int] = ()) -> None:
        self._request = request
        self._sizes = sizes
        self._small = [index for index in small if index not in sizes.chunked]
        self.notes: list[str] = []
        self.holds_gradients = request.schedule is not Schedule.OVERLAPPED
        self.chunk_numel = self._smallest_chunk()
        self.pinned_params = set(sizes.resident)
        self.pinned_states = set(sizes.resident)
        self.pinned_chunks: dict[int, int] = {}
        self._pinned_part_nbytes = 0  # of those chunks
        self.keep_at_turn = self.keep_at_boundary = self.updated_in_forward = frozenset[int]()
        trainable = [g.index for g in sizes.streamed if g.trainable]
        self.chunked = sizes.chunked
        self.passage_numel = MIN_CHUNK_NUMEL
        self.passage_nbytes = self._buffers_nbytes(MIN_CHUNK_NUMEL) if sizes.chunked else 0
        self.window_nbytes = sizes.working_set_nbytes
        if self.holds_gradients:
            self.spilled = set(trainable)
            self.gradients_nbytes = sum(sizes.gradient_nbytes[i] for i in sizes.resident)
            self.transit_nbytes = max((sizes.held_gradient_nbytes[i] for i in trainable), default=0)
        else:
            self.spilled = set(sizes.chunked & set(trainable))
            self.gradients_nbytes = max(
                sizes.largest_gradient_nbytes, sum(sizes.gradient_nbytes[i] for i in sizes.resident)
            )
            self.transit_nbytes = 0
        self.pipeline_nbytes = self._chunk_nbytes(self.chunk_numel) if trainable else 0
        self.window_nbytes = max(self.window_nbytes, self._missing_for_staging())
        self.minimum_nbytes = sum(term.nbytes for term in self.terms())
        self.smallest_nbytes = self.whole_nbytes = self.minimum_nbytes
        self.small_nbytes = sum(self._added_nbytes(index) for index in self._small)

    @property
    def flowing_nbytes(self) -> int:
        return self.minimum_nbytes + self.small_nbytes + self._spare_for_window(2)

    def _spare_for_window(self, n_units: int) -> int:
        """Of what is spare after small groups, as much as it takes for a window of so many working sets.

        Before the window, the pipeline takes a third of what is spare, between a smallest and a largest size, and a
        longer passage a quarter of the rest; see `_deepen_pipeline` and `_lengthen_passage`.
        """
        wanted = max(n_units * self._sizes.working_set_nbytes - self.window_nbytes, 0)
        if self.chunked:
            longest = max(self._longest_passage_nbytes() - self.passage_nbytes, 0)
            wanted = min(-(-4 * wanted // 3), wanted + longest)
        least, most = 0, 0
        if self.pipeline_nbytes:
            depth_nbytes = _PIPELINE_DEPTH * self._sizes.chunk_nbytes_per_element
            least, most = (
                max(depth_nbytes * numel - self.pipeline_nbytes, 0)
                for numel in (self.chunk_numel, self._largest_chunk())
            )
        return min(max(wanted + least, -(-3 * wanted // 2)), wanted + most)

    def _added_nbytes(self, index: int) -> int:
        """What a group that is in host memory for good adds to the minimum."""
        sizes = self._sizes
        gradient_nbytes = sizes.held_gradient_nbytes[index] if self.holds_gradients else 0
        return sizes.shard_nbytes[index] + sizes.state_nbytes[index] + gradient_nbytes

    def _smallest_chunk(self) -> int:
        largest = max((g.state_span.numel for g in self._sizes.streamed), default=SHARD_ALIGN_NUMEL)
        return min(smallest_chunk_numel(self._request), largest)

    def _chunk_nbytes(self, numel: int) -> int:
        return numel * self._sizes.chunk_nbytes_per_element

    def _buffers_nbytes(self, numel: int) -> int:
        """Buffers of so many elements, in the widest dtype that passes."""
        widest = max(GRAD_DTYPE.itemsize, *(g.shard_dtype.itemsize for g in self._request.groups))
        return PASSAGE_DEPTH * numel * widest

    @property
    def first_values_nbytes(self) -> int:
        """What the first values of the parameters need beyond a step."""
        return max(self._missing_for_staging() - self._sizes.working_set_nbytes, 0)

    def _missing_for_staging(self) -> int:
        """What the window adds to the parts that, empty before the first step, stage the initial values."""
        others = self.gradients_nbytes + self.transit_nbytes + self.pipeline_nbytes + self.passage_nbytes
        small_nbytes = self._request.small_staging_nbytes if self.chunked else None
        return max((self._request.staging_nbytes if small_nbytes is None else small_nbytes) - others, 0)

    def _pinned_nbytes(self) -> int:
        shard, state = self._sizes.shard_nbytes, self._sizes.state_nbytes
        whole_nbytes = sum(shard[i] for i in self.pinned_params) + sum(state[i] for i in self.pinned_states)
        return whole_nbytes + self._pinned_part_nbytes

    def terms(self) -> list[Term]:
        """The division as lines of the plan."""
        part = ", and a part of another's" if self.pinned_chunks else ""
        pinned = f"shards of {len(self.pinned_params)} and state of {len(self.pinned_states)} groups{part}, for good"
        n_waiting = len(self.updated_in_forward)
        waiting = f", {n_waiting} of them until the next forward" if n_waiting else ""
        held = {
            Schedule.OVERLAPPED: f"gradients on their way into the update{waiting}",
            Schedule.DEFERRED: "gradients held from backward to their update in the next forward",
        }.get(self._request.schedule, "gradients held until step()")
        chunk = format_nbytes(self._chunk_nbytes(self.chunk_numel))
        activations = Term("activations", self._request.activations_nbytes, "inputs of units, until their backward")
        passage = Term(
            "passage", self.passage_nbytes, f"chunks of {len(self.chunked)} groups that are too large to lie here"
        )
        terms = [
            Term("pinned", self._pinned_nbytes(), pinned),
            Term("window", self.window_nbytes, "parameter shards read ahead, in use, or being updated"),
            Term("gradients", self.gradients_nbytes, held),
            Term(
                "transit",
                self.transit_nbytes,
                f"gradients to and from the swap file ({len(self.spilled)} groups spill)",
            ),
            Term("pipeline", self.pipeline_nbytes, f"optimizer chunks of {chunk} being read, computed and written"),
        ]
        return [*terms, *(term for term in (passage, activations) if term.nbytes)]

    def _left_nbytes(self) -> int:
        return self._request.host_budget_nbytes - sum(term.nbytes for term in self.terms())

    def give_out(self) -> None:
        """Spend what the minimum leaves.

        Small groups first, then smooth flow, no spilling, pinning by value, window.
        """
        sizes = self._sizes
        self._hold_small()
        self._deepen_pipeline()
        self._lengthen_passage()
        self.window_nbytes = self._grown(self.window_nbytes, 2 * sizes.working_set_nbytes)
        if self.holds_gradients:
            self.transit_nbytes = self._grown(self.transit_nbytes, 2 * self.transit_nbytes)
            self._hold_gradients()
        else:
            self._wait_for_updates(2)
        self.window_nbytes = self._grown(self.window_nbytes, 4 * sizes.working_set_nbytes)
        self._pin_params()
        streamed = [g for g in sizes.streamed if g.index not in self.pinned_params | self.chunked]
        if not streamed:
            self.window_nbytes = self._missing_for_staging()  # nothing is read ahead any more
            if not self.holds_gradients:
                self._wait_for_updates(_GRADIENTS_AHEAD)
        self._pin_states()
        self.window_nbytes = self._grown(self.window_nbytes, sum(g.shard_nbytes for g in streamed))
        if not streamed:
            self.window_nbytes = 0
        if not self.holds_gradients:  # some may have to wait for the end of backward; see GradientSpill
            self.gradients_nbytes = self._grown(self.gradients_nbytes, sum(sizes.held_gradient_nbytes.values()))
        self.keep_at_turn, self.keep_at_boundary = self._kept(from_end=True), self._kept(from_end=False)
        self.updated_in_forward = self._left_for_forward()

    def _hold_small(self) -> None:
        """Everything of small groups; see [Note: small groups]."""
        for index in self._small:
            if self._added_nbytes(index) > self._left_nbytes():
                return
            self.pinned_params.add(index)
            if self._sizes.state_nbytes[index]:
                self.pinned_states.add(index)
            if self.holds_gradients:
                self.gradients_nbytes += self._sizes.held_gradient_nbytes[index]
                self.spilled.discard(index)

    def _wait_for_updates(self, n_units: int) -> None:
        """Room for the gradients of so many units that run one after another: one is computed, others wait."""
        units = self._sizes.unit_gradients_nbytes
        most_nbytes = max((sum(units[i : i + n_units]) for i in range(len(units))), default=0)
        self.gradients_nbytes = self._grown(self.gradients_nbytes, most_nbytes)

    def _deepen_pipeline(self) -> None:
        """Room for several chunks at a time, then for larger ones; with several drives for more that are not too short.

        A chunk's record mostly lies on one drive. Few chunks at a time may all lie on one, and whether they do changes
        with their length.

        The pipeline takes what it is given byte by byte, never in jumps: more memory must not leave less for the rest.
        So what small groups still need is not spare: they would take it away again at a larger budget.
        """
        if not self.pipeline_nbytes:
            return
        coming_nbytes = sum(self._added_nbytes(index) for index in self._small if index not in self.pinned_params)
        spare_nbytes = max(self._left_nbytes() - coming_nbytes, 0)
        depth_nbytes = _PIPELINE_DEPTH * self._sizes.chunk_nbytes_per_element  # per element of a chunk
        share_nbytes = self.pipeline_nbytes + spare_nbytes // 3  # growing the chunks may take a third of what is spare
        wanted_nbytes = max(depth_nbytes * self.chunk_numel, share_nbytes)
        self.pipeline_nbytes = min(
            wanted_nbytes, depth_nbytes * self._largest_chunk(), self.pipeline_nbytes + spare_nbytes
        )
        wanted_numel = self.pipeline_nbytes // depth_nbytes
        if self._request.n_drives > 1:
            wanted_numel = max(wanted_numel // _PARTS_FOR_DRIVES, min(wanted_numel, _LEAST_PART_NUMEL))
        self.chunk_numel = max(self.chunk_numel, align_down(wanted_numel, SHARD_ALIGN_NUMEL))

    def _lengthen_passage(self) -> None:
        """Longer chunks of what passes host memory, at most a quarter of what is spare."""
        if not self.chunked:
            return
        per_element = self._buffers_nbytes(1)
        wanted = min(self._longest_passage_nbytes(), self.passage_nbytes + max(self._left_nbytes(), 0) // 4)
        self.passage_numel = max(self.passage_numel, align_down(wanted // per_element, SHARD_ALIGN_NUMEL))
        self.passage_nbytes = self._buffers_nbytes(self.passage_numel)

    def _longest_passage_nbytes(self) -> int:
        largest = max(g.param_span.numel for g in self._request.groups if g.index in self.chunked)
        return min(_TARGET_PASSAGE_NBYTES, largest * self._buffers_nbytes(1))

    def _largest_chunk(self) -> int:
        if self._request.chunk_nbytes is not None:
            return self.chunk_numel
        largest = max(g.state_span.numel for g in self._sizes.streamed if g.trainable)
        target = align_down(_TARGET_CHUNK_NBYTES // max(self._sizes.state_nbytes_per_element, 4), SHARD_ALIGN_NUMEL)
        return max(self.chunk_numel, min(target, largest))

    def _grown(self, part_nbytes: int, wanted_nbytes: int) -> int:
        """What a part becomes: as much as is wanted, of what is left."""
        return max(part_nbytes, min(wanted_nbytes, part_nbytes + max(self._left_nbytes(), 0)))

    def _hold_gradients(self) -> None:
        """Keep as many gradients as fit in host memory; none in transit if all do."""
        sizes, always_spilled = self._sizes, self.chunked & self.spilled
        everything_nbytes = sum(sizes.held_gradient_nbytes[i] for i in self.spilled)
        if everything_nbytes <= self._left_nbytes() + self.transit_nbytes:
            self.gradients_nbytes += everything_nbytes
            self.spilled = set(always_spilled)
            self.transit_nbytes = 0
            return
        for index in sorted(self.spilled - always_spilled):
            if sizes.gradient_nbytes[index] <= self._left_nbytes():
                self.gradients_nbytes += sizes.gradient_nbytes[index]
                self.spilled.discard(index)
        self.notes.append(
            f"gradients of {len(self.spilled)} groups do not fit in host memory and go through the swap file; "
            "schedule='overlapped' avoids that where neither accumulation nor clipping is used"
        )

    def _pin_params(self) -> None:
        """Shards, those first that most units use."""
        sizes = self._sizes
        for group in sorted(sizes.streamed, key=lambda g: -sizes.uses[g.index]):
            is_here = group.index in self.pinned_params | self.chunked
            if not is_here and 0 < sizes.shard_nbytes[group.index] <= self._left_nbytes():
                self.pinned_params.add(group.index)

    def _pin_states(self) -> None:
        """State of groups all over the model, of the last one as many chunks as there is memory for.

        State that lies here is updated as fast as memory allows and leaves the drives nothing to do; for other state
        the optimizer waits for the drives. With the former in one part of the model a step would need both times, one
        after the other. In this order a larger budget holds what a smaller one does, and more.
        """
        state_nbytes = self._sizes.state_nbytes
        for group in spread(self._sizes.streamed):
            if group.index in self.pinned_states or not state_nbytes[group.index]:
                continue
            if state_nbytes[group.index] > self._left_nbytes():
                self._pin_chunks(group)
                return
            self.pinned_states.add(group.index)

    def _pin_chunks(self, group: FlatGroup) -> None:
        count, left_nbytes = 0, self._left_nbytes()
        for chunk in group.layout.cut(self.chunk_numel, group.state_span):
            nbytes = stored_nbytes(self._request.fields, chunk.numel)
            if self._pinned_part_nbytes + nbytes > left_nbytes:
                break
            self._pinned_part_nbytes += nbytes
            count += 1
        if count:
            self.pinned_chunks[group.index] = count

    def _left_for_forward(self) -> frozenset[int]:
        """Groups whose updates wait for the next forward; see [Note: balance of a step] in balance.py."""
        state_nbytes, kept = self._sizes.state_nbytes, self.keep_at_boundary
        held_nbytes = sum(state_nbytes[index] for index in self.pinned_states) + self._pinned_part_nbytes
        return updated_in_forward(
            self._request,
            self._sizes,
            room_nbytes=self.gradients_nbytes,
            held=self.pinned_states,
            held_part=held_nbytes / (sum(state_nbytes.values()) or 1),
            # What is kept from its update on would be read again for an update in the forward.
            able=lambda group: group.index not in kept,
        )

    def _kept(self, *, from_end: bool) -> frozenset[int]:
        """Groups whose copies are kept across the turn (the last ones) or the step boundary (the first ones)."""
        # Beside what is kept, the window always has room for one unit, so keeping never costs a read.
        room = self.window_nbytes - self._sizes.working_set_nbytes
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
        return frozenset(chosen)

    def lasting(self) -> frozenset[int]:
        """Groups whose gradients transit holds from the end of a backward to `step()`."""
        return lasting_gradients(self._request, self._sizes, self.spilled - self.chunked, self.transit_nbytes)

    def nvme_nbytes(self) -> int:
        """Space of the swap files. Where steps are durable, what trains takes it twice: the step before stays."""
        sizes = self._sizes
        total = self._request.stored_activations_nbytes
        for group in self._request.groups:
            i = group.index
            is_durable = self._request.is_durable
            copies = 2 if is_durable and group.trainable else 1
            total += copies * sizes.shard_nbytes[i] if is_durable or i not in self.pinned_params else 0
            total += copies * sizes.state_nbytes[i] if is_durable or i not in self.pinned_states else 0
            total -= self._pinned_part_nbytes if i in self.pinned_chunks and not is_durable else 0
            total += sizes.gradient_nbytes[i] if i in self.spilled else 0
        return total
