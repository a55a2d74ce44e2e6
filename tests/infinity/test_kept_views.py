"""Views of parameters that hooks keep from a forward: they show the present values as long as they live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.torch_compat import holders_are_told_apart, is_held_by_code
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered, train
from tests.zoo import Net, batch, build, loss_of

TOLD_APART = pytest.mark.skipif(
    not holders_are_told_apart(), reason="this torch does not tell tensors that code holds from those of a graph"
)
SCHEDULES = ("synchronous", "overlapped", "deferred")


def _weight(model: nn.Module) -> Tensor:
    weight = model.get_submodule("blocks.1").up.weight
    assert isinstance(weight, Tensor)
    return weight


def _keep(model: nn.Module, take: Any) -> list[Tensor]:
    """Let a hook of a block keep what `take` makes of its weight in the next forward."""
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not kept:
            kept.append(take(_weight(model)))

    model.get_submodule("blocks.1.up").register_forward_hook(hook)
    return kept


TAKES = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "row": lambda w: w[1],
    "transposed": lambda w: w.t(),
    "row of detach": lambda w: w.detach()[1],
}


@pytest.mark.parametrize("take", TAKES)
def test_view_kept_from_an_evaluation(offload: MakeEngine, take: str) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model)
    kept = _keep(model, TAKES[take])
    with torch.no_grad():
        model(batch(0))
    assert torch.equal(kept[0], TAKES[take](_weight(plain)))
    kept.clear()
    with torch.no_grad():
        model(batch(0))
    kept.clear()
    engine._runtime.gatherer.release_unviewed()
    nothing_gathered(engine)


@TOLD_APART
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("take", ["detach", "data"])
def test_view_kept_from_a_training_forward(offload: MakeEngine, take: str, schedule: str) -> None:
    """As in plain PyTorch, it shows what the optimizer makes of the parameter."""
    models = {"plain": build(Net), "ours": build(Net)}
    engine = offload(models["ours"], schedule=schedule)
    optimizers = {
        "plain": torch.optim.AdamW(models["plain"].parameters(), fused=True),
        "ours": infinity.AdamW(models["ours"].parameters()),
    }
    kept = {name: _keep(model, TAKES[take]) for name, model in models.items()}
    for step in range(3):
        losses = [train(models[name], optimizers[name], step) for name in models]
        assert losses[0] == losses[1]
        engine.metrics()
        assert torch.equal(kept["ours"][0], kept["plain"][0])
    kept["ours"].clear()
    engine._runtime.gatherer.release_unviewed()


def test_detached_values_in_a_graph_keep_no_memory(offload: MakeEngine) -> None:
    """What only the graph holds goes with the unit, as ever: the backward brings it back."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for line in self.lines:
                x = line(x) * line.weight.detach()[0]  # type: ignore[operator,union-attr,index]
            return x

    model, plain = build(Scaled), build(Scaled)
    engine = offload(model, schedule="synchronous")
    x = torch.randn(4, 30)
    loss = model(x).sum()
    nothing_gathered(engine)
    loss.backward()
    plain(x).sum().backward()
    assert torch.equal(model.get_parameter("lines.1.weight").grad, plain.get_parameter("lines.1.weight").grad)  # type: ignore[arg-type]


def test_an_evaluation_beside_a_waiting_graph_keeps_nothing(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    loss = loss_of(model, batch(0))
    with torch.no_grad():
        model(batch(1))
    nothing_gathered(engine)
    loss.backward()  # type: ignore[no-untyped-call]


def test_kept_views_outlive_the_engine(offload: MakeEngine) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model)
    kept = _keep(model, TAKES["detach"])
    with torch.no_grad():
        model(batch(0))
    engine.close()
    assert torch.equal(kept[0], _weight(plain))


@TOLD_APART
def test_holders_are_told_apart() -> None:
    weight = torch.ones(3)
    assert is_held_by_code(weight) is False  # nobody but the one who asks
    other = weight
    assert is_held_by_code(weight)
    graph = torch.ones(3, requires_grad=True) * weight
    del other
    assert not is_held_by_code(weight)
    assert graph.requires_grad
