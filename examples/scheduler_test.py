"""Testing without a GPU: a device whose memory is a file, so that what is resident can be looked at.

pytest examples/scheduler_test.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity


def engine_on_a_fake_gpu(model: nn.Module, folder: Path) -> infinity.Engine:
    config = infinity.Config(
        precision="fp32",
        device={"kind": "fake", "budget": "1MiB", "h2d_bytes_per_s": "1GiB", "latency_s": 1e-4},
        host={"budget": "1MiB"},
        nvme={"paths": [folder]},
        resident_threshold=0,
    )
    return infinity.offload(model, config)


def test_every_read_but_the_first_is_ahead(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    with engine_on_a_fake_gpu(model, tmp_path) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(4, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counters = engine.metrics()
        assert counters["device/peak_bytes"] <= counters["device/budget_bytes"]
        assert counters["readahead/reads_on_demand"] <= 1
        assert counters["order/misses"] == 0


def test_what_is_not_gathered_cannot_be_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    with engine_on_a_fake_gpu(model, tmp_path), pytest.raises(infinity.NotGatheredError):
        model[0].weight.sum()
