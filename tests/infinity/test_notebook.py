"""Notebooks: the cells run inside an event loop, in the thread that trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import infinity
from infinity.report.record import RunRecord
from infinity.report.recorder import RunRecorder
from tests.conftest import small_config
from tests.zoo import Net, build, train


def test_a_run_inside_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()

    async def cell() -> list[float]:
        model = build(Net)
        with infinity.offload(model, small_config(tmp_path / "swap")) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            with RunRecorder(optimizer, tmp_path / "run") as recorder:
                losses = train(model, optimizer, 0, 2)
                recorder.step(loss=losses[-1])
            engine.save(tmp_path / "saved", wait=False)
        return losses

    losses = asyncio.run(cell())
    assert RunRecord.load(tmp_path / "run").run["losses"] == losses[-1:]
    assert (tmp_path / "saved").is_dir()
    assert list((tmp_path / "swap").iterdir()) == []
