"""What a simulation is told: a placement, how long every unit computes, and how fast everything around it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from infinity.config import Schedule
from infinity.gradients import GRAD_DTYPE
from infinity.groups import FlatGroup, Unit
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.optim.hyper import StateField
from infinity.order import Phase
from infinity.passage import TRANSIT_NUMEL
from infinity.placement import Placement
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drives import DriveModel
from storage.align import align_up

_MOST_CHUNKS = 600  # of a whole step, which comes out up to 2% shorter than with as many as there are
_LEAST_CHUNKS = 4  # of a group that has as many: reads, kernels and writes of one group still overlap


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds that one micro-batch computes in a unit; recomputation counts as backward."""

    forward_s: float
    backward_s: float

    def of(self, phase: Phase) -> float:
        """Of one direction."""
        return self.forward_s if phase is Phase.FORWARD else self.backward_s


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast things around the device are, for one rank. Rates in bytes/s.

    Attributes:
        is_async: copies run beside the computation (a GPU); else the training thread makes them itself.
        h2d_bytes_per_s, d2h_bytes_per_s: link of the device.
        gather_bytes_per_s, reduce_bytes_per_s: of a whole unit between ranks; None on one rank.
        collective_s: latency of one collective.
        kernel_s: seconds the optimizer needs for one element.
        dram_bytes_per_s: host memory, shared by drives, links and the optimizer; None: no limit.
        hand_over_s: from one thread to another: of a transfer that ended to who waits for it, to the optimizer's worker
            and back.
        contention: what computing loses to what goes on beside it.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    kernel_s: float
    is_async: bool = True
    gather_bytes_per_s: float | None = None
    reduce_bytes_per_s: float | None = None
    collective_s: float = 0.0
    dram_bytes_per_s: float | None = None
    hand_over_s: float = 0.0
    contention: Contention = NO_CONTENTION


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything one simulated rank needs.

    Attributes:
        units, groups: sized for this rank; `group.flat_nbytes` is what is gathered on the device.
        times: by unit index; units that are not there take no time (the resident one may have time of its own).
        order: unit indices in the order of the forward.
    """

    units: Sequence[Unit]
    groups: Sequence[FlatGroup]
    fields: tuple[StateField, ...]
    placement: Placement
    times: Mapping[int, UnitTime]
    speeds: Speeds
    drives: Sequence[DriveModel]
    micro_batches: int = 1
    order: Sequence[int] = field(default=())

    @property
    def is_overlapped(self) -> bool:
        """Whether units are updated during backward."""
        return self.placement.schedule is Schedule.OVERLAPPED

    @property
    def update_nbytes(self) -> float:
        """Of host memory for one element that trains: gradient, parameter and state read, the last two written.

        28 with moments in fp32, whole or split master alike; 16 with moments of 8 bits.
        """
        trained = [group for group in self.groups if group.trainable]
        elements = sum(group.layout.payload_numel for group in trained)
        if not elements:
            return 0.0
        params = sum(group.layout.payload_numel * group.shard_dtype.itemsize for group in trained)
        state = sum(field.dtype.itemsize / field.block_numel for field in self.fields)
        return GRAD_DTYPE.itemsize + 2 * (params / elements + state)

    @property
    def streamed(self) -> list[Unit]:
        """Units that are gathered and released, in the order of the forward."""
        streamed = [unit for unit in self.units if not unit.resident]
        if not self.order:
            return streamed
        by_index = {unit.index: unit for unit in streamed}
        return [by_index[index] for index in self.order]

    @property
    def transit_numel(self) -> int:
        """Of a chunk of a gradient on its way to the swap file; larger than in a run where a step would have very many.

        They go down one after the other, so that nothing depends on their length but how soon the first one is written.
        """
        placement = self.placement
        leaving = placement.spilled_gradients - placement.lasting_gradients - placement.chunked
        sizes = [group.grad_span.numel for group in self.groups if group.index in leaving]
        if not sizes or self.speeds.contention.transfer_s:  # each transfer costs something of its own
            return TRANSIT_NUMEL
        longer = min(sum(sizes) // _MOST_CHUNKS, max(sizes) // _LEAST_CHUNKS)
        return align_up(max(TRANSIT_NUMEL, longer), SHARD_ALIGN_NUMEL)

    def coarse(self) -> Scenario:
        """The same with larger optimizer chunks where there would be very many.

        The pipeline keeps its depth; what changes is how finely reading, computing and writing interlock.
        """
        trainable = [g for g in self.groups if g.trainable]
        total = sum(g.layout.numel for g in trainable)
        if not total:
            return self
        fine = self.placement.chunk_numel
        wanted = total // _MOST_CHUNKS
        largest = max(g.layout.numel for g in trainable) // _LEAST_CHUNKS
        chunk = align_up(max(fine, min(wanted, largest)), SHARD_ALIGN_NUMEL)
        if chunk == fine:
            return self
        pipeline = int(self.placement.pipeline_nbytes * (chunk / fine)) + 1
        contention = self.speeds.contention
        # Nearly all transfers are of chunks: fewer of them, each of which costs what those do that it stands for.
        contention = replace(contention, transfer_s=contention.transfer_s * chunk / fine)
        return replace(
            self,
            placement=replace(self.placement, chunk_numel=chunk, pipeline_nbytes=pipeline),
            speeds=replace(self.speeds, contention=contention),
        )
