"""A throttled drive and its model: the same bytes, and the same seconds on a clock whose time is virtual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import infinity
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.plan.drives import DriveModel
from infinity.plan.observed import Calibration, scenario_of_run
from infinity.plan.simulate import Simulated, simulate
from infinity.testing.clock import VirtualClock
from storage.backends.base import Backend
from storage.backends.throttled import Throttle, ThrottledBackend
from storage.stripes import Piece, overlap
from storage.types import Op

SHAPE = GptShape(layers=4, hidden=64, heads=4, seq=16)
READ_BYTES_PER_S, WRITE_BYTES_PER_S, ANY_BYTES_PER_S = 6e6, 4e6, 1e18


def bytes_by_drive(result: Simulated, layout: Mapping[str, Sequence[Piece]], n_drives: int) -> dict[Op, list[int]]:
    """What the last step of a simulation moves on each drive of the store that has this layout."""
    moved = {op: [0] * n_drives for op in Op}
    for each in result.transfers:
        if each.tag.step == len(result.steps_s) - 1:
            for piece, start, stop in overlap(layout[each.key], each.offset, each.offset + each.nbytes):
                moved[each.op][piece.extent.drive] += stop - start
    return moved


@pytest.mark.parametrize("n_drives", [1, 2])
@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
def test_a_throttled_run_takes_the_bytes_and_seconds_of_its_prediction(
    tmp_path: Path, schedule: str, n_drives: int
) -> None:
    clocks: list[tuple[VirtualClock, VirtualClock]] = []

    def wrap(backend: Backend) -> Backend:
        reads, writes = VirtualClock(), VirtualClock()  # time that both slept through would count twice
        clocks.append((reads, writes))
        slow = ThrottledBackend(backend, Throttle(READ_BYTES_PER_S, ANY_BYTES_PER_S), reads)
        return ThrottledBackend(slow, Throttle(ANY_BYTES_PER_S, WRITE_BYTES_PER_S), writes)

    folders = [tmp_path / str(number) for number in range(n_drives)]
    for folder in folders:
        folder.mkdir()
    config = infinity.Config(
        precision="fp32",
        schedule=schedule,
        device={"kind": "cpu", "budget": "2MiB"},
        host={"budget": "2MiB"},
        nvme={"paths": folders},
    )
    model = Gpt(SHAPE)
    init_weights(model)
    inputs = torch.zeros(1, 16, dtype=torch.long)
    with infinity.offload(model, config, wrap_backend=wrap) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(3):
            model(inputs, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.metrics()  # everything written has landed
        ahead_nbytes = engine._runtime.placement.window_nbytes
        reports, traffic = engine.drives, engine.traffic.per_step[-1]
        drives = (DriveModel(READ_BYTES_PER_S, WRITE_BYTES_PER_S, latency_s=0.0, duplex=1.0),) * n_drives
        calibration = Calibration(thread_s=0.0, kernel_s=0.0, drives=drives, steps=1, measured_s=1.0)
        layout = {key: stored.pieces for key, stored in engine._runtime.store._keys.items()}
        predicted = simulate(scenario_of_run(engine._runtime, calibration, micro_batches=1, recompute=False))
    # The throttle took the time of every byte that its drive moved.
    assert len(clocks) == n_drives
    for (reads, writes), report in zip(clocks, reports, strict=True):
        read_s = report.read.nbytes / READ_BYTES_PER_S
        ahead_s = ahead_nbytes / READ_BYTES_PER_S  # under way for the next step when the bytes were counted
        assert read_s * 0.999 <= reads.now_s() <= read_s * 1.001 + ahead_s
        assert writes.now_s() == pytest.approx(report.write.nbytes / WRITE_BYTES_PER_S, rel=1e-3)
    # A step is predicted with the bytes that were counted, and takes the seconds that the throttle takes for them.
    read_nbytes = traffic["nvme_read_bytes"] + traffic["nvme_read_padding_bytes"]
    write_nbytes = traffic["nvme_write_bytes"] + traffic["nvme_write_padding_bytes"]
    assert (predicted.read_nbytes, predicted.write_nbytes) == (read_nbytes, write_nbytes)
    moved = bytes_by_drive(predicted, layout, n_drives)
    assert (sum(moved[Op.READ]), sum(moved[Op.WRITE])) == (read_nbytes, write_nbytes)
    read_s, write_s = max(moved[Op.READ]) / READ_BYTES_PER_S, max(moved[Op.WRITE]) / WRITE_BYTES_PER_S
    assert predicted.busy_s["drive read"] == pytest.approx(read_s, rel=1e-3)
    assert predicted.busy_s["drive write"] == pytest.approx(write_s, rel=1e-3)
    least_s = max(read_nbytes / READ_BYTES_PER_S, write_nbytes / WRITE_BYTES_PER_S) / n_drives
    most_s = read_nbytes / READ_BYTES_PER_S + write_nbytes / WRITE_BYTES_PER_S
    assert least_s * 0.999 <= predicted.step_s <= most_s * 1.001
