"""Every kind of model gives the bits of plain PyTorch under both schedules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity
from tests.zoo import Net

SCHEDULES = ("overlapped", "synchronous")
HOSTS = {"roomy": "1MiB", "tight": "400KiB"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("host", HOSTS)
def test_plain(offload: MakeEngine, schedule: str, host: str) -> None:
    assert_parity(Loop(Net), offload, schedule=schedule, host={"budget": HOSTS[host]})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpointing", ["nr", "re", "span", "nested"])
def test_checkpointing(offload: MakeEngine, schedule: str, checkpointing: str) -> None:
    def make() -> Net:
        return Net(checkpointing=checkpointing)

    assert_parity(Loop(make), offload, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{"tied": True}, {"repeat": 3}, {"dropout": 0.3}], ids=str)
def test_awkward(offload: MakeEngine, schedule: str, options: dict[str, Any]) -> None:
    def make() -> Net:
        return Net(**options)

    assert_parity(Loop(make), offload, schedule=schedule, check_traffic="dropout" in options)
