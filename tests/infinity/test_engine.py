"""What an engine shows of itself, and which models and settings it refuses."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.zoo import Net, batch, build, one_step


@pytest.mark.parametrize("kind", ["cpu", "fake"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_compute_dtype_is_what_a_forward_sees(offload: MakeEngine, precision: str, kind: str) -> None:
    model = build(Net)
    engine = offload(model, precision=precision, device={"kind": kind, "budget": "16MiB"})
    seen = set()
    block = model.get_submodule("blocks.0")
    block.register_forward_pre_hook(lambda module, args: seen.update(p.dtype for p in module.parameters()))
    with torch.no_grad():
        model(batch(0))
    assert seen == {engine.compute_dtype}
    if kind == "fake" or precision != "bf16":
        assert engine.compute_dtype is torch.float32


def test_metrics_are_flat_numbers(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, host={"budget": "440KiB"}, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters())
    for step in range(2):
        one_step(model, optimizer, step)
    metrics = engine.metrics()
    assert all(isinstance(value, (int, float)) for value in metrics.values())
    assert metrics["step"] == 2
    assert metrics["nvme/read_bytes"] >= metrics["nvme/read_payload_bytes"] > 0
    assert metrics["host/held_bytes"] <= metrics["host/peak_bytes"] <= metrics["host/budget_bytes"] == 440 << 10
    assert metrics["device/held_bytes"] <= metrics["device/peak_bytes"] <= metrics["device/budget_bytes"]
    assert metrics["stall/total_s"] == pytest.approx(
        sum(v for k, v in metrics.items() if k.startswith("stall/") and k.endswith("_s") and k != "stall/total_s")
    )
    for part in ("window", "gradients", "transit", "pipeline"):
        assert metrics[f"host/{part}_peak_bytes"] <= getattr(engine.plan.placement, f"{part}_nbytes")


def test_traffic_adds_up(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, host={"budget": "440KiB"})
    optimizer = infinity.AdamW(model.parameters())
    for step in range(3):
        one_step(model, optimizer, step)
    traffic, metrics = engine.traffic, engine.metrics()
    assert len(traffic.per_step) == 3
    assert traffic.initialisation["nvme_write_bytes"] > 0
    assert traffic.initialisation["nvme_read_bytes"] == 0
    moved = traffic.total["nvme_read_bytes"] + traffic.total["nvme_read_padding_bytes"]
    moved += traffic.total["nvme_read_back_bytes"]
    assert moved == metrics["nvme/read_bytes"]
    written = traffic.total["nvme_write_bytes"] + traffic.total["nvme_write_padding_bytes"]
    assert written == metrics["nvme/write_bytes"]
    assert sum(step["d2h_bytes"] for step in traffic.per_step) == metrics["link/d2h_bytes"]
    trained = sum(p.numel() for p in model.parameters())
    assert all(step["d2h_bytes"] == 4 * trained for step in traffic.per_step)


def test_plan_describes_itself(offload: MakeEngine) -> None:
    engine = offload(build(Net), schedule="overlapped")
    text = engine.plan.describe()
    assert "overlapped (asked for)" in text
    assert {row.tier for row in engine.plan.table()} == {"device", "host", "nvme"}
    placement = engine.plan.placement
    assert sum(term.nbytes for term in placement.host) <= placement.host_budget_nbytes
    assert engine.plan.parameters == sum(p.numel() for p in build(Net).parameters())
    assert "residency:" in engine.report()


def test_the_report_says_what_is_where_and_what_was_waited_for(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters())
    for number in range(2):
        one_step(model, optimizer, number)
    engine.metrics()
    lines = engine.report().splitlines()
    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    budgets = [budget.name for budget in engine._runtime.budgets.values()]
    assert heads == ["residency", "host memory", *budgets, "drives", "in flight", "last stalls, newest first"]
    drives = lines[lines.index("drives:") + 1 : lines.index("in flight:")]
    assert [line.rpartition(",")[2] for line in drives] == [" open"]
    counters = engine.counters()
    stalls = lines[lines.index("last stalls, newest first:") + 1 :]
    n_stalls = sum(value for name, value in counters.items() if name.startswith("stall/") and name.endswith("_count"))
    assert len(stalls) == min(n_stalls, 10) > 0
    assert all(" s ago, " in line for line in stalls)


def test_auto_schedule_says_why(offload: MakeEngine) -> None:
    assert "auto: " in offload(build(Net)).plan.describe()


@pytest.mark.parametrize(("budget", "schedule"), [("440KiB", "deferred"), ("360KiB", "synchronous")])
def test_auto_defers_where_all_gradients_fit(offload: MakeEngine, budget: str, schedule: str) -> None:
    engine = offload(build(Net), host={"budget": budget}, chunk="16KiB")
    assert engine.plan.placement.schedule.value == schedule
    assert bool(engine.plan.placement.spilled_gradients) == (schedule == "synchronous")
    assert f"schedule: {schedule} (auto: a loop may accumulate or clip" in engine.plan.describe()


def test_trace_can_be_written(offload: MakeEngine, tmp_path: Path) -> None:
    model = build(Net)
    engine = offload(model)
    one_step(model, infinity.AdamW(model.parameters()), 0)
    engine.metrics()  # updates that are deferred run now
    path = tmp_path / "trace.json"
    engine.trace.write_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"optimizer"}


def test_engines_and_models_cannot_be_copied(offload: MakeEngine) -> None:
    model = build(Net)
    model.extra = nn.Linear(2, 2)  # resident, by which the model itself is a unit
    engine = offload(model)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(engine)
    copies: list[Callable[[nn.Module], object]] = [copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())]
    for make in copies:
        for module in map(model.get_submodule, ("", "blocks", "blocks.0", "blocks.0.up", "head")):
            with pytest.raises(infinity.NotGatheredError, match="can neither be deep-copied nor pickled"):
                make(module)
            with infinity.gathered(model), pytest.raises(infinity.NotGatheredError, match="neither be deep-copied"):
                make(module)


def test_metadata_of_released_parameters(offload: MakeEngine) -> None:
    """What libraries ask of parameters works without the data."""
    plain, model = build(Net), build(Net)
    offload(model)
    for (name, theirs), (same, mine) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == same
        assert isinstance(mine, nn.Parameter)
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert (mine.numel(), mine.dim(), mine.requires_grad, mine.is_leaf) == (
            theirs.numel(), theirs.dim(), theirs.requires_grad, theirs.is_leaf,
        )  # fmt: skip
        assert mine.element_size() == theirs.element_size()
        assert mine.grad is None
        mine.grad = None
        mine.requires_grad_(theirs.requires_grad)
        assert name in repr(mine)
        assert len({mine, mine}) == 1
    model.train().eval()
    model.zero_grad()
    assert str(model) == str(plain)
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "no parameters": (nn.ReLU, "nothing to offload"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
    "complex": (lambda: nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]), "complex"),
    "half": (lambda: nn.Linear(3, 3).half(), r"\.float\(\)"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_unsupported_models(offload: MakeEngine, kind: str) -> None:
    make, what = UNSUPPORTED[kind]
    with pytest.raises(infinity.UnsupportedModelError, match=what):
        offload(make())


def test_sparse_gradients_are_refused(offload: MakeEngine) -> None:
    model = nn.Sequential(nn.Embedding(29, 37, sparse=True), nn.Linear(37, 3))
    offload(model, schedule="synchronous", resident_threshold=0)
    with pytest.raises(infinity.UnsupportedModelError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_twice_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match="offloaded once"):
        offload(model)


def test_ranks_that_cannot_find_each_other_are_refused(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(infinity.ConfigError, match=r"2 ranks .* MASTER_ADDR.* is not set.*torchrun"):
        offload(build(Net))


def test_temporary_swap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without paths, a folder of the system's temporary directory is used and removed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = build(Net)
    config = infinity.Config(precision="fp32", host={"budget": "440KiB"}, device={"kind": "cpu", "budget": "8MiB"},
                             resident_threshold="1KiB", schedule="synchronous")  # fmt: skip
    with infinity.offload(model, config) as engine:
        assert engine.plan.placement.nvme_nbytes
        assert list(tmp_path.iterdir())
        one_step(model, infinity.AdamW(model.parameters()), 0)
    assert not list(tmp_path.iterdir())


def test_no_sync_is_accepted(offload: MakeEngine) -> None:
    engine = offload(build(Net))
    with engine.no_sync():
        assert not engine.is_closed
