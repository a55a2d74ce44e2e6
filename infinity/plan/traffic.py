"""Closed forms: the NVMe bytes a step moves on one rank, by shard kind. The counters of a run must equal them exactly.

For one micro-batch, overlapped, everything on NVMe, bf16 split master: read 2 + 2 + 10 and write 12 bytes per
parameter (the parameter in forward and in backward, its state in the update), less what stays resident across the turn
and the step boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.config import Schedule
from infinity.gradients import GRAD_DTYPE
from infinity.groups import FlatGroup
from infinity.layout import Chunk, FlatSpan
from infinity.optim.hyper import StateField
from infinity.optim.records import record_nbytes, record_payload_nbytes
from infinity.placement import Placement


@dataclass(slots=True)
class KindTraffic:
    """Bytes of one shard kind, payload and alignment padding apart."""

    read_nbytes: int = 0
    write_nbytes: int = 0
    read_padding_nbytes: int = 0
    write_padding_nbytes: int = 0

    def add(self, group: FlatGroup, span: FlatSpan, itemsize: int, *, reads: int = 0, writes: int = 0) -> None:
        """Count transfers of what a rank holds of a group."""
        payload = group.layout.payload_in(span) * itemsize
        self.add_bytes(payload, span.numel * itemsize - payload, reads=reads, writes=writes)

    def add_bytes(self, payload: int, padding: int, *, reads: int, writes: int) -> None:
        """Count transfers of so many bytes."""
        self.read_nbytes += reads * payload
        self.read_padding_nbytes += reads * padding
        self.write_nbytes += writes * payload
        self.write_padding_nbytes += writes * padding


@dataclass(slots=True)
class StepTraffic:
    """Bytes of one step by kind."""

    param: KindTraffic = field(default_factory=KindTraffic)
    state: KindTraffic = field(default_factory=KindTraffic)
    grad: KindTraffic = field(default_factory=KindTraffic)

    @property
    def read_nbytes(self) -> int:
        """Bytes read in a step, without padding."""
        return self.param.read_nbytes + self.state.read_nbytes + self.grad.read_nbytes

    @property
    def write_nbytes(self) -> int:
        """Bytes written in a step, without padding."""
        return self.param.write_nbytes + self.state.write_nbytes + self.grad.write_nbytes


def expected_step_traffic(
    placement: Placement,
    groups: Sequence[FlatGroup],
    fields: Sequence[StateField],
    *,
    is_first: bool,
    micro_batches: int = 1,
) -> StepTraffic:
    """NVMe bytes of one optimizer step in which every unit runs once forward and once backward per micro-batch.

    A group that several units share is read for each of them.

    Args:
        is_first: the first step reads no state, because records are born zero, and finds nothing kept from before.
        micro_batches: backward passes before the step.
    """
    traffic = StepTraffic()
    records: dict[tuple[object, ...], tuple[int, int]] = {}  # of groups that are alike, as most are
    synchronous = placement.schedule is Schedule.SYNCHRONOUS
    overlapped = placement.schedule is Schedule.OVERLAPPED
    for group in groups:
        size = group.shard_dtype.itemsize
        if group.index not in placement.pinned_params:
            uses = placement.uses[group.index]
            at_boundary = group.index in placement.keep_at_boundary
            forward = micro_batches * uses - at_boundary * (micro_batches - is_first)
            backward = micro_batches * (uses - (group.index in placement.keep_at_turn))
            # An update that follows its backward at once finds the bytes, one that is deferred is followed by the
            # forward that uses the same read; others find what was kept. What passes in chunks is nowhere to be found.
            is_away = synchronous or (overlapped and uses > 1) or group.index in placement.chunked
            update = int(group.trainable and not at_boundary and is_away)
            reads, writes = forward + backward + update, int(group.trainable)
            if group.param_span == group.state_span:
                traffic.param.add(group, group.param_span, size, reads=reads, writes=writes)
            else:  # updates and trades its own span, and is given the others
                traffic.param.add(group, group.param_span, size, reads=forward + backward, writes=writes)
                traffic.param.add(group, group.state_span, size, reads=2 * update)
        elif placement.is_durable:
            traffic.param.add(group, group.param_span, size, writes=int(group.trainable))
        if group.index in placement.pinned_chunks:
            for chunk in group.layout.cut(placement.chunk_numel, group.state_span):
                if placement.stores_state(group.index, chunk.index):
                    is_read = not is_first and not placement.pins_state(group.index, chunk.index)
                    traffic.state.add_bytes(*_record_nbytes([chunk], fields), reads=int(is_read), writes=1)
        elif group.trainable and (placement.is_durable or group.index not in placement.pinned_states):
            is_read = not is_first and group.index not in placement.pinned_states
            alike = (group.layout.numel, group.state_span, *(tuple(slot.shape) for slot in group.layout.slots))
            if alike not in records:
                chunks = group.layout.cut(placement.chunk_numel, group.state_span)
                records[alike] = _record_nbytes(chunks, fields)
            traffic.state.add_bytes(*records[alike], reads=int(is_read), writes=1)
        if group.index in placement.spilled_gradients:
            size, is_lasting = GRAD_DTYPE.itemsize, group.index in placement.lasting_gradients
            writes = micro_batches - is_lasting
            traffic.grad.add(group, group.grad_span, size, reads=micro_batches - 1, writes=writes)
            traffic.grad.add(group, group.state_span, size, reads=int(not is_lasting))  # of the update
    return traffic


def _record_nbytes(chunks: Sequence[Chunk], fields: Sequence[StateField]) -> tuple[int, int]:
    """Bytes of the records of chunks, payload and alignment padding."""
    payload = sum(record_payload_nbytes(chunk, fields) for chunk in chunks)
    return payload, sum(record_nbytes(chunk, fields) for chunk in chunks) - payload
