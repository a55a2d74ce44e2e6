"""The plan of a run in words and numbers: what lies where, and what a step moves; of several ranks, for one of them."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.optim.hyper import payload_nbytes
from infinity.plan.traffic import StepTraffic, expected_step_traffic
from infinity.runtime import Runtime
from infinity.sizes import format_nbytes


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One part of a tier's budget."""

    tier: str
    what: str
    nbytes: int
    why: str


class Plan:
    """What the placement manager decided. Holds no engine state; made once.

    Attributes:
        parameters, trainable_parameters, state_bytes: of the whole model, on all `shards` ranks that share it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.placement = runtime.placement
        self._groups = runtime.groups
        self._fields = runtime.kernel.fields
        self.parameters = sum(group.layout.payload_numel for group in runtime.groups)
        self.trainable_parameters = sum(g.layout.payload_numel for g in runtime.groups if g.trainable)
        self.state_bytes = payload_nbytes(self._fields, self.trainable_parameters) + sum(
            group.layout.payload_numel * group.shard_dtype.itemsize for group in runtime.groups
        )
        self.units = len(runtime.units)
        self.shards = 1 if runtime.lockstep is None else runtime.lockstep.collectives.ranks.shards

    def table(self) -> list[PlanRow]:
        """Every part of every tier's budget."""
        placement = self.placement
        rows = [PlanRow("device", t.name, t.nbytes, t.why) for t in placement.device]
        rows += [PlanRow("host", t.name, t.nbytes, t.why) for t in placement.host if t.nbytes]
        why = "swap files: parameter shards, optimizer records, spilled gradients"
        if placement.is_durable:
            why += "; what trains twice, so that the step before is there until a step is committed"
        rows.append(PlanRow("nvme", "swap", placement.nvme_nbytes, why))
        return rows

    def describe(self) -> str:
        """The plan as text."""
        placement = self.placement
        lines = [f"{self.parameters} parameters in {self.units} units, {format_nbytes(self.state_bytes)} of state"]
        lines += [f"{r.tier:>6}  {format_nbytes(r.nbytes):>12}  {r.what}: {r.why}" for r in self.table()]
        lines.append(f"schedule: {placement.schedule.value} ({placement.schedule_reason})")
        return "\n".join([*lines, *placement.notes])

    def expected_traffic(self, step: int, micro_batches: int = 1) -> StepTraffic:
        """NVMe bytes that optimizer step `step` (0 is the first of this engine) moves, as a closed form."""
        return expected_step_traffic(
            self.placement, self._groups, self._fields, is_first=step == 0, micro_batches=micro_batches
        )
