"""Parameters larger than the whole host budget pass it in chunks, and nothing of the result changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.format import GRADIENT
from infinity.checkpoint.reader import CheckpointReader
from tests.conftest import MakeEngine
from tests.leaks import check_given_back
from tests.parity.loops import (
    Loop,
    assert_parity,
    assert_same,
    gathered_parameters,
    smallest_budget,
    train_offloaded,
    train_plain,
)
from tests.zoo import Net, batch, build, loss_of

VOCAB = 5000
LARGE_NBYTES = VOCAB * 37 * 4  # the embedding, and the head: 740 KB each
WHOLE = {"budget": "6MiB"}
DEVICES = {"cpu": {"kind": "cpu", "budget": "8MiB"}, "fake": {"kind": "fake", "budget": "8MiB"}}
SCHEDULES = ("synchronous", "overlapped", "deferred")

make_large = partial(Net, blocks=2, vocab=VOCAB)


def _batch(step: int) -> Tensor:
    return batch(step, vocab=VOCAB)


def _smallest(offload: MakeEngine, make: Callable[[], nn.Module] = make_large, **settings: Any) -> int:
    minimum = smallest_budget(offload, "host", build(make), **settings)
    assert minimum < LARGE_NBYTES
    return minimum


def _assert_chunked(engine: infinity.Engine, minimum: int) -> None:
    placement = engine.plan.placement
    keys = {engine._runtime.groups[index].key for index in placement.chunked}
    assert {"embed/float32", "head/float32"} >= keys
    assert len(keys) >= 1
    assert placement.host_minimum_nbytes == minimum < placement.host_whole_nbytes
    assert engine.metrics()["host/peak_bytes"] <= minimum
    assert engine.metrics()["host/passage_peak_bytes"] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_bits_and_the_planned_traffic(offload: MakeEngine, schedule: str, device: str) -> None:
    settings: dict[str, Any] = {"schedule": schedule, "device": DEVICES[device]}
    minimum = _smallest(offload, **settings)
    loop = Loop(make_large, batch=_batch, steps=3)
    engine = assert_parity(loop, offload, host={"budget": minimum}, **settings)
    _assert_chunked(engine, minimum)


@pytest.mark.parametrize("in_optimizer", [True, False], ids=["max_grad_norm", "clip_grad_norm_"])
@pytest.mark.parametrize("device", DEVICES)
def test_accumulation_and_clipping(offload: MakeEngine, device: str, in_optimizer: bool) -> None:
    """The norm has the bits of the whole gradient's, also where several backwards add up in the swap file."""
    settings: dict[str, Any] = {"schedule": "synchronous", "device": DEVICES[device]}
    minimum = _smallest(offload, **settings)
    loop = Loop(make_large, batch=_batch, steps=4, accumulate=(2, 3, 1), max_norm=0.1)
    engine = assert_parity(
        loop,
        offload,
        clip_in_optimizer=in_optimizer,
        check_traffic=False,
        host={"budget": minimum},
        **settings,
    )
    _assert_chunked(engine, minimum)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_weights(offload: MakeEngine, schedule: str) -> None:
    make = partial(make_large, tied=True)
    minimum = _smallest(offload, make, schedule=schedule)
    engine = assert_parity(
        Loop(make, batch=_batch, steps=3), offload, schedule=schedule, host={"budget": minimum}, check_traffic=False
    )
    _assert_chunked(engine, minimum)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16_gives_the_bits_of_a_run_that_holds_everything(offload: MakeEngine, schedule: str) -> None:
    settings = {"precision": "bf16", "schedule": schedule}
    loop = Loop(make_large, batch=_batch, steps=3)
    whole, _ = train_offloaded(loop, lambda model: offload(model, host=WHOLE, **settings))
    minimum = smallest_budget(offload, "host", build(make_large), **settings)
    ours, engine = train_offloaded(loop, lambda model: offload(model, host={"budget": minimum}, **settings))
    assert_same(whole, ours)
    assert engine.plan.placement.chunked


def test_the_step_is_skipped_when_a_chunk_overflows(offload: MakeEngine) -> None:
    """With a loss scale overflows are looked for in chunks."""
    losses = []
    for host in (WHOLE, None):
        model = build(make_large)
        settings: dict[str, Any] = {"precision": "fp16", "schedule": "synchronous"}
        budget = host or {"budget": smallest_budget(offload, "host", build(make_large), **settings)}
        engine = offload(model, host=budget, **settings)
        assert bool(engine.plan.placement.chunked) == (host is None)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        scaler = infinity.GradScaler(init_scale=2.0**40, growth_interval=2)
        seen: list[float] = []
        for step in range(8):
            for micro in range(2):
                loss = loss_of(model, _batch(2 * step + micro))
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                seen.append(float(loss.detach()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        losses.append(seen)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 10


def test_gradients_are_replaced_and_dropped(offload: MakeEngine) -> None:
    """`parameter.grad = ...` and `None` between backward and step."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            loss_of(model, _batch(step)).backward()  # type: ignore[no-untyped-call]
            torch.manual_seed(step)
            weights = [p for n, p in model.named_parameters() if n in ("embed.weight", "head.weight")]
            weights[0].grad = None if step == 1 else torch.randn(weights[0].shape)
            loss_of(model, _batch(step + 5)).backward()  # type: ignore[no-untyped-call]
            weights[1].grad = torch.randn(weights[1].shape)
            optimizer.step()
            optimizer.zero_grad()

    plain = build(make_large)
    run(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    ours = build(make_large)
    engine = offload(ours, schedule="synchronous", host={"budget": _smallest(offload, schedule="synchronous")})
    run(ours, infinity.AdamW(ours.parameters()))
    assert engine.plan.placement.chunked
    for name, value in gathered_parameters(ours).items():
        assert torch.equal(value, plain.get_parameter(name)), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_are_written_back_chunk_by_chunk(offload: MakeEngine, precision: str) -> None:
    settings = {"precision": precision, "schedule": "synchronous"}
    minimum = smallest_budget(offload, "host", build(make_large), **settings)
    results = []
    for host in (WHOLE, {"budget": minimum}):
        model = build(make_large)
        engine = offload(model, host=host, **settings)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss_of(model, _batch(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            with infinity.gathered(model.embed), torch.no_grad():  # type: ignore[arg-type]
                model.embed.weight[17:4000:7].mul_(0.5)  # type: ignore[index,operator,union-attr]
        results.append(gathered_parameters(model))
    assert engine.plan.placement.chunked
    assert engine.traffic.total["nvme_write_bytes/param_edit"] > 0
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_checkpoint_between_two_backwards(offload: MakeEngine, tmp_path: Path) -> None:
    """Saved with a gradient that waits in chunks, and loaded by a run that holds everything; and the other way."""
    settings: dict[str, Any] = {"schedule": "synchronous"}
    minimum = _smallest(offload, **settings)
    hosts = ({"budget": minimum}, WHOLE)
    plain = train_plain(Loop(make_large, batch=_batch, steps=1, accumulate=(2,)))
    for number, (first, second) in enumerate((hosts, hosts[::-1])):
        model = build(make_large)
        engine = offload(model, host=first, **settings)
        infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        loss_of(model, _batch(0)).backward()  # type: ignore[no-untyped-call]
        engine.save(tmp_path / f"save{number}")
        other = build(make_large, seed=5)
        continued = offload(other, host=second, **settings)
        optimizer = infinity.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
        continued.load(tmp_path / f"save{number}")
        loss_of(other, _batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, value in gathered_parameters(other).items():
            assert torch.equal(value, plain.parameters[name]), name


def test_a_waiting_gradient_is_loaded_in_chunks_or_not_at_all(
    offload: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of it is longer than what passes host memory; one that is damaged leaves nothing behind."""
    model = build(make_large)
    engine = offload(model, schedule="synchronous", host={"budget": _smallest(offload, schedule="synchronous")})
    infinity.AdamW(model.parameters())
    loss_of(model, _batch(0)).backward()  # type: ignore[no-untyped-call]
    before = torch.linalg.vector_norm(model.embed.weight.grad)  # type: ignore[arg-type,union-attr]
    engine.save(tmp_path / "saved")
    read, sizes = CheckpointReader.read, []

    def watched(self: CheckpointReader, name: str, kind: str, start: int, into: Tensor) -> None:
        if kind == GRADIENT and name == "embed.weight":
            sizes.append(into.numel())
        read(self, name, kind, start, into)

    monkeypatch.setattr(CheckpointReader, "read", watched)
    engine.load(tmp_path / "saved")
    assert sum(sizes) == VOCAB * 37
    assert max(sizes) <= engine.plan.placement.passage_numel < VOCAB * 37
    assert torch.equal(torch.linalg.vector_norm(model.embed.weight.grad), before)  # type: ignore[arg-type,union-attr]
    (file,) = (tmp_path / "saved").glob("gradients*.safetensors")
    content = bytearray(file.read_bytes())
    content[300_000] ^= 1
    file.write_bytes(content)
    with pytest.raises(infinity.CheckpointError):
        engine.load(tmp_path / "saved")
    assert VOCAB * 37 < sum(sizes) < 2 * VOCAB * 37  # it ended in the middle
    assert not [group for group in engine._runtime.sink.pending() if group.key == "embed/float32"]
    check_given_back(engine._runtime.budgets["passage"])  # writes of the chunks before it hold some until they land


@pytest.mark.parametrize("device", DEVICES)
def test_first_values_of_an_empty_model(offload: MakeEngine, device: str) -> None:
    """What modules initialise in one go has the device's memory meanwhile, for host memory cannot hold it."""
    settings: dict[str, Any] = {"schedule": "synchronous", "device": DEVICES[device]}
    torch.manual_seed(0)
    with infinity.empty_init():
        model = make_large()
    minimum = smallest_budget(offload, "host", model, **settings)
    assert minimum < LARGE_NBYTES * 2
    engine = offload(model, host={"budget": minimum}, **settings)
    assert engine.plan.placement.stages_on_device
    assert engine.metrics()["host/peak_bytes"] <= minimum
    plain = build(make_large)
    for name, value in gathered_parameters(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name


def test_evaluation_is_counted_apart(offload: MakeEngine) -> None:
    model = build(make_large)
    engine = offload(model, schedule="synchronous", host={"budget": _smallest(offload, schedule="synchronous")})
    with torch.no_grad():
        ours = model(_batch(0))
    assert torch.equal(ours, build(make_large)(_batch(0)))
    assert engine.traffic.total["nvme_read_bytes/param_eval"] >= 2 * LARGE_NBYTES


def test_durable_steps(offload: MakeEngine) -> None:
    settings: dict[str, Any] = {"schedule": "synchronous", "durability": "step"}
    minimum = _smallest(offload, **settings)
    loop = Loop(make_large, batch=_batch, steps=3)
    engine = assert_parity(loop, offload, host={"budget": minimum}, check_traffic=False, **settings)
    _assert_chunked(engine, minimum)


def test_the_smallest_budget_does_not_grow_with_a_parameter(offload: MakeEngine) -> None:
    """Twice as large, sixteen times as large: the same host memory is enough."""
    minima = [
        smallest_budget(offload, "host", build(partial(make_large, vocab=VOCAB * factor)), schedule="synchronous")
        for factor in (1, 2, 16)
    ]
    assert minima[0] == minima[1] == minima[2]


def test_what_fits_is_not_chunked(offload: MakeEngine) -> None:
    """With a byte less than what holds every group whole, one size of groups is; the plan says so."""
    settings: dict[str, Any] = {"schedule": "synchronous"}
    whole = offload(build(make_large), host=WHOLE, **settings).plan.placement
    assert not whole.chunked
    exact = offload(build(make_large), host={"budget": whole.host_whole_nbytes}, **settings).plan
    assert not exact.placement.chunked
    less = offload(build(make_large), host={"budget": whole.host_whole_nbytes - 1}, **settings).plan
    assert len(less.placement.chunked) == 2
    assert f"A host budget of {whole.host_whole_nbytes} bytes holds" in less.describe()
