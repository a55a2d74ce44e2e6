"""What lies in the swap files of a run: every key with its bytes, in the order in which a store is asked for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infinity.gradients import GRAD_DTYPE, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.optim.records import GroupState
from infinity.placement import Placement


@dataclass(frozen=True, slots=True)
class SwapKey:
    """A key of the swap files. What is volatile is overwritten in place and lasts no longer than the run.

    `dtype` says what a durable store notes of it: the dtype of a shard, or "state".
    """

    key: str
    nbytes: int
    dtype: str
    is_volatile: bool = False


def swap_keys(groups: Sequence[FlatGroup], states: Mapping[int, GroupState], placement: Placement) -> Iterator[SwapKey]:
    """The keys of a placement, group by group: its shard, the records of its state, its gradient.

    Args:
        states: by group index, of the groups that train.
    """
    for group in groups:
        if placement.stores_param(group.index):
            yield SwapKey(group.key, group.shard_nbytes, str(group.shard_dtype))
        for record in states[group.index].records if group.index in states else ():
            if record.nbytes and placement.stores_state(group.index, record.chunk.index):
                yield SwapKey(record.key, record.nbytes, "state")
        if group.index in placement.spilled_gradients:
            yield SwapKey(gradient_key(group), gradient_nbytes(group), str(GRAD_DTYPE), is_volatile=True)
