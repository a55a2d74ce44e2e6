"""Small scenarios around the real placement, for tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.config import Schedule
from infinity.layout import SHARD_ALIGN_NUMEL
from infinity.plan.drives import DriveModel
from infinity.plan.scenario import Scenario, Speeds, UnitTime
from tests.scheduler.planned import FIELDS, UnitShape, plan

PAGE_NBYTES = SHARD_ALIGN_NUMEL * 4  # an alignment unit in fp32
DRIVES = (DriveModel(1e9, 5e8),)
TIME = UnitTime(1e-3, 2e-3)
SPEEDS = Speeds(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, kernel_s=1e-9)


def make_scenario(
    shapes: Sequence[UnitShape],
    *,
    schedule: Schedule = Schedule.OVERLAPPED,
    spare_nbytes: int = 0,
    drives: Sequence[DriveModel] = DRIVES,
    time: UnitTime = TIME,
    speeds: Speeds = SPEEDS,
    micro_batches: int = 1,
    in_chunks: bool = False,
) -> Scenario:
    """A scenario with a small host budget (see `plan`) and `spare_nbytes` more; every unit computes for `time`."""
    request, placement = plan(shapes, schedule, spare_nbytes, in_chunks=in_chunks)
    return Scenario(
        units=request.units,
        groups=request.groups,
        fields=FIELDS,
        placement=placement,
        times={unit.index: time for unit in request.units},
        speeds=speeds,
        drives=drives,
        micro_batches=micro_batches,
    )
