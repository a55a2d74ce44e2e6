"""Initial values: turning a model's parameters into shards unit by unit.

`empty_init` (empty.py) builds on the `meta` device and records what constructors do. `fill_shards` then gives every
group its values: those that files hold stream into the shards piece by piece (weights/stream.py), those of an already
built model are copied, recorded ones are computed (recorded_init.py), and the others are initialised by their modules a
few at a time (materialise.py). So a model never exists whole in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.devices.base import Device
from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup, Unit
from infinity.initialisers import plan_initialisation
from infinity.materialise import (
    FirstValues,
    conversion_nbytes,
    initialising_nbytes,
    materialise,
)
from infinity.placing import PIECE_NBYTES, SMALL_PIECE_NBYTES, adopt, pieces_nbytes, place, sources_of
from infinity.rank_init import check_same_model, share_buffers
from infinity.recorded_init import RecordedValues
from infinity.recording.origins import is_recording
from infinity.runtime import Runtime
from infinity.staging import can_stage, is_large
from infinity.weights.match import Match
from infinity.weights.stream import (
    is_streamed,
    read_buffers,
    read_into,
    scratch_nbytes,
    stream_into_memory,
    stream_into_store,
    stream_nbytes,
)

_log = logging.getLogger(__name__)


def _is_meta(group: FlatGroup) -> bool:
    """Whether any parameter of the group has no data yet."""
    return any(parameter.is_meta for parameter in sources_of(group))


def is_empty(groups: Sequence[FlatGroup], values: FirstValues | None) -> bool:
    """Whether parameters have no data, and get first values that no file holds."""
    return (values is None or values.match is None) and any(map(_is_meta, groups))


def staging_nbytes(
    model: nn.Module,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    values: FirstValues | None = None,
) -> int:
    """Host bytes that initialisation holds at most beside the shards placed in host memory."""
    return _Needs(model, units, values or FirstValues(), PIECE_NBYTES, lambda nbytes: True).most_nbytes(groups)


def small_staging_nbytes(
    model: nn.Module, units: Sequence[Unit], groups: Sequence[FlatGroup], values: FirstValues | None, device: Device
) -> int | None:
    """The same where what is large is initialised in device memory; None where that cannot be. See staging.py."""
    values = values or FirstValues()
    others = [group for group in groups if not is_streamed(values.match, group)]
    empty = [group for group in others if _is_meta(group)]
    on_device = _initialising_nbytes(model, units, empty, values, is_large)
    if on_device and (not can_stage(device) or on_device > device.budget.limit_nbytes):
        return None
    return _Needs(model, units, values, SMALL_PIECE_NBYTES, lambda nbytes: not is_large(nbytes)).most_nbytes(groups)


def _initialising_nbytes(
    model: nn.Module,
    units: Sequence[Unit],
    empty: Sequence[FlatGroup],
    values: FirstValues,
    counts: Callable[[int], bool],
) -> int:
    """Bytes that giving first values to groups without data holds at most: recorded ones first, then the others."""
    recorded = RecordedValues(model, empty, values)
    others = [group for group in empty if group not in recorded.groups]
    return max(recorded.nbytes(counts), initialising_nbytes(model, units, others, values, counts))


@dataclass(frozen=True, slots=True)
class _Needs:
    """What initialisation needs of host memory.

    Attributes:
        piece_nbytes: of the pieces in which shards are written.
        counts: of memory in which a group or a parameter is initialised, by its size, whether it is the host's.
    """

    model: nn.Module
    units: Sequence[Unit]
    values: FirstValues
    piece_nbytes: int
    counts: Callable[[int], bool]

    def most_nbytes(self, groups: Sequence[FlatGroup]) -> int:
        """Of groups that are streamed out of files and of others, at the worst moment."""
        match = self.values.match
        streamed = [group for group in groups if is_streamed(match, group)]
        others = [group for group in groups if group not in streamed]
        reading = scratch_nbytes(others, self.piece_nbytes) if match is not None else 0
        return max(stream_nbytes(streamed, self.piece_nbytes), reading + self._filling_nbytes(others))

    def _filling_nbytes(self, groups: Sequence[FlatGroup]) -> int:
        # Pieces of this rank's shard, or of one that has its place in host memory, and one for another rank.
        ranks = [group for group in groups if group.sharding.size > 1]
        shared = 2 * max((pieces_nbytes(group, self.piece_nbytes) for group in ranks), default=0)
        empty = [group for group in groups if _is_meta(group)]
        initialising = _initialising_nbytes(self.model, self.units, empty, self.values, self.counts)
        copied = max((pieces_nbytes(group, self.piece_nbytes) for group in groups if group not in empty), default=0)
        if empty:
            in_pieces = [g for g in empty if not self.counts(g.layout.numel * g.source_dtype.itemsize)]
            converting = conversion_nbytes(empty, self.piece_nbytes)
            writing = max(converting, *(pieces_nbytes(group, self.piece_nbytes) for group in in_pieces), 0)
            return max(initialising + max(shared, writing), copied)
        return max(initialising, shared, copied)


def fill_shards(runtime: Runtime, values: FirstValues, on_progress: Callable[[str], None] | None = None) -> None:
    """Give every group its initial shard and put the stand-ins in place.

    Args:
        on_progress: told the key of every group that is done.

    Raises:
        UnsupportedModelError: parameters on `meta` that nothing initialises, or of which only some are on `meta`; or
            the model is still being built under `empty_init`.
    """
    if is_recording():
        raise UnsupportedModelError("infinity.offload was called inside infinity.empty_init(); call it after the block")
    match = values.match
    streamed = [group for group in runtime.groups if is_streamed(match, group)]
    others = [group for group in runtime.groups if group not in streamed]
    empty = [group for group in others if _is_meta(group)]
    recorded = RecordedValues(runtime.model, empty, values)
    recorded.refuse_unusable()
    unrecorded = [group for group in empty if group not in recorded.groups]
    for group in unrecorded:
        _refuse_half_built(group)
    _refuse_uninitialised(runtime.model, unrecorded, values)
    if unrecorded and values.init_fn is None:
        _tell_unrecorded(unrecorded)
    if runtime.lockstep is not None:
        check_same_model(runtime.lockstep, runtime.model, runtime.groups)

    def done(group: FlatGroup) -> None:
        if on_progress is not None:
            on_progress(group.key)

    if match is not None:
        read_buffers(runtime.model, match)
        for group in streamed:
            _stream(runtime, match, group)
            done(group)
    recorded.fill(runtime, done)  # before the others are copied, for it may replace random numbers in them
    for group in others:
        if group not in empty:
            if match is not None:
                read_into(runtime, match, group, sources_of(group))
            adopt(runtime, group)
            done(group)
    materialise(runtime, unrecorded, values, done)
    if runtime.lockstep is not None:
        share_buffers(runtime.lockstep, runtime.model)


def leave_uninitialised(runtime: Runtime) -> None:
    """Put the stand-ins in place of parameters whose values the swap files hold already.

    Raises:
        UnsupportedModelError: a buffer was built on `meta`.
    """
    RecordedValues(runtime.model, [], FirstValues(), is_first=False).fill(runtime, lambda group: None)
    materialise(runtime, [], FirstValues(), lambda group: None)
    for group in runtime.groups:
        group.put_stand_ins()


def _refuse_half_built(group: FlatGroup) -> None:
    for slot, source in zip(group.layout.slots, sources_of(group), strict=True):
        if not source.is_meta:
            raise UnsupportedModelError(
                f"parameter {slot.name!r} has data, but others of its unit are on the meta device; build the whole "
                "model under infinity.empty_init() or none of it"
            )


def _tell_unrecorded(groups: Sequence[FlatGroup]) -> None:
    names = [slot.name for group in groups for slot in group.layout.slots]
    _log.warning(
        "%d parameters have no memory and no record of their construction (%s, ...): they were made on the meta device "
        "outside infinity.empty_init(), or the model was copied after it. Their modules initialise them, in general "
        "with other values than ordinary construction. Copy and convert models inside infinity.empty_init()",
        *(len(names), names[0]),
    )


def _refuse_uninitialised(model: nn.Module, groups: Sequence[FlatGroup], values: FirstValues) -> None:
    """Refuse early what no step of the initialisation is for. What a step leaves out is found when it has run."""
    touched = {id(module) for step in plan_initialisation(model, values.init_fn).steps for module in step.touches}
    missing = [
        slot.name
        for group in groups
        for slot, owners in zip(group.layout.slots, group.owners, strict=True)
        if not values.has(slot.name) and not any(id(module) in touched for module, _ in owners)
    ]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UnsupportedModelError(
            f"nothing initialises {shown}: the modules that own them have no reset_parameters(). Pass "
            "infinity.offload(..., init_fn=function), which is called with every module that owns parameters, or "
            "weights=..."
        )


def _stream(runtime: Runtime, match: Match, group: FlatGroup) -> None:
    """Read the parameters of a group from files; what the model holds is not looked at."""
    group.take_over()
    group.put_stand_ins()
    if not runtime.copies[group.index].pinned:
        stream_into_store(runtime, match, group)
        return
    lease = runtime.pool.lease(group.shard_nbytes, group.key)
    shard = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.param_span.numel)
    stream_into_memory(runtime, match, group, shard)
    place(runtime, group, lease)
