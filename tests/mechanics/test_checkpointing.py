"""Activation checkpointing of every kind × what is shared, frozen and repeated (MECHANICS, sections 1 and 6)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import SCHEDULES, same
from tests.parity.loops import Loop, assert_parity
from tests.zoo import Net, batch, loss_of, one_step

KINDS = (None, "nr", "re", "span", "nested")


class _Partly(Net):
    """A whole block is frozen, and of another one the half."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)  # type: ignore[union-attr]
        self.embed.requires_grad_(self.checkpointing == "re")  # a reentrant region needs an input with a gradient


MAKERS: dict[str, Any] = {
    "untied": Net,
    "tied": partial(Net, tied=True),
    "frozen": _Partly,
    "three times": partial(Net, repeat=3),
    "tied, three times": partial(Net, tied=True, repeat=3),
}


@pytest.mark.parametrize("checkpointing", KINDS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_checkpointing(offload: MakeEngine, kind: str, checkpointing: str | None) -> None:
    """Schedules and budgets in turn; nothing stays gathered."""
    number = list(MAKERS).index(kind) + KINDS.index(checkpointing)
    schedule = SCHEDULES[number % 3]
    host = {"budget": ("600KiB", "64MiB")[number % 2]}

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [one_step(model, optimizer, step) for step in range(3)]

    same(offload, partial(MAKERS[kind], checkpointing=checkpointing), script, schedule=schedule, host=host)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_saved_elsewhere(offload: MakeEngine, schedule: str) -> None:
    """Hooks on saved tensors see parameters too; the copies they make are those of the forward."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen = []
        for step in range(3):
            with torch.autograd.graph.save_on_cpu():
                loss = loss_of(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    same(offload, Net, script, schedule=schedule)


class _Mixed(nn.Module):
    """One unit with parameters of four dtypes, trained and frozen, of which one is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(37, 37)
        self.base = nn.Parameter(torch.randn(37, 37).to(torch.bfloat16), requires_grad=False)
        self.shift = nn.Parameter(torch.randn(37, dtype=torch.float64), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(37), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.one = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Parameter(torch.ones(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(x) @ self.base.float() * 0.1 + self.shift.float()
        y = y[..., self.order] * self.one + self.empty.sum()
        return x + (y * self.sometimes if bool(x.detach().sum() > 0) else y)


class _MixedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Mixed() for _ in range(3))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("host", ["700KiB", "64MiB"])
def test_dtypes_and_frozen_parts_mixed_in_a_unit(offload: MakeEngine, schedule: str, host: str) -> None:
    """Of a group that is updated, what had no gradient in the step neither moves nor decays."""
    assert_parity(Loop(_MixedNet, steps=6), offload, schedule=schedule, host={"budget": host}, check_traffic=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameter_groups_added_later(offload: MakeEngine, schedule: str) -> None:
    """Nothing of a group moves before it is added, and its count of steps starts then."""

    def script(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        def step(number: int) -> float:
            model.zero_grad()  # torch's optimizer would keep gradients of what it does not hold yet, and use them later
            return one_step(model, optimizer, number)

        seen = [step(0), step(1)]
        optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 3e-3})
        seen.append(step(2))
        optimizer.add_param_group({"params": [model.head.weight], "weight_decay": 0.5})
        return [*seen, step(3), step(4), step(5)]

    plain = _start(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), script, None)
    ours = _start(lambda p: infinity.AdamW(p, lr=1e-2), script, partial(offload, schedule=schedule))
    assert ours == plain


def _start(make_optimizer: Any, script: Any, offload: Any) -> list[Any]:
    torch.manual_seed(0)
    model: Any = Net()
    if offload is not None:
        offload(model)
    seen: list[Any] = script(model, make_optimizer(list(model.blocks[0].parameters())))
    return seen
