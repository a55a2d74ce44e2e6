"""`infinity.AdamW` as a torch optimizer: arguments, groups, schedulers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.zoo import Net, batch, build, loss_of, one_step


@pytest.mark.parametrize(
    "bad",
    [{"lr": -1.0}, {"eps": -1e-9}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}],
    ids=str,
)
def test_values_out_of_range(offload: MakeEngine, bad: dict[str, Any]) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.ConfigError, match=next(iter(bad))):
        infinity.AdamW(model.parameters(), **bad)
    infinity.AdamW(model.parameters())  # the refused one is not attached


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_norms_out_of_range(offload: MakeEngine, norm: float) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.ConfigError, match="max_grad_norm"):
        infinity.AdamW(model.parameters(), max_grad_norm=norm)


def test_is_an_optimizer(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    optimizer = infinity.AdamW(model.parameters(), lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5]
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    assert optimizer.last_grad_norm is None
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    one_step(model, optimizer, 0)
    assert seen == ["after"]
    optimizer.zero_grad(set_to_none=False)


def test_foreign_parameters_are_refused(offload: MakeEngine) -> None:
    model, other = build(Net), build(Net)
    with pytest.raises(infinity.ConfigError, match=r"shape \(29, 37\) is not offloaded"):
        infinity.AdamW(model.parameters())
    offload(model)
    offload(other)
    with pytest.raises(infinity.ConfigError, match="belongs to the engine of another model"):
        infinity.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(infinity.ConfigError, match="not offloaded"):
        infinity.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])
    with pytest.raises(infinity.ConfigError, match="no parameter of an offloaded model"):
        infinity.clip_grad_norm_([], 1.0)


def test_one_optimizer_per_engine(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    infinity.AdamW(model.get_submodule("blocks").parameters())
    with pytest.raises(infinity.ConfigError, match="already has an optimizer"):
        infinity.AdamW(model.get_submodule("head").parameters())


def test_groups_can_be_added_later(offload: MakeEngine) -> None:
    plain, ours = build(Net), build(Net)
    offload(ours, schedule="synchronous")
    optimizers: list[Any] = [
        torch.optim.AdamW(plain.get_submodule("head").parameters(), lr=1e-2, fused=True),
        infinity.AdamW(ours.get_submodule("head").parameters(), lr=1e-2),
    ]
    losses: list[list[float]] = [[], []]
    for step in range(4):
        for number, (model, optimizer) in enumerate(zip((plain, ours), optimizers, strict=True)):
            if step == 2:
                optimizer.add_param_group({"params": list(model.get_submodule("blocks").parameters()), "lr": 1e-3})
            losses[number].append(one_step(model, optimizer, step))
            model.zero_grad()  # what the optimizer did not hold yet
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ask", ["max_grad_norm", "clip_grad_norm_"])
def test_overlapped_refuses_to_clip(offload: MakeEngine, ask: str) -> None:
    model = build(Net)
    offload(model, schedule="overlapped")
    if ask == "max_grad_norm":
        with pytest.raises(infinity.ConfigError, match=r"max_grad_norm.*schedule='synchronous'"):
            infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        return
    infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.ConfigError, match=r"clip_grad_norm_.*schedule='synchronous'"):
        infinity.clip_grad_norm_(model.parameters(), 1.0)


def test_overlapped_needs_the_optimizer_first(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, schedule="overlapped")
    loss = loss_of(model, batch(0))
    with pytest.raises(infinity.ConfigError, match="before the first backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    one_step(model, infinity.AdamW(model.parameters()), 0)


def test_overlapped_notices_hyperparameters_that_came_too_late(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, schedule="overlapped")
    optimizer = infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(infinity.IterationError, match="changed between backward and"):
        optimizer.step()


def test_nothing_attached_trains_nothing(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer = infinity.AdamW(model.parameters())
    optimizer.step()  # built after the backward: its gradients count
    assert engine.metrics()["optimizer/chunks"] > 0
    assert engine.metrics()["step"] == 1
