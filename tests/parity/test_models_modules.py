"""The kinds of modules that people use train as in plain PyTorch: the same losses, parameters and buffers, bit for bit.

Of the bugs that users of the leading engine met, here are: data-dependent branches and repeated blocks (DeepSpeed
#5828), failures in the iteration after the trace is complete (#1820), parameters larger than any buffer (#3506),
layers without gradients in a step (#4565).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.observe.shortages import report_of
from tests.conftest import MakeEngine
from tests.parity import model_kinds as kinds
from tests.parity.loops import Loop, assert_same, smallest_budget, train_offloaded, train_plain
from tests.zoo import build

SCHEDULES = ("overlapped", "synchronous", "deferred")
KINDS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(kinds.Recurrent, nn.LSTM),
    "GRU": partial(kinds.Recurrent, nn.GRU),
    "RNN": partial(kinds.Recurrent, nn.RNN),
    "bidirectional": kinds.BidirectionalLstm,
    "cells": kinds.Cells,
    "attention": kinds.SelfAttention,
    "separate attention": kinds.SeparateAttention,
    "encoder and decoder": kinds.EncoderDecoder,
    "batch norm": lambda: kinds.Stack(kinds.Normalized() for _ in range(3)),
    "buffers": kinds.Counting,
    "experts": lambda: kinds.Stack(kinds.Experts() for _ in range(2)),
    "expert units": kinds.ExpertUnits,
    "branches": kinds.Branching,
    "aliased": kinds.Aliased,
    "repeating": kinds.Repeating,
    "many tiny": kinds.ManyTiny,
    "dictionary": kinds.InDictionary,
    "large": kinds.Large,
    "not contiguous": kinds.Turned,
    "multiplying": lambda: kinds.Stack(kinds.Multiplying() for _ in range(2)),
    "bags": kinds.Bags,
    **{
        name: lambda make=make: kinds.Stack(kinds.Reparametrized(make) for _ in range(2))
        for name, make in kinds.PARAMETRIZATIONS.items()
    },
    **{
        f"lone {name}": lambda make=make: kinds.LoneReparametrized(make)
        for name, make in kinds.PARAMETRIZATIONS.items()
    },
}


# Autograd holds the gradient of a unit that is called in several places back until the last of them; that a model does
# so with a module that stands in one place (here the embedding and the head) shows only as it runs.
_HELD_BACK = {"aliased": 32 << 10}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _train_both(make: Callable[[], nn.Module], offload: Callable[[nn.Module], infinity.Engine]) -> infinity.Engine:
    """Train plain and offloaded, compare every bit, buffers too."""
    models: list[nn.Module] = []

    def make_kept() -> nn.Module:
        models.append(make())
        return models[-1]

    loop = Loop(make_kept, steps=3)
    plain = train_plain(loop)
    ours, engine = train_offloaded(loop, offload)
    assert_same(plain, ours)
    expected, got = map(_buffers, models)
    assert expected.keys() == got.keys()
    assert all(torch.equal(buffer, got[name]) for name, buffer in expected.items())
    return engine


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_with_the_smallest_budgets(offload: MakeEngine, schedule: str, kind: str) -> None:
    make = KINDS[kind]
    host = smallest_budget(offload, "host", build(make), schedule=schedule)
    device = smallest_budget(offload, "device", build(make), schedule=schedule)
    device += _HELD_BACK.get(kind, 0)
    settings = {"host": {"budget": host}, "device": {"kind": "cpu", "budget": device}}
    engine = _train_both(make, lambda model: offload(model, schedule=schedule, **settings))
    metrics = engine.metrics()
    assert metrics["host/peak_bytes"] <= host
    assert metrics["device/peak_bytes"] <= device


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [kinds.Aliased, kinds.ReturnsParameters])
def test_memory_that_only_running_shows(offload: MakeEngine, make: Callable[[], nn.Module], schedule: str) -> None:
    """The smallest device budget is too small for how the forward uses its units; the refusal names one that works."""
    budget = smallest_budget(offload, "device", build(make), schedule=schedule, host={"budget": "4MiB"})
    loop = Loop(make, steps=2)
    for _ in range(4):  # a forward that fails has shown a part only
        with pytest.raises(infinity.DeviceOutOfMemoryError, match="that shows only now") as refusal:
            _train(offload, loop, budget, schedule)
        assert "\ndevice: " in str(report_of(refusal.value))
        named = re.search(r"smallest device budget that works is .* \((\d+) bytes\)$", str(refusal.value))
        assert named
        assert int(named[1]) > budget
        budget = int(named[1])
        try:
            ours = _train(offload, loop, budget, schedule)
        except infinity.DeviceOutOfMemoryError:
            continue
        assert_same(train_plain(loop), ours)
        return
    pytest.fail("the budget that is named does not work")


def _train(offload: MakeEngine, loop: Loop, budget: int, schedule: str) -> Any:
    device, host = {"kind": "cpu", "budget": budget}, {"budget": "4MiB"}
    return train_offloaded(loop, lambda model: offload(model, schedule=schedule, device=device, host=host))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_in_host_memory(offload: MakeEngine, kind: str) -> None:
    _train_both(KINDS[kind], lambda model: offload(model, schedule="synchronous", host={"budget": "64MiB"}))


class _Parts(nn.Module):
    """Two halves that are called by themselves; one of them reads a weight of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = kinds.Stack(kinds.Mlp() for _ in range(3))
        self.decoder = _Reader(self.encoder.head)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(ids))
        return out


class _Reader(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.line = nn.Linear(kinds.VOCAB, kinds.VOCAB)
        self.others = (other,)  # a tuple, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        return y @ self.others[0].weight @ self.others[0].weight.t()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_of_a_model_called_by_themselves(offload: MakeEngine, schedule: str) -> None:
    """A part that is called from outside is an outermost forward of its own, evaluated or trained."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            model.encoder(ids)
            model.decoder.line(model.encoder(ids))
        logits = model.decoder(model.encoder(ids)) if int(ids.sum()) % 2 else model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    loop = Loop(_Parts, loss=loss)
    plain = train_plain(loop)
    ours, _ = train_offloaded(loop, lambda model: offload(model, schedule=schedule))
    assert_same(plain, ours)
