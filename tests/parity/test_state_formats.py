"""Moments in bf16 and int8 through an engine: the same bits wherever things lie, the traffic of the closed forms, and
checkpoints that give back every byte."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from benchmarks.state_formats import compare
from tests.conftest import MakeEngine
from tests.parity.loops import (
    Loop,
    Outcome,
    assert_same,
    assert_traffic,
    gathered_parameters,
    smallest_budget,
    train_offloaded,
)
from tests.zoo import Net, OddNet, batch, build, loss_of

FORMATS = ("bf16", "int8")
LOOP = Loop(Net, steps=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"schedule": "synchronous"},
    "overlapped": {"schedule": "overlapped"},
    "deferred": {"schedule": "deferred"},
    "small-chunks": {"schedule": "overlapped", "chunk": "32KiB"},
    "everything-in-memory": {"schedule": "synchronous", "host": {"budget": "64MiB"}},
    "some-in-memory": {"schedule": "synchronous", "host": {"budget": "700KiB"}},
    "threads": {"schedule": "overlapped", "optimizer_threads": 2},
}


def train(offload: MakeEngine, form: str, loop: Loop = LOOP, **settings: Any) -> tuple[Outcome, infinity.Engine]:
    def make(model: torch.nn.Module) -> infinity.Engine:
        return offload(model, precision="bf16", state_format=form, **settings)

    return train_offloaded(loop, make)


@cache
def _first(form: str) -> list[Outcome]:
    """The outcome that all settings must have; filled by the first of them."""
    return []


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("form", FORMATS)
def test_same_bits_wherever_things_lie(offload: MakeEngine, form: str, settings: dict[str, Any]) -> None:
    outcome, engine = train(offload, form, **settings)
    assert_traffic(engine, LOOP)
    expected = _first(form)
    if not expected:
        expected.append(train(offload, form, schedule="synchronous")[0])
    assert_same(expected[0], outcome)


@pytest.mark.parametrize("form", FORMATS)
def test_two_drives(offload: MakeEngine, tmp_path: Path, form: str) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    one, _ = train(offload, form)
    two, _ = train(offload, form, nvme={"paths": drives})
    assert_same(one, two)


@pytest.mark.parametrize("form", FORMATS)
def test_parameters_of_every_shape(offload: MakeEngine, form: str) -> None:
    loop = Loop(OddNet, steps=3)
    small, engine = train(offload, form, loop, chunk="16KiB", schedule="synchronous")
    assert_traffic(engine, loop)
    assert_same(small, train(offload, form, loop, schedule="overlapped")[0])


@pytest.mark.parametrize("form", ("fp32", *FORMATS))
def test_bytes_per_parameter_and_step(offload: MakeEngine, form: str) -> None:
    """Everything on NVMe: 2 + 2 read for the parameters, 2 written, and the state both ways."""
    loop = Loop(partial(Net, hidden=256), steps=3)
    settings: dict[str, Any] = {"schedule": "overlapped", "precision": "bf16", "state_format": form}
    settings["host"] = {"budget": smallest_budget(offload, "host", build(loop.make), **settings)}
    _, engine = train_offloaded(loop, lambda model: offload(model, **settings))
    state = {"fp32": 10, "bf16": 6, "int8": 4.125}[form]
    streamed = [g for g in engine._runtime.groups if g.index not in engine.plan.placement.pinned_states]
    parameters = sum(g.layout.payload_numel for g in streamed)
    moved = engine.traffic.per_step[-1]
    for direction in ("read", "write"):
        per_parameter = moved[f"nvme_{direction}_bytes/state"] / parameters
        assert per_parameter == pytest.approx(state, rel=5e-3)  # blocks of padding have scales
    trained = [g for g in engine._runtime.groups if g.index not in engine.plan.placement.pinned_params]
    assert [g.index for g in trained] == [g.index for g in streamed]  # nothing lies in memory for good
    whole = 2 + 2 + 2 + 2 * state  # read for forward and backward, written, and the state both ways
    together = (moved["nvme_read_bytes"] + moved["nvme_write_bytes"]) / parameters
    kept = [engine._runtime.groups[index] for index in engine.plan.placement.keep_at_turn]
    kept += [engine._runtime.groups[index] for index in engine.plan.placement.keep_at_boundary]
    saved = 2 * sum(g.layout.payload_numel for g in kept) / parameters
    assert together == pytest.approx(whole - saved, rel=5e-3)
    assert together <= (16 if form == "int8" else 26)


def _go_on(model: torch.nn.Module, optimizer: infinity.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _start(offload: MakeEngine, form: str, **settings: Any) -> tuple[torch.nn.Module, infinity.Engine, infinity.AdamW]:
    model = build(Net)
    engine = offload(model, precision="bf16", state_format=form, schedule="synchronous", **settings)
    return model, engine, infinity.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("budget", ["600KiB", "64MiB"])
def test_a_resumed_run_has_the_same_bits(offload: MakeEngine, tmp_path: Path, form: str, budget: str) -> None:
    model, engine, optimizer = _start(offload, form)
    _go_on(model, optimizer, range(3))
    engine.save(tmp_path / "saved", optimizer=optimizer)
    expected = _go_on(model, optimizer, range(3, 6))
    other, resumed, others = _start(offload, form, host={"budget": budget}, chunk="16KiB")
    resumed.load(tmp_path / "saved", optimizer=others)
    assert _go_on(other, others, range(3, 6)) == expected
    left, right = gathered_parameters(model), gathered_parameters(other)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("form", FORMATS)
def test_state_dicts_are_in_fp32_and_give_back_the_same_bits(offload: MakeEngine, form: str) -> None:
    model, _, optimizer = _start(offload, form)
    _go_on(model, optimizer, range(3))
    saved = optimizer.state_dict()
    assert all(value.dtype is torch.float32 for state in saved["state"].values() for value in state.values())
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()
    for number, state in saved["state"].items():
        assert all(torch.equal(value, again["state"][number][name]) for name, value in state.items())


@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8")])
def test_a_checkpoint_continues_in_another_format(offload: MakeEngine, tmp_path: Path, before: str, after: str) -> None:
    model, engine, optimizer = _start(offload, before)
    _go_on(model, optimizer, range(4))
    engine.save(tmp_path / "saved", optimizer=optimizer)
    moments = optimizer.state_dict()["state"]
    other, resumed, others = _start(offload, after)
    resumed.load(tmp_path / "saved", optimizer=others)
    for number, state in others.state_dict()["state"].items():
        for name, value in state.items():
            saved: Tensor = moments[number][name]
            torch.testing.assert_close(value, saved, rtol=1 / 16, atol=float(saved.abs().max()) / 1000)
    _go_on(other, others, range(4, 6))
    before_parameters, after_parameters = gathered_parameters(model), gathered_parameters(other)
    assert before_parameters.keys() == after_parameters.keys()


@pytest.mark.parametrize("form", FORMATS)
def test_losses_stay_near_fp32(offload: MakeEngine, form: str) -> None:
    loop = Loop(Net, steps=12)
    exact, _ = train(offload, "fp32", loop)
    rounded, _ = train(offload, form, loop)
    assert any(not torch.equal(rounded.parameters[name], exact.parameters[name]) for name in exact.parameters)
    assert rounded.losses == pytest.approx(exact.losses, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_of_300_steps_on_real_text_stay_within_a_percent_of_fp32() -> None:
    found = compare(steps=300)
    assert found["fp32"]["last_loss"] < 0.75 * found["fp32"]["first_loss"]
    for form in FORMATS:
        assert found[form]["losses"] != found["fp32"]["losses"]
        assert found[form]["largest_difference"] < 0.01
