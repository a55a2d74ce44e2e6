"""Training over several drives: what a drive refuses goes to the other, and neither bits nor traffic depend on it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import infinity
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.health import DriveState
from storage.types import Op
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, build, one_step

_STEPS = 5


def _plain() -> dict[str, torch.Tensor]:
    model = build(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in range(_STEPS):
        one_step(model, optimizer, number)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("fault", "state"), [(Fault.IO_ERROR, DriveState.FAILED), (Fault.NO_SPACE, DriveState.FULL)])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_a_drive_that_takes_nothing_more_does_not_end_the_run(
    offload: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    fault: Fault,
    state: DriveState,
) -> None:
    drives: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        drives.append(FaultyBackend(backend))
        return drives[-1]

    model = build(Net)
    paths = [tmp_path / "a", tmp_path / "b"]
    engine = offload(model, schedule=schedule, host={"budget": "440KiB"}, nvme={"paths": paths}, wrap_backend=wrap)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for number in range(_STEPS):
        if number == 2:
            engine.metrics()
            drives[1].inject(fault, op=Op.WRITE, times=None)
        one_step(model, optimizer, number)
    expected = _plain()
    for name, parameter in gathered_parameters(model).items():
        assert torch.equal(parameter, expected[name]), name
    assert [drive.state for drive in engine.drives] == [DriveState.OPEN, state]
    assert len([one for one in caplog.records if one.levelno == logging.WARNING and "takes no new" in one.message]) == 1
    _assert_counted(engine)


def _assert_counted(engine: infinity.Engine) -> None:
    """The closed forms of the traffic hold, and the drives' bytes add up to it."""
    metrics, traffic = engine.metrics(), engine.traffic
    for step, counted in enumerate(traffic.per_step[1:], start=1):
        assert counted["nvme_write_bytes"] == engine.plan.expected_traffic(step).write_nbytes
    for way in ("read", "write"):
        by_drive = [metrics[f"nvme/drive{number}/{way}_bytes"] for number in (0, 1)]
        assert all(by_drive)
        assert sum(by_drive) == metrics[f"nvme/{way}_bytes"]
        assert all(metrics[f"nvme/drive{number}/{way}_busy_s"] > 0 for number in (0, 1))


def test_without_swap_files_there_are_no_drives(offload: MakeEngine) -> None:
    engine = offload(build(Net), host={"budget": "64MiB"}, device={"kind": "cpu", "budget": "64MiB"})
    assert engine.drives == []
