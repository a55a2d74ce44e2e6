"""Loops that go backward in other ways than once per forward give the bits of plain PyTorch, or are refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import same
from tests.zoo import Block, Net, batch, build, loss_of

HELD, SPILLED = {"budget": "1MiB"}, {"budget": "440KiB"}
HOSTS = pytest.mark.parametrize("host", [HELD, SPILLED], ids=["held", "spilled"])
RECOMPUTED = pytest.mark.parametrize("checkpointing", [None, "nr", "re"])


def _end_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class TwoOutputs(Net):
    """Gives the values after the second block beside the prediction."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(ids)
        for block in self.blocks[:2]:
            x = self._run(block, x)
        between = x
        for block in self.blocks[2:]:
            x = self._run(block, x)
        return self.head(x), between


def _losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    out, between = model(ids)
    return functional.cross_entropy(out.flatten(0, 1), ids.flatten()), between.square().mean()


@HOSTS
@RECOMPUTED
@pytest.mark.parametrize("order", ["first comes first", "last comes first"])
def test_two_losses_of_two_graphs(
    offload: MakeEngine, host: dict[str, Any], checkpointing: str | None, order: str
) -> None:
    """Peers dropped or mis-scaled such gradients (PEER_DEEPSPEED section 4, number 8)."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            losses = [loss_of(model, batch(step)), loss_of(model, batch(50 + step))]
            for loss in losses if order == "first comes first" else reversed(losses):
                loss.backward()  # type: ignore[no-untyped-call]
            seen += [loss.item() for loss in losses]
            _end_step(optimizer)
        return seen

    same(offload, partial(Net, checkpointing=checkpointing), script, schedule="synchronous", host=host)


@HOSTS
def test_two_losses_of_one_graph(offload: MakeEngine, host: dict[str, Any]) -> None:
    """The first backward runs through a part of the graph, which is kept for the second."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            whole, half = _losses(model, batch(step))
            half.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            whole.backward()  # type: ignore[no-untyped-call]
            seen += [whole.item(), half.item()]
            _end_step(optimizer)
        return seen

    same(offload, TwoOutputs, script, schedule="synchronous", host=host)


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_a_backward_that_ends_half_way(offload: MakeEngine, schedule: str) -> None:
    """What lies behind the loss gets no gradient: it is not updated, and no weight decay touches it."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            _, half = _losses(model, batch(step))
            half.backward()  # type: ignore[no-untyped-call]
            seen.append(half.item())
            _end_step(optimizer)
        return seen

    same(offload, TwoOutputs, script, schedule=schedule)


@HOSTS
@pytest.mark.parametrize("checkpointing", [None, "nr", "re", "span", "nested"])
def test_accumulation_with_no_sync_and_a_boundary_that_varies(
    offload: MakeEngine, host: dict[str, Any], checkpointing: str | None
) -> None:
    """PEER_DEEPSPEED section 4, number 8."""

    engines: list[infinity.Engine] = []

    def make_engine(model: nn.Module, **settings: Any) -> infinity.Engine:
        engines.append(offload(model, **settings))
        return engines[-1]

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for micro_batches in (1, 3, 2, 1):
            for number in range(micro_batches):
                is_last = number == micro_batches - 1
                with engines[-1].no_sync() if engines and not is_last else contextlib.nullcontext():
                    loss = loss_of(model, batch(len(seen))) / micro_batches
                    loss.backward()  # type: ignore[no-untyped-call]
                seen.append(loss.item())
            _end_step(optimizer)
        return seen

    same(make_engine, partial(Net, checkpointing=checkpointing), script, schedule="synchronous", host=host)


@HOSTS
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("of", ["all", "blocks"])
def test_gradients_of_parameters_by_autograd_grad(
    offload: MakeEngine, host: dict[str, Any], schedule: str, of: str
) -> None:
    """They are returned whole, and leave no trace in the step."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            chosen = [p for name, p in model.named_parameters() if of == "all" or "blocks" in name]
            seen += torch.autograd.grad(loss_of(model, batch(step)), chosen)
            loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            _end_step(optimizer)
        return seen

    same(offload, Net, script, schedule=schedule, host=host)


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_backward_to_some_parameters_only(offload: MakeEngine, schedule: str) -> None:
    """`backward(inputs=...)` gives a gradient to these and to no others."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            loss = loss_of(model, batch(step))
            loss.backward(inputs=[p for n, p in model.named_parameters() if "up" in n])  # type: ignore[no-untyped-call]
            seen.append(loss.item())
            _end_step(optimizer)
        return seen

    same(offload, Net, script, schedule=schedule)


def test_an_evaluation_between_forward_and_backward(offload: MakeEngine) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            loss = loss_of(model, batch(step))
            with torch.no_grad():
                seen.append(loss_of(model, batch(70 + step)).item())
            loss.backward()  # type: ignore[no-untyped-call]
            _end_step(optimizer)
        return seen

    engine = same(offload, Net, script, schedule="overlapped", host=SPILLED)
    assert engine.metrics()["order/misses"] == 0


def test_generation_between_steps_keeps_the_learned_order(offload: MakeEngine) -> None:
    """A peer threw its trace away at every change of mode (PEER_DEEPSPEED section 4, number 10)."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            _end_step(optimizer)
            model.eval()
            with torch.no_grad():
                ids = batch(90 + step)[:1, :4]
                for _ in range(3):
                    ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
            model.train()
            seen.append(ids)
        return seen

    engine = same(offload, partial(Net, checkpointing="nr"), script, schedule="overlapped", host=SPILLED)
    assert engine.metrics()["order/misses"] == 0


# Hooks of parameters -----------------------------------------------------------------------------------------------


def test_hooks_of_parameters_run_as_in_torch(offload: MakeEngine) -> None:
    """Both kinds; one of them changes the gradient."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: grad * 0.5)

        def look(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())

        handle = model.get_parameter("blocks.2.down.weight").register_post_accumulate_grad_hook(look)
        for step in range(3):
            loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            _end_step(optimizer)
        handle.remove()
        loss_of(model, batch(3)).backward()  # type: ignore[no-untyped-call]
        _end_step(optimizer)
        return seen

    same(offload, Net, script, schedule="synchronous")


@HOSTS
@pytest.mark.parametrize("name", ["blocks.1.up.weight", "head.weight"])
def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused(
    offload: MakeEngine, host: dict[str, Any], name: str
) -> None:
    model = build(Net)
    offload(model, host=host, resident_threshold="8KiB")  # the head is resident, the block is not
    optimizer = infinity.AdamW(model.parameters())
    seen: list[bool] = []
    model.get_parameter(name).register_post_accumulate_grad_hook(lambda parameter: seen.append(True))
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.UnsupportedModelError, match=f"'{name}'.*a part of an accumulated gradient"):
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    assert seen == [True]
    optimizer.zero_grad()
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    _end_step(optimizer)


# Graphs that are older than a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(Block(), Block())], ids=["streamed", "resident"])
def test_a_graph_older_than_a_step_is_refused(offload: MakeEngine, make: Callable[[], nn.Module]) -> None:
    """Also when all that it needs is resident: its parameters have other values now."""
    model = build(make)
    offload(model, resident_threshold="1KiB" if isinstance(model, Net) else "4MiB")
    optimizer = infinity.AdamW(model.parameters())
    given = batch(0) if isinstance(model, Net) else torch.randn(4, 37)
    loss = model(given).square().mean()
    loss.backward(retain_graph=True)
    _end_step(optimizer)
    with pytest.raises((RuntimeError, infinity.IterationError), match=r"inplace operation|updated between"):
        loss.backward()
