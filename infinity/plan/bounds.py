"""Lower bounds: what every resource of one rank needs for a step if it never waits for another one.

No schedule can be faster than the slowest resource: what it has to move or compute in a step, over its rate.
"""

from __future__ import annotations

from itertools import pairwise

from infinity.config import Schedule
from infinity.gradients import gradient_nbytes
from infinity.order import Phase
from infinity.plan.scenario import Scenario
from infinity.plan.traffic import StepTraffic, expected_step_traffic


def scenario_traffic(scenario: Scenario) -> StepTraffic:
    """NVMe bytes of a step that is not the first, in closed form."""
    return expected_step_traffic(
        scenario.placement, scenario.groups, scenario.fields, is_first=False, micro_batches=scenario.micro_batches
    )


def moved_nbytes(traffic: StepTraffic) -> tuple[int, int]:
    """Bytes that drives read and write, alignment padding included."""
    kinds = (traffic.param, traffic.state, traffic.grad)
    return (
        sum(kind.read_nbytes + kind.read_padding_nbytes for kind in kinds),
        sum(kind.write_nbytes + kind.write_padding_nbytes for kind in kinds),
    )


def lower_bounds(scenario: Scenario) -> dict[str, float]:
    """Seconds by resource: what each of them is busy in one step. The largest is the bound of the step."""
    speeds, m = scenario.speeds, scenario.micro_batches
    resident = {g.index for unit in scenario.units if unit.resident for g in unit.groups}
    streamed = [g for g in scenario.groups if g.index not in resident]
    uses = scenario.placement.uses
    passes = 2 * m  # forward and backward of every micro-batch
    up = sum(g.shard_nbytes * passes * uses.get(g.index, 1) for g in streamed)
    down = sum(gradient_nbytes(g) * m for g in scenario.groups if g.trainable)
    compute_s = m * sum(t.of(Phase.FORWARD) + t.of(Phase.BACKWARD) for t in scenario.times.values())
    if not speeds.is_async:  # what a CPU may compute with where it lies takes no time
        kept = scenario.placement.pinned_params | scenario.placement.chunked
        copied = [g for g in streamed if g.index in kept or not g.is_stored_as_computed]
        up = sum(g.shard_nbytes * passes * uses.get(g.index, 1) for g in copied)
    h2d_s, d2h_s = up / speeds.h2d_bytes_per_s, down / speeds.d2h_bytes_per_s
    bounds = {"compute": compute_s}
    if speeds.is_async:
        bounds |= {"host to device": h2d_s, "device to host": d2h_s}
    else:  # the training thread copies by itself
        bounds["compute"] += h2d_s + d2h_s
    read, write = moved_nbytes(scenario_traffic(scenario))
    bounds["nvme"] = nvme_s(scenario, read, write)
    elements = sum(g.layout.payload_numel for g in scenario.groups if g.trainable)
    bounds["optimizer"] = elements * speeds.kernel_s
    if speeds.dram_bytes_per_s is not None:
        moved = read + write + elements * scenario.update_nbytes
        if speeds.is_async:
            moved += up + down
        bounds["host memory"] = moved / speeds.dram_bytes_per_s
    if speeds.gather_bytes_per_s is not None:
        whole = sum(g.flat_nbytes * uses.get(g.index, 1) for g in streamed)
        bounds["all-gather"] = passes * whole / speeds.gather_bytes_per_s
    if speeds.reduce_bytes_per_s is not None:
        reduced = sum(g.flat_nbytes for g in scenario.groups if g.trainable)
        bounds["reduce-scatter"] = m * reduced / speeds.reduce_bytes_per_s
    return bounds


def element_s(scenario: Scenario) -> float:
    """Seconds of the optimizer for one element: its kernel's, or those of the host memory that the update shares.

    An update takes its own bytes from host memory, and what drives and links move for it in the meantime: its state,
    the new parameter, and one gradient and its parameter on the way to the device and back. The sum does
    not depend on how fast these are, so a faster drive never makes the optimizer slower.
    """
    speeds = scenario.speeds
    trained = [group for group in scenario.groups if group.trainable]
    elements = sum(group.layout.payload_numel for group in trained)
    if speeds.dram_bytes_per_s is None or not elements:
        return speeds.kernel_s
    traffic = scenario_traffic(scenario)
    moved = traffic.state.read_nbytes + traffic.write_nbytes
    if speeds.is_async and scenario.placement.schedule is not Schedule.SYNCHRONOUS:
        moved += sum(2 * group.shard_nbytes + gradient_nbytes(group) for group in trained)
    return max(speeds.kernel_s, (scenario.update_nbytes + moved / elements) / speeds.dram_bytes_per_s)


def nvme_s(scenario: Scenario, read_nbytes: int, write_nbytes: int) -> float:
    """Least seconds in which the drives move so much, wherever the bytes lie.

    What the drives can move together in a second is a convex region, the sum of what each can; a mix fits into it when
    it lies on the inner side of each of its edges.
    """
    if not scenario.drives:
        return 0.0
    each = [drive.corners() for drive in scenario.drives]
    edges = [(after[1] - before[1], before[0] - after[0]) for corners in each for before, after in pairwise(corners)]
    return max(
        (p * read_nbytes + q * write_nbytes)
        / sum(max(p * read + q * write for read, write in corners) for corners in each)
        for p, q in [(1.0, 0.0), (0.0, 1.0), *edges]
    )
