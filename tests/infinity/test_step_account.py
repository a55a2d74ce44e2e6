"""The account of a measured step: figures that are given, and a run whose drives are slow on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.bench.step_account import Activity, StepResult, activities, common_s, joined, length_s
from infinity.observe.trace import TraceEvent
from storage.backends.base import Backend
from storage.backends.throttled import Throttle, ThrottledBackend


def event(category: str, start_s: float, duration_s: float) -> TraceEvent:
    return TraceEvent("name", category, start_s, duration_s, "track")


def test_spans_are_joined() -> None:
    assert joined([(3, 5), (0, 1), (4, 6), (1, 2), (8, 9), (8, 8.5)]) == [(0, 2), (3, 6), (8, 9)]
    assert joined([]) == []
    assert length_s([(0, 2), (3, 6)]) == 5


def test_what_two_have_in_common() -> None:
    assert common_s([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == 1 + 1 + 1
    assert common_s([(0, 1)], [(1, 2)]) == 0
    assert common_s([], [(1, 2)]) == 0


def test_activities_end_where_the_stretch_does() -> None:
    events = [
        event("read", -5.0, 6.0),  # 0 to 1
        event("write", 0.5, 2.5),  # 0.5 to 3
        event("optimizer", 4.0, 1.0),
        event("stall", 2.0, 4.0),  # 1 s of it with a write under way
        event("read", 9.0, 5.0),  # 9 to 10
        event("read", 20.0, 1.0),
        event("forward", 0.0, 10.0),
        event("h2d", 0.0, 1.0),
        event("d2h", 3.0, 0.5),
    ]
    found = activities(events, 0.0, 10.0)
    assert found == {
        "nvme": Activity(busy_s=4.0, waiting_s=3.0),
        "optimizer": Activity(busy_s=1.0, waiting_s=3.0),
        "link": Activity(busy_s=1.5, waiting_s=3.5),
    }


def result(alone_s: dict[str, list[float]]) -> StepResult:
    activity = {
        "nvme": Activity(busy_s=7.0, waiting_s=0.5),
        "optimizer": Activity(busy_s=1.0, waiting_s=3.0),
        "link": Activity(busy_s=0.5, waiting_s=3.5),
    }
    return StepResult(
        step_s=[9.0, 11.0],
        stalls_s={"nvme_read": [3.0, 4.0], "optimizer": [0.5, 0.5]},
        alone_s=alone_s,
        activities=[activity, activity],
    )


def test_where_computing_binds_the_rest_is_work_and_waits() -> None:
    report = result({"compute": [5.0, 5.0], "nvme": [4.0, 4.0]}).to_json()
    assert (report["binding"], report["ratio"]) == ("compute", 2.0)
    assert report["in_step_seconds"] == {"compute": 6.0, "nvme": 7.0, "optimizer": 1.0, "link": 0.5}
    causes = {"working beyond the bound": 1.0, "nvme_read": 3.5, "optimizer": 0.5}
    assert report["difference_seconds"] == {"total": 5.0, "by_cause": causes}


def test_where_drives_bind_the_rest_is_slowness_and_idleness() -> None:
    report = result({"compute": [5.0, 5.0], "nvme": [6.0, 6.0]}).to_json()
    assert report["binding"] == "nvme"
    causes = {"nvme slower than by itself": 1.0, "nvme idle while computing": 2.5, "nvme idle while waiting": 0.5}
    assert report["difference_seconds"] == {"total": 4.0, "by_cause": causes}


def test_the_parts_of_a_real_step_are_the_step(tmp_path: Path) -> None:
    """Slow drives bind: what they took, and the time in which they had nothing to do, is all of the step."""
    rate = 8e6

    def wrap(backend: Backend) -> Backend:
        return ThrottledBackend(backend, Throttle(read_nbytes_per_s=rate, write_nbytes_per_s=rate))

    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    settings = {"device": {"kind": "cpu", "budget": "1MiB"}, "host": {"budget": "400KiB"}}
    config = infinity.Config(
        precision="fp32", schedule="overlapped", nvme={"paths": [tmp_path], "calibrate": "off"}, **settings
    )
    with infinity.offload(model, config, wrap_backend=wrap) as engine:
        optimizer = infinity.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 96)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        stalls, started_s = engine._runtime.stalls, time.perf_counter()
        stalled_s = stalls.total_s
        step()
        ended_s = time.perf_counter()
        stalled_s = stalls.total_s - stalled_s
        engine.metrics()  # everything has landed
        found = activities(engine._runtime.trace.events(), started_s, ended_s)
        moved = engine.traffic.per_step[-1]
    step_s = ended_s - started_s
    outcome = StepResult([step_s], {"any": [stalled_s]}, {"nvme": [moved["nvme_write_bytes"] / rate]}, [found])
    report = outcome.to_json()
    causes = report["difference_seconds"]["by_cause"]
    assert sum(causes.values()) == pytest.approx(report["difference_seconds"]["total"])
    # Each part was measured by itself, and none is what the others leave but the idleness beside computing.
    assert 0 < found["nvme"].busy_s <= step_s
    assert 0 <= found["nvme"].waiting_s <= stalled_s + 1e-6
    assert causes["nvme idle while computing"] >= -1e-6
    assert causes["nvme idle while computing"] <= step_s - stalled_s + 1e-6
