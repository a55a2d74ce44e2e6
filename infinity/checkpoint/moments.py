"""The optimizer's state as tensors in memory, for `state_dict()` and `load_state_dict()` of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.agreement import AllRanks, OneRank
from infinity.checkpoint.given import GivenTensors, given_tensors
from infinity.checkpoint.live import LiveTensors
from infinity.checkpoint.tiers import Span, Tiers, blank_moment
from infinity.runtime import Runtime
from infinity.updates import Updates


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of one parameter: how often it was updated, and its moments by name, of the parameter's shape."""

    step: int
    moments: Mapping[str, torch.Tensor]


SlotStates = dict[tuple[int, int], SlotState]
"""By index of the group and number of the slot; parameters that were never updated are left out."""


def read_states(runtime: Runtime, live: LiveTensors) -> SlotStates:
    """Copies of all moments, whole, in fp32 on the CPU."""
    found: SlotStates = {}
    for index, state in runtime.states.items():
        for number, (slot, step) in enumerate(zip(state.group.layout.slots, state.steps, strict=True)):
            if step:
                moments = {moment: live.tensor(slot.name, moment) for moment in runtime.kernel.moments}
                found[index, number] = SlotState(step, moments)
    return found


def write_states(
    runtime: Runtime,
    updates: Updates,
    states: SlotStates,
    ranks: AllRanks | None = None,
    *,
    from_first: bool = False,
) -> None:
    """Replace all moments and step counts; what `states` leaves out starts as new. Parameters stay.

    Args:
        ranks: of several ranks, which have met.
        from_first: the first rank has the moments; the others' states only say how often each parameter was updated.

    Raises:
        CheckpointError: it failed on another rank.
        IterationError: an update was lost, or the running step has been applied in part.
    """
    what = "replacing the optimizer's state"
    with (ranks or OneRank()).together(what):
        updates.settle(what)
    names = {place: runtime.groups[place[0]].layout.slots[place[1]].name for place in states}
    tensors = {(names[p], moment): tensor for p, state in states.items() for moment, tensor in state.moments.items()}
    dtypes = {(names[p], moment): torch.float32 for p in sorted(states) for moment in runtime.kernel.moments}
    with (
        updates.consistency.replacing(what),
        given_tensors(tensors, dtypes, ranks, what, from_first=from_first) as source,
        Tiers(runtime) as tiers,
    ):
        for index, state in runtime.states.items():
            slots = [states.get((index, number)) for number in range(len(state.steps))]
            for span in tiers.spans(state.group):
                _replace(runtime, tiers, span, slots, source)
            state.steps[:] = [0 if slot is None else slot.step for slot in slots]


def _replace(
    runtime: Runtime, tiers: Tiers, span: Span, slots: Sequence[SlotState | None], source: GivenTensors
) -> None:
    # The rest of the record, the low halves of the master, belongs to the parameters and stays.
    values = tiers.read(span, param=False)
    for moment in runtime.kernel.moments:
        replaced = blank_moment(values, moment)
        for number, first, last, start in span.pieces():
            if slots[number] is not None:
                source.read(span.group.layout.slots[number].name, moment, start, replaced[first:last])
        runtime.kernel.encode(moment, replaced, values.state)
    if span.record is not None:
        is_used = any(slots[piece.slot] is not None for piece in span.record.chunk.pieces)
        tiers.write(values, param=False, state=is_used or span.record.is_initialised)
        if is_used and span.stop == span.record.chunk.stop:
            span.record.is_initialised = True
