"""Optimizer state in the tiers for parameters that are not offloaded: the bits of torch, within a budget."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.observe.stalls import StallCause
from infinity.optim.base import OffloadedOptimizer
from infinity.optim.splitmaster import join_master
from infinity.report.record import RunRecord
from infinity.report.recorder import RunRecorder
from tests.conftest import small_config
from tests.leaks import LeakCheck
from tests.zoo import Net, batch, build, loss_of

STEPS = 4
TIGHT = {"host": {"budget": "220KiB"}, "chunk": "32KiB"}
Make = Callable[..., OffloadedOptimizer]


def config(folder: Path, **settings: Any) -> infinity.Config:
    chosen: dict[str, Any] = TIGHT | {"optimizer_threads": 1} | settings
    return infinity.Config(**chosen, nvme={"paths": [folder], "threads": 2, "io_timeout_s": 60.0})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float | None = None) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    there = dict(theirs.named_parameters())
    assert [name for name, value in ours.named_parameters() if not torch.equal(value, there[name])] == []


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Of two state_dicts: the same parameters have state, with the same bits."""
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert [name for name, value in state.items() if not torch.equal(value, ours["state"][number][name])] == []


PAIRS: dict[str, tuple[Make, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (infinity.AdamW, lambda p, **kw: torch.optim.AdamW(p, fused=True, **kw), {"weight_decay": 0.1}),
    "adam": (infinity.Adam, lambda p, **kw: torch.optim.Adam(p, fused=True, **kw), {"weight_decay": 0.1}),
    "sgd": (infinity.SGD, lambda p, **kw: torch.optim.SGD(p, foreach=False, **kw), {}),
    "momentum": (infinity.SGD, lambda p, **kw: torch.optim.SGD(p, foreach=False, **kw), {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("settings", [TIGHT, {"host": {"budget": "16MiB"}}], ids=["tight", "roomy"])
def test_steps_have_the_bits_of_torch(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    ours, theirs, given = PAIRS[name]
    model, plain = build(Net), build(Net)
    with ours(model.parameters(), lr=1e-2, config=config(tmp_path, **settings), **given) as optimizer:
        losses = train(model, optimizer, range(STEPS), clip=1.0)
        assert losses == train(plain, theirs(plain.parameters(), lr=1e-2, **given), range(STEPS), clip=1.0)
        assert_same_parameters(model, plain)
        tier = optimizer.state_tier
        assert tier is not None
        counted = tier.metrics()
        assert counted["host/peak_bytes"] <= counted["host/budget_bytes"]
        state_nbytes = 4 * sum(p.numel() for p in model.parameters()) * {"adamw": 2, "adam": 2, "sgd": 0}.get(name, 1)
        is_swapped = settings is TIGHT and state_nbytes > 0
        assert (counted["nvme/capacity_bytes"] > 0) == is_swapped
        assert counted["nvme/capacity_bytes"] + counted["host/kept_bytes"] >= state_nbytes
        if is_swapped:  # born zero: written in every step, read in all but the first
            assert counted["nvme/write_bytes"] == STEPS * counted["nvme/capacity_bytes"]
            reads = counted["readahead/reads_ahead"] + counted["readahead/reads_on_demand"]
            chunks = counted["nvme/write_bytes"] / STEPS / (32 << 10)
            assert reads >= (STEPS - 1) * int(chunks)


def test_what_comes_first_is_read_behind_the_backward(tmp_path: Path) -> None:
    model = build(Net)
    with infinity.AdamW(model.parameters(), config=config(tmp_path)) as optimizer:
        tier = optimizer.state_tier
        assert tier is not None
        train(model, optimizer, range(1))
        tier.metrics()  # all writes have landed: there is room
        optimizer.zero_grad()
        assert tier.metrics()["readahead/reads_ahead"] >= 3
        train(model, optimizer, range(1, 2))
        assert tier.metrics()["readahead/reads_on_demand"] <= tier.metrics()["readahead/reads_ahead"]


def test_parameters_without_gradient_are_left_alone(tmp_path: Path) -> None:
    """Some in one step only, some never; frozen ones have no state."""
    model, plain = build(Net), build(Net)
    for each in (model, plain):
        each.embed.weight.requires_grad_(False)  # type: ignore[union-attr]
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, config=config(tmp_path))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        for each, one in ((model, optimizer), (plain, reference)):
            loss_of(each, batch(step)).backward()  # type: ignore[no-untyped-call]
            for number, block in enumerate(each.blocks):  # type: ignore[arg-type]
                if number == step % 3 or number == 2:
                    block.up.weight.grad = None
            one.step()
            one.zero_grad()
    assert_same_parameters(model, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


def test_state_dicts_go_both_ways(tmp_path: Path) -> None:
    model, plain = build(Net), build(Net)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, config=config(tmp_path))
    train(model, optimizer, range(2))
    train(plain, reference, range(2))
    saved = optimizer.state_dict()
    assert_same_state(saved, reference.state_dict())
    reference.load_state_dict(copy.deepcopy(saved))  # torch would go on in the same memory
    reference.param_groups[0]["fused"] = True  # which a state of ours says nothing about
    train(plain, reference, range(2, 4))
    optimizer.close()
    again = build(Net)
    again.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()})
    with infinity.AdamW(again.parameters(), lr=0.5, config=config(tmp_path)) as optimizer:
        optimizer.load_state_dict(saved)
        train(again, optimizer, range(2, 4))
        assert_same_parameters(again, plain)
        assert_same_state(optimizer.state_dict(), reference.state_dict())


def test_clipping_in_the_optimizer_is_that_of_torch(tmp_path: Path) -> None:
    model, plain = build(Net), build(Net)
    with infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, config=config(tmp_path)) as optimizer:
        train(model, optimizer, range(2))
        train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), range(2), clip=0.5)
        assert_same_parameters(model, plain)
        assert optimizer.last_grad_norm is not None
        assert optimizer.last_grad_norm > 0.5


def test_bf16_parameters_have_an_fp32_master(tmp_path: Path) -> None:
    """Half the parameters are bf16; the update is that of fp32 parameters, of which they are the high half."""
    torch.manual_seed(0)
    start = [torch.randn(301, 17), torch.randn(5000)]
    high, whole = nn.Parameter(start[0].bfloat16()), nn.Parameter(start[1].clone())
    masters = [nn.Parameter(high.detach().float()), nn.Parameter(start[1].clone())]
    reference = torch.optim.SGD(masters, lr=1e-2, momentum=0.9, foreach=False)
    with infinity.SGD([high, whole], lr=1e-2, momentum=0.9, config=config(tmp_path)) as optimizer:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(value.shape, generator=generator).bfloat16() for value in start]
            high.grad, whole.grad = grads[0], grads[1].float()
            masters[0].grad, masters[1].grad = grads[0].float(), grads[1].float()
            optimizer.step()
            reference.step()
        assert torch.equal(whole, masters[1])
        tier = optimizer.state_tier
        assert tier is not None
        (section,) = (s for s in tier.sections if s.kernel.param_dtype is torch.bfloat16)
        tier._stream.drain()
        for record in section.records:
            buffer = tier._stream.look_at(section.passage(record), -2)
            (piece,) = record.chunk.pieces
            part = slice(record.chunk.start, record.chunk.start + piece.stop)
            joined = join_master(high.detach().view(-1)[part], buffer.state[0][: piece.stop])
            assert torch.equal(joined, masters[0].detach().view(-1)[part])
            tier._stream.put_back(buffer)


def test_fp16_with_a_loss_scale(tmp_path: Path) -> None:
    """An overflow skips the step; what somebody loads into a parameter is what is updated, not its old master."""
    weight = nn.Parameter(torch.ones(70, dtype=torch.float16))
    with infinity.AdamW([weight], lr=1e-2, weight_decay=0.0, config=config(tmp_path)) as optimizer:
        scaler = infinity.GradScaler(init_scale=8.0)
        for grad in (8.0, float("inf"), 8.0):
            weight.grad = torch.full_like(weight, grad)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped_steps == 1
        assert weight[0].item() == pytest.approx(0.98, abs=1e-3)
        with torch.no_grad():
            weight.fill_(4.0)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert weight[0].item() == pytest.approx(3.99, abs=4e-3)


def test_graphs_know_of_the_update(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).bfloat16()
    with infinity.AdamW(model.parameters(), config=config(tmp_path)) as optimizer:
        loss = model(model(torch.ones(2, 8, dtype=torch.bfloat16))).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_step_that_fails_is_lost_and_loading_goes_on(tmp_path: Path) -> None:
    model, plain = build(Net), build(Net)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, config=config(tmp_path))
    train(model, optimizer, range(1))
    good = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    tier = optimizer.state_tier
    assert tier is not None
    kernel, calls = tier.sections[0].kernel, iter(range(100))

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernel, name)

        def update(self, *operands: Any) -> None:
            if next(calls) == 5:
                raise KeyboardInterrupt
            kernel.update(*operands)

    tier.sections[0].kernel = Interrupted()
    loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(infinity.IterationError, match="lost half-way"):
        optimizer.step()
    with pytest.raises(infinity.IterationError, match="from the last checkpoint"):
        optimizer.state_dict()
    tier.sections[0].kernel = kernel
    optimizer.load_state_dict(good[0])
    model.load_state_dict(good[1])
    optimizer.zero_grad()
    train(model, optimizer, range(1, 3))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), range(3))
    assert_same_parameters(model, plain)
    optimizer.close()


def test_closing_gives_everything_back(tmp_path: Path) -> None:
    model = build(Net)
    before = LeakCheck.take()
    optimizer = infinity.AdamW(model.parameters(), config=config(tmp_path))
    train(model, optimizer, range(2))
    tier = optimizer.state_tier
    assert tier is not None
    optimizer.close()
    optimizer.close()
    assert tier.pool.leased_nbytes == tier.budget.used_nbytes == 0
    before.check([tmp_path])
    with pytest.raises(infinity.InfinityError, match="closed"):
        optimizer.step()
    another = infinity.AdamW(model.parameters(), config=config(tmp_path))
    del another
    gc.collect()
    before.check([tmp_path])


def test_what_is_refused(tmp_path: Path) -> None:
    model = build(Net)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (model.parameters(), {"schedule": "deferred", "stage": 2}, infinity.ConfigError, "schedule, stage would have"),
        (model.parameters(), {"host": {"budget": "90KiB"}}, infinity.PlacementError, "3 chunks in transit"),
        ([nn.Parameter(torch.ones(3, dtype=torch.float64))], {}, infinity.UnsupportedModelError, "float64"),
        ([nn.Parameter(torch.ones(3, device="meta"))], {}, infinity.UnsupportedModelError, "meta device"),
        ([nn.Parameter(torch.ones(3, 4).t())], {}, infinity.UnsupportedModelError, "not contiguous"),
    ]
    for parameters, settings, error, match in cases:
        with pytest.raises(error, match=match):
            infinity.AdamW(parameters, config=config(tmp_path, **settings))
    with pytest.raises(infinity.ConfigError, match="config= to keep only"):
        infinity.AdamW(model.parameters())
    with infinity.AdamW(model.parameters(), config=config(tmp_path)) as optimizer:
        with pytest.raises(infinity.ConfigError, match="with all groups"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        train(model, optimizer, range(1))


def test_another_memory_format_is_refused_before_anything_is_updated(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3)
    with infinity.AdamW(model.parameters(), lr=1e-2, config=config(tmp_path)) as optimizer:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        before = model.weight.detach().clone()
        with pytest.raises(infinity.ConfigError, match="not contiguous in memory any more"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        optimizer.step()
        assert not torch.equal(model.weight, before)


def test_offloaded_parameters_have_an_engine_for_that(tmp_path: Path) -> None:
    model = build(Net)
    settings = {"precision": "fp32", "device": {"kind": "cpu", "budget": "8MiB"}, "host": {"budget": "8MiB"}}
    with infinity.offload(model, infinity.Config(**settings, nvme={"paths": [tmp_path]})):
        with pytest.raises(infinity.ConfigError, match="its engine has a config already"):
            infinity.AdamW(model.parameters(), config=config(tmp_path))
        infinity.AdamW(model.parameters())


def test_the_norm_of_gradients_that_are_not_offloaded() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 3.0)
    assert infinity.clip_grad_norm_([weight], 1.0).item() == 6.0
    assert isinstance(weight.grad, Tensor)
    assert weight.grad.norm().item() == pytest.approx(1.0)


def test_a_loop_is_recorded_for_the_report(tmp_path: Path) -> None:
    """Every step of the tier is in the trace, with its transfers, and the record is what `infinity report` reads."""
    swap = tmp_path / "swap"
    swap.mkdir()
    model = build(Net)
    with infinity.AdamW(model.parameters(), lr=1e-2, config=config(swap)) as optimizer:
        tier = optimizer.state_tier
        assert tier is not None
        with RunRecorder(optimizer, tmp_path / "run", first_step=5) as recorder:
            for step in range(STEPS):
                (loss,) = train(model, optimizer, range(step, step + 1))
                recorder.step(loss=loss)
        assert tier.counters().keys() == tier.metrics().keys()
        counted = tier.metrics()
        chunks = sum(len(section.records) for section in tier.sections)
    record = RunRecord.load(tmp_path / "run")
    assert len(record.steps) == len(record.run["losses"]) == STEPS
    assert [row["step"] for row in record.steps] == list(range(5, 5 + STEPS))
    assert record.run["budgets"] == {"host": 220 * 1024, "nvme": counted["nvme/capacity_bytes"]}
    assert record.run["traffic"]["total"]["nvme_write_bytes"] == counted["nvme/write_payload_bytes"] > 0
    assert record.run["drives"][0]["directory"].startswith(str(swap))
    kinds = Counter(span["cat"] for span in record.spans)
    assert kinds["step"] == STEPS
    assert kinds["optimizer"] == STEPS * chunks == counted["optimizer/chunks"]
    assert 0 < kinds["read"] <= counted["nvme/read_operations"]  # those for a step that never comes may be under way
    assert kinds["write"] == counted["nvme/write_operations"] > 0
    waited = record.steps[-1]["counters"]["stall/total_s"] - record.run["counters_at_start"]["stall/total_s"]
    assert record.run["stalls"]["total"] == waited


def test_a_loop_over_an_engine_is_recorded_too(tmp_path: Path) -> None:
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        with RunRecorder(optimizer, tmp_path / "run") as recorder:
            recorder.step(loss=train(model, optimizer, range(1))[0])
    record = RunRecord.load(tmp_path / "run")
    assert record.run["model"]["parameters"] == sum(p.numel() for p in build(Net).parameters())
    assert set(record.run["budgets"]) == {"device", "host", "nvme"}
    assert {span["cat"] for span in record.spans} >= {"forward", "backward", "step"}


def test_a_record_tells_of_the_waits_since_it_began(tmp_path: Path) -> None:
    """Steps of before are not in it, and neither are their waits: they would be more than all of its time."""
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        with engine._runtime.stalls.charged(StallCause.NVME_READ):
            train(model, optimizer, range(2))
        before = engine.counters()
        with RunRecorder(optimizer, tmp_path / "run", first_step=2) as recorder:
            recorder.step(loss=train(model, optimizer, range(2, 3))[0])
    record = RunRecord.load(tmp_path / "run")
    assert record.run["counters_at_start"]["stall/nvme_read_s"] == before["stall/nvme_read_s"] > 0
    last = record.steps[-1]["counters"]
    for cause in ("nvme_read", "total"):
        assert record.run["stalls"][cause] == last[f"stall/{cause}_s"] - before[f"stall/{cause}_s"]
