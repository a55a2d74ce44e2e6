"""Tensors that leave a unit by other ways than its output: backwards that begin there find the parameters gathered.

They met freed memory, which ends the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.escapes import Escapes
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import BOTH, same
from tests.zoo import Block, Net, batch, build, loss_of, one_step


class _Keeping(Block):
    """Keeps a loss of its own, made of its parameters before or after its output."""

    def __init__(self, when: str, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.when, self.keep = when, keep
        self.losses: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before":
            self.keep(self, self.loss(x))
        y = super().forward(x)
        if self.when == "after":
            self.keep(self, self.loss(x))
        return y

    def loss(self, x: Tensor) -> Tensor:
        return (self.up.weight**2).sum() * 1e-3 + functional.linear(x, self.up.weight).pow(2).mean() * 1e-2


def _as_attribute(block: Any, loss: Tensor) -> None:
    block.losses = loss


def _in_a_list(block: Any, loss: Tensor) -> None:
    block.losses = [loss, {"half": loss * 0.5}]


def _inside(block: Any, loss: Tensor) -> None:
    block.up.kept = loss


KEEPS: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Tensor]]] = {
    "attribute": (_as_attribute, lambda block: block.losses),
    "list": (_in_a_list, lambda block: block.losses[0] + block.losses[1]["half"]),
    "module inside": (_inside, lambda block: block.up.kept),
}


class _Net(Net):
    def __init__(self, when: str, how: str, checkpointing: str | None = None) -> None:
        super().__init__(checkpointing=checkpointing)
        self.blocks = nn.ModuleList(_Keeping(when, KEEPS[how][0]) for _ in range(4))


@BOTH
@pytest.mark.parametrize("how", KEEPS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("alone", ["added", "alone"])
def test_losses_that_modules_keep(offload: MakeEngine, schedule: str, when: str, how: str, alone: str) -> None:
    """Added to the loss of the output, or differentiated by themselves."""

    def script(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen = []
        for step in range(4):
            loss = loss_of(model, batch(step))
            kept = torch.stack([KEEPS[how][1](block) for block in model.blocks]).sum()
            total = kept if alone == "alone" else loss + kept
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(total.item())
            for block in model.blocks:  # as such code does, or the graph would live until the next forward
                block.losses = block.up.kept = None
        return seen

    same(offload, partial(_Net, when, how), script, schedule=schedule)


@BOTH
@pytest.mark.parametrize("part", ["up", "norm"])
def test_features_that_hooks_take_from_inside(offload: MakeEngine, schedule: str, part: str) -> None:
    """As in distillation and perceptual losses: a forward hook of the user keeps the output of a layer in a unit."""

    def script(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        features: dict[int, Tensor] = {}
        for number in (1, 2):
            layer = getattr(model.blocks[number], part)
            layer.register_forward_hook(lambda _, args, out, number=number: features.__setitem__(number, out))
        seen = []
        for step in range(4):
            loss = loss_of(model, batch(step))
            distance = functional.mse_loss(features[1], features[2]) if part == "norm" else features[2].pow(2).mean()
            total = distance if step % 2 else loss + distance
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(total.item())
            features.clear()
        return seen

    same(offload, Net, script, schedule=schedule)


@pytest.mark.parametrize("checkpointing", ["nr", "re"])
@BOTH
def test_kept_losses_under_checkpointing(offload: MakeEngine, schedule: str, checkpointing: str) -> None:
    """Reentrant regions cut the graph of what they keep; non-reentrant ones compute it again."""

    def script(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen = []
        for step in range(3):
            loss = loss_of(model, batch(step))
            if checkpointing == "nr":
                loss = loss + sum(block.losses for block in model.blocks)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            for block in model.blocks:
                block.losses = None
        return seen

    same(offload, partial(_Net, "before", "attribute", checkpointing), script, schedule=schedule)


def test_what_is_kept_of_an_earlier_forward_is_left_alone(offload: MakeEngine) -> None:
    """A tensor older than the forward belongs to another run, whose parameters have been updated since."""
    model: Any = build(partial(_Net, "after", "attribute"))
    offload(model)
    optimizer = infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    kept = model.blocks[0].losses
    optimizer.step()
    optimizer.zero_grad()
    model(batch(1))
    with pytest.raises(infinity.IterationError, match="updated between this forward and its backward"):
        kept.backward()


def test_long_containers_are_not_searched() -> None:
    module = nn.Linear(2, 2)
    module.many = [torch.ones(2, requires_grad=True) * 2 for _ in range(65)]  # type: ignore[assignment]
    module.few = [torch.ones(2, requires_grad=True) * 2 for _ in range(64)]  # type: ignore[assignment]
    assert len(list(Escapes(module)._kept())) == 64


def test_proxies_and_containers_that_contain_themselves(offload: MakeEngine) -> None:
    """A block may refer to what is around it, weakly, and be used when that is gone."""
    model = build(Net)
    block = model.get_submodule("blocks.1")
    around = [torch.nn.Identity()]
    links: dict[str, Any] = {"back": weakref.proxy(around[0])}
    links["all"] = [links, links, [links]]
    block.links = links  # type: ignore[assignment]
    offload(model)
    around.clear()
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    plain = build(Net)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for number in range(2):
        assert one_step(model, optimizer, number) == one_step(plain, theirs, number)
