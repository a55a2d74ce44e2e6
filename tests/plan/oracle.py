"""The best schedule of a small step, by trying all of them.

The oracle knows everything and may do what the engine's policies never would, idling on purpose included. It keeps to
what any schedule has to keep to: shards are read in the order of their use, a unit's state after its gradient has
arrived, and the budgets for shards, gradients and chunks hold. Reads and writes have a channel each (duplex 1, no
latency), copies to the device take no time, kernels run one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from infinity.gradients import gradient_nbytes
from infinity.order import Phase
from infinity.plan.scenario import Scenario


@dataclass(frozen=True)
class Problem:
    """One step of `n` units in seconds and bytes. Chunks are (read_s, kernel_s, write_s, buffer_nbytes)."""

    shard: tuple[int, ...]
    read_s: tuple[float, ...]
    gradient: tuple[int, ...]
    chunks: tuple[tuple[tuple[float, float, float, int], ...], ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_at_turn: frozenset[int]
    kept_at_boundary: frozenset[int]
    window: int
    gradients: int
    pipeline: int

    @property
    def accesses(self) -> list[tuple[Phase, int]]:
        units = range(len(self.shard))
        return [(Phase.FORWARD, u) for u in units] + [(Phase.BACKWARD, u) for u in reversed(units)]


def problem_of(scenario: Scenario) -> Problem:
    """The problem behind an overlapped scenario of trained units with one group each and nothing pinned."""
    placement, (drive,) = scenario.placement, scenario.drives
    read, write = drive.read_bytes_per_s, drive.write_bytes_per_s
    state = sum(f.dtype.itemsize for f in scenario.fields)
    chunks = []
    for group in scenario.groups:
        mine = []
        for chunk in group.layout.cut(placement.chunk_numel):
            record, param = chunk.numel * state, chunk.numel * group.shard_dtype.itemsize
            kernel_s = chunk.payload_numel * scenario.speeds.kernel_s
            mine.append((record / read, kernel_s, (record + param) / write, record))
        chunks.append(tuple(mine))
    times = [scenario.times[unit.index] for unit in scenario.units]
    return Problem(
        shard=tuple(g.shard_nbytes for g in scenario.groups),
        read_s=tuple(g.shard_nbytes / read for g in scenario.groups),
        gradient=tuple(gradient_nbytes(g) for g in scenario.groups),
        chunks=tuple(chunks),
        forward_s=tuple(t.forward_s for t in times),
        backward_s=tuple(t.backward_s for t in times),
        kept_at_turn=placement.keep_at_turn,
        kept_at_boundary=placement.keep_at_boundary,
        window=placement.window_nbytes,
        gradients=placement.gradients_nbytes,
        pipeline=placement.pipeline_nbytes,
    )


@dataclass
class _State:
    """Where everything is at `now_s`. `reading` is (end_s, access or None, chunk or None)."""

    now_s: float = 0.0
    reading: tuple[float, int | None, tuple[int, int] | None] | None = None
    next_read: int = 0  # of the accesses that need one
    here: frozenset[int] = frozenset()  # accesses whose bytes have arrived
    access: int = 0
    computes_until_s: float | None = None
    gradient_waits: bool = False
    submitted: tuple[tuple[int, int], ...] = ()  # chunks whose state may be read, in order
    next_state: int = 0
    kernel_queue: tuple[tuple[int, int], ...] = ()
    kernel: tuple[float, tuple[int, int]] | None = None
    write_queue: tuple[tuple[int, int], ...] = ()
    writing: tuple[float, tuple[int, int]] | None = None
    unwritten: dict[int, int] = field(default_factory=dict)  # chunks left, by unit
    window: int = 0
    gradients: int = 0
    pipeline: int = 0


class Oracle:
    """Finds the shortest step, or whether there is one shorter than a limit."""

    def __init__(self, problem: Problem) -> None:
        self._p = problem
        self._accesses = problem.accesses
        self._reads = [
            number
            for number, (phase, unit) in enumerate(self._accesses)
            if phase is Phase.FORWARD or unit not in problem.kept_at_turn
        ]
        self._best_s = math.inf
        self._tried: dict[object, list[tuple[float, ...]]] = {}
        self.visited = 0

    def shortest_s(self, below_s: float = math.inf) -> float:
        """Seconds of the shortest step; `below_s` when none is shorter than that."""
        self._best_s = below_s
        self._search(_State())
        return self._best_s

    def _search(self, state: _State) -> None:
        self.visited += 1
        while True:
            self._settle(state)
            if state.access == len(self._accesses) and not self._is_busy(state):
                self._best_s = min(self._best_s, state.now_s)
                return
            if self._bound_s(state) >= self._best_s * (1 - 1e-9):
                return
            options = self._options(state) if state.reading is None else []
            if options and not self._is_new(state):
                return
            if options:
                for option in options:
                    self._search(self._begin(state, option))
                if len(options) == 2 or not self._may_wait(state, options[0]):
                    return
            if not self._advance(state):
                return  # nothing will ever happen: this schedule is stuck

    def _is_new(self, state: _State) -> bool:
        """False when a decision like this one, at the same moment or an earlier one, has been tried out already."""
        key = (
            state.next_read,
            state.next_state,
            state.access,
            state.gradient_waits,
            state.here,
            state.submitted,
            state.kernel_queue,
            state.write_queue,
            tuple(sorted(state.unwritten.items())),
            state.kernel and state.kernel[1],
            state.writing and state.writing[1],
            state.computes_until_s is None,
        )
        ends = (
            state.now_s,
            state.computes_until_s or 0.0,
            state.kernel[0] if state.kernel else 0.0,
            state.writing[0] if state.writing else 0.0,
        )
        tried = self._tried.setdefault(key, [])
        if any(all(a <= b for a, b in zip(one, ends, strict=True)) for one in tried):
            return False
        tried.append(ends)
        return True

    # Decisions -------------------------------------------------------------------------------------------------

    def _options(self, state: _State) -> list[str]:
        p, found = self._p, []
        if state.next_state < len(state.submitted):
            unit, number = state.submitted[state.next_state]
            if state.pipeline + p.chunks[unit][number][3] <= p.pipeline:
                found.append("state")
        if state.next_read < len(self._reads):
            unit = self._accesses[self._reads[state.next_read]][1]
            # There is one copy of a shard: it is not read again while the one before waits for its use.
            is_free = all(self._accesses[a][1] != unit for a in self._held(state))
            if is_free and state.window + p.shard[unit] <= p.window:
                found.append("shard")
        return found

    def _held(self, state: _State) -> list[int]:
        """Accesses whose copy is on its way or waits for its use; a forward that computes has the device's."""
        first = state.access
        if state.computes_until_s is not None and self._accesses[first][0] is Phase.FORWARD:
            first += 1
        return [a for a in self._reads[: state.next_read] if a >= first]

    def _may_wait(self, state: _State, option: str) -> bool:
        """Whether the other kind of read may become possible, so that leaving the channel idle could pay."""
        if option == "state":
            return state.next_read < len(self._reads)
        return state.access < len(self._accesses) or state.next_state < len(state.submitted)

    def _begin(self, state: _State, option: str) -> _State:
        p = self._p
        new = replace(state, unwritten=dict(state.unwritten))
        if option == "state":
            unit, number = state.submitted[state.next_state]
            read_s, _, _, buffer = p.chunks[unit][number]
            new.reading = (state.now_s + read_s, None, (unit, number))
            new.next_state += 1
            new.pipeline += buffer
        else:
            access = self._reads[state.next_read]
            unit = self._accesses[access][1]
            new.reading = (state.now_s + p.read_s[unit], access, None)
            new.next_read += 1
            new.window += p.shard[unit]
        return new

    # Everything that follows by itself -------------------------------------------------------------------------

    def _settle(self, state: _State) -> None:
        """Start what can start now without a decision."""
        p = self._p
        changed = True
        while changed:
            changed = False
            if state.access < len(self._accesses) and state.computes_until_s is None:
                phase, unit = self._accesses[state.access]
                if state.gradient_waits:
                    if state.gradients + p.gradient[unit] <= p.gradients:
                        state.gradients += p.gradient[unit]
                        state.gradient_waits = False
                        state.submitted += tuple((unit, number) for number in range(len(p.chunks[unit])))
                        state.unwritten[unit] = len(p.chunks[unit])
                        state.access += 1
                        changed = True
                elif self._is_here(state, state.access):
                    seconds = p.forward_s[unit] if phase is Phase.FORWARD else p.backward_s[unit]
                    state.computes_until_s = state.now_s + seconds
                    if phase is Phase.FORWARD and unit not in p.kept_at_turn:
                        state.window -= p.shard[unit]  # the device has its own copy
                    changed = True
            if state.kernel is None and state.kernel_queue:
                (unit, number), *rest = state.kernel_queue
                state.kernel_queue = tuple(rest)
                state.kernel = (state.now_s + p.chunks[unit][number][1], (unit, number))
                changed = True
            if state.writing is None and state.write_queue:
                (unit, number), *rest = state.write_queue
                state.write_queue = tuple(rest)
                state.writing = (state.now_s + p.chunks[unit][number][2], (unit, number))
                changed = True

    def _is_here(self, state: _State, access: int) -> bool:
        phase, unit = self._accesses[access]
        if phase is Phase.BACKWARD and unit in self._p.kept_at_turn:
            return True
        return access in state.here

    def _advance(self, state: _State) -> bool:
        """Go to the next moment at which something ends. False when nothing is under way."""
        p = self._p
        ends = [each[0] for each in (state.reading, state.kernel, state.writing) if each is not None]
        if state.computes_until_s is not None:
            ends.append(state.computes_until_s)
        if not ends:
            return False
        state.now_s = min(ends)
        if state.reading is not None and state.reading[0] <= state.now_s:
            _, access, chunk = state.reading
            state.reading = None
            if access is not None:
                state.here |= {access}
            if chunk is not None:
                state.kernel_queue += (chunk,)
        if state.computes_until_s is not None and state.computes_until_s <= state.now_s:
            state.computes_until_s = None
            if self._accesses[state.access][0] is Phase.FORWARD:
                state.access += 1
            else:
                state.gradient_waits = True
        if state.kernel is not None and state.kernel[0] <= state.now_s:
            state.write_queue += (state.kernel[1],)
            state.kernel = None
        if state.writing is not None and state.writing[0] <= state.now_s:
            unit, number = state.writing[1]
            state.writing = None
            state.pipeline -= p.chunks[unit][number][3]
            state.unwritten[unit] -= 1
            if not state.unwritten[unit]:
                state.gradients -= p.gradient[unit]
                if unit not in p.kept_at_boundary:
                    state.window -= p.shard[unit]
        return True

    def _is_busy(self, state: _State) -> bool:
        under_way = (state.reading, state.kernel, state.writing)
        waiting = state.kernel_queue or state.write_queue or state.next_state < len(state.submitted)
        return any(each is not None for each in under_way) or bool(waiting)

    def _bound_s(self, state: _State) -> float:
        """No end can be earlier: what compute, reads, and writes still have to do."""
        p = self._p
        compute_s = 0.0
        if state.computes_until_s is not None:
            compute_s = state.computes_until_s - state.now_s
        first = state.access + (state.computes_until_s is not None or state.gradient_waits)
        for phase, unit in self._accesses[first:]:
            compute_s += p.forward_s[unit] if phase is Phase.FORWARD else p.backward_s[unit]
        read_s = 0.0 if state.reading is None else state.reading[0] - state.now_s
        read_s += sum(p.read_s[self._accesses[a][1]] for a in self._reads[state.next_read :])
        write_s = 0.0 if state.writing is None else state.writing[0] - state.now_s
        done = set(state.unwritten)
        late = [unit for unit in range(len(p.shard)) if unit not in done]
        queued = [*state.write_queue, *state.kernel_queue, *state.submitted[state.next_state :]]
        if state.kernel is not None:
            queued.append(state.kernel[1])
        if state.reading is not None and state.reading[2] is not None:
            queued.append(state.reading[2])
        queued += [(unit, number) for unit in late for number in range(len(p.chunks[unit]))]
        write_s += sum(p.chunks[unit][number][2] for unit, number in queued)
        unread = [*state.submitted[state.next_state :]]
        unread += [(unit, number) for unit in late for number in range(len(p.chunks[unit]))]
        read_s += sum(p.chunks[unit][number][0] for unit, number in unread)
        tail_s = min((p.chunks[u][n][1] + p.chunks[u][n][2] for u, n in unread), default=0.0)
        last_s = 0.0
        if late:  # after the last backward one whole update is still to come, its chunks one behind the other
            chunks = p.chunks[0]
            reads_s, writes_s = sum(c[0] for c in chunks), sum(c[2] for c in chunks)
            after_reads_s = min(c[1] + c[2] for c in chunks)
            before_writes_s = min(c[0] + c[1] for c in chunks)
            last_s = max(reads_s + after_reads_s, before_writes_s + writes_s)
        return state.now_s + max(compute_s + last_s, read_s + tail_s, write_s)
