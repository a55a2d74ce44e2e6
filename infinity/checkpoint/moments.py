"""The optimizer's state as tensors in memory, for `state_dict()` and `load_state_dict()` of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.checkpoint.agreement import AllRanks
from infinity.checkpoint.tiers import Tiers, blank_moment
from infinity.groups import FlatGroup
from infinity.runtime import Runtime
from infinity.updates import Updates


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of one parameter: how often it was updated, and its moments by name, of the parameter's shape."""

    step: int
    moments: Mapping[str, torch.Tensor]


SlotStates = dict[tuple[int, int], SlotState]
"""By index of the group and number of the slot; parameters that were never updated are left out."""


def read_states(runtime: Runtime, updates: Updates, ranks: AllRanks | None = None) -> SlotStates:
    """Copies of all moments, in fp32 on the CPU; on every rank whole.

    Args:
        ranks: of several ranks, which have met.

    Raises:
        IterationError: an update was lost, or the running step has been applied in part.
    """
    if ranks is None:
        return _read_own(runtime, updates)
    with ranks.together("reading the optimizer's state"):
        found = _read_own(runtime, updates)
    for index, state in runtime.states.items():
        for moment in runtime.kernel.moments:
            _trade(ranks, state.group, {n: found[i, n].moments[moment] for i, n in found if i == index})
    return found


def _trade(ranks: AllRanks, group: FlatGroup, tensors: Mapping[int, torch.Tensor]) -> None:
    """Give the other ranks this one's part of tensors, by slot of the group, and take theirs."""
    if not tensors:
        return
    flat = torch.zeros(group.layout.numel)
    slots = {number: slice(group.layout.slots[number].offset, group.layout.slots[number].stop) for number in tensors}
    for number, place in slots.items():
        flat[place] = tensors[number].view(-1)  # outside of this rank's part they are overwritten
    own = group.state_span
    others = [shard for shard in range(group.sharding.size) if shard != group.sharding.rank]
    spans = ((shard, group.span_of(shard)) for shard in others)
    targets = ((shard, flat[span.start : span.stop]) for shard, span in spans)
    for _ in ranks.collectives.trade(flat[own.start : own.stop], targets):
        pass
    for number, place in slots.items():
        tensors[number].view(-1).copy_(flat[place])


def _read_own(runtime: Runtime, updates: Updates) -> SlotStates:
    updates.consistency.check()
    updates.settle("reading the optimizer's state")
    found: SlotStates = {}
    names = runtime.kernel.moments
    for index, state in runtime.states.items():
        for number, (slot, step) in enumerate(zip(state.group.layout.slots, state.steps, strict=True)):
            if step:
                found[index, number] = SlotState(step, {moment: torch.empty(slot.shape) for moment in names})
    with Tiers(runtime) as tiers:
        for index, state in runtime.states.items():
            for span in tiers.spans(state.group):
                values = tiers.read(span, param=False)
                decoded = {moment: runtime.kernel.decode(moment, values.state) for moment in names}
                for number, first, last, start in span.pieces():
                    if (index, number) in found:
                        for moment, tensor in found[index, number].moments.items():
                            flat = tensor.view(-1)[start : start + last - first]
                            flat.copy_(decoded[moment][first:last])
    return found


def write_states(runtime: Runtime, updates: Updates, states: SlotStates) -> None:
    """Replace all moments and step counts; what `states` leaves out starts as new. Parameters stay.

    Raises:
        IterationError: an update was lost, or the running step has been applied in part.
    """
    updates.settle("replacing the optimizer's state")
    with updates.consistency.replacing("replacing the optimizer's state"), Tiers(runtime) as tiers:
        for index, state in runtime.states.items():
            slots = [states.get((index, number)) for number in range(len(state.group.layout.slots))]
            for span in tiers.spans(state.group):
                # The rest of the record, the low halves of the master, belongs to the parameters and stays.
                values = tiers.read(span, param=False)
                replaced = {moment: blank_moment(values, moment) for moment in runtime.kernel.moments}
                for number, first, last, start in span.pieces():
                    new = slots[number]
                    if new is not None:
                        for moment, tensor in new.moments.items():
                            flat = tensor.reshape(-1)[start : start + last - first]
                            replaced[moment][first:last].copy_(flat)
                for moment, tensor in replaced.items():
                    runtime.kernel.encode(moment, tensor, values.state)
                if span.record is not None:
                    is_used = any(slots[piece.slot] is not None for piece in span.record.chunk.pieces)
                    tiers.write(values, param=False, state=is_used or span.record.is_initialised)
                    if is_used and span.stop == span.record.chunk.stop:
                        span.record.is_initialised = True
            state.steps[:] = [0 if slot is None else slot.step for slot in slots]
