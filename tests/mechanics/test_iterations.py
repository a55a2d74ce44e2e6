"""Iterations that do not go as usual: evaluation, dropped graphs, failures, several forwards or backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters
from tests.zoo import Block, Net, batch, build, loss_of, one_step

Script = Callable[[nn.Module, torch.optim.Optimizer], list[Any]]
SCHEDULES = ("overlapped", "synchronous", "deferred")
BOTH = pytest.mark.parametrize("schedule", SCHEDULES)


class Failing(Net):
    """Raises once in the middle of a forward or a backward, when told to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fails_in: str | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = self._run(block, x)
            if number == 1 and self.fails_in is not None:
                where, self.fails_in = self.fails_in, None
                if where == "forward":
                    raise ArithmeticError("forward")
                x.register_hook(_raise)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x)
        return out


def _raise(grad: Tensor) -> Tensor:
    raise ArithmeticError("backward")


def same(offload: MakeEngine, make: Callable[[], nn.Module], script: Script, **settings: Any) -> infinity.Engine:
    """Run a script on a plain model and on an offloaded one; what it returns and all parameters must be equal."""
    plain = build(make)
    expected = script(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    ours = build(make)
    engine = offload(ours, **settings)
    got = script(ours, infinity.AdamW(ours.parameters(), lr=1e-2))
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs
    nothing_gathered(engine)
    for name, parameter in gathered_parameters(ours).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    return engine


def nothing_gathered(engine: infinity.Engine) -> None:
    """Only what is resident is on the device, and every released buffer is without memory."""
    runtime = engine._runtime
    resident = runtime.resident_groups
    assert [g.key for g in runtime.gatherer.gathered()] == [g.key for g in resident]
    for group in runtime.groups:
        assert (group.flat.untyped_storage().nbytes() > 0) == (group in resident)
    assert runtime.device.budget.used_nbytes == sum(group.flat_nbytes for group in resident)


@BOTH
def test_evaluation_between_steps(offload: MakeEngine, schedule: str) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            seen.append(one_step(model, optimizer, step))
            model.eval()
            with torch.no_grad():
                seen += [model(batch(100 + step)), model(batch(200 + step))]
            model.train()
        return seen

    engine = same(offload, partial(Net, dropout=0.0), script, schedule=schedule, host={"budget": "420KiB"})
    assert engine.metrics()["order/misses"] == 0
    per_step = engine.traffic.per_step
    for step, counted in enumerate(per_step):
        assert counted["nvme_write_bytes"] == engine.plan.expected_traffic(step).write_nbytes
        assert counted["nvme_read_bytes/state"] == engine.plan.expected_traffic(step).state.read_nbytes
    assert sum(counted.get("nvme_read_bytes/param_eval", 0) for counted in per_step) > 0


def test_evaluation_alone_writes_nothing(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, host={"budget": "420KiB"})
    before = engine.metrics()["nvme/write_bytes"]
    with torch.no_grad():
        outs = [model(batch(0)) for _ in range(3)]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], build(Net)(batch(0)))
    assert engine.metrics()["nvme/write_bytes"] == before
    nothing_gathered(engine)


def test_inference_mode_then_training(offload: MakeEngine) -> None:
    """Memory that is first allocated in inference mode could never train."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        with torch.inference_mode():
            seen: list[Any] = [model(batch(50)).clone()]
        return [seen[0].sum().item(), one_step(model, optimizer, 0), one_step(model, optimizer, 1)]

    same(offload, Net, script, schedule="overlapped", host={"budget": "420KiB"})


def test_built_in_inference_mode(offload: MakeEngine) -> None:
    with torch.inference_mode():
        model = build(Net)
        engine = offload(model)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), build(Net)(batch(0)))
    nothing_gathered(engine)


@BOTH
@pytest.mark.parametrize("checkpointing", [None, "nr", "re", "nested"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_then_steps(offload: MakeEngine, schedule: str, checkpointing: str | None, where: str) -> None:
    """A failed iteration costs what it computed and nothing else."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = [one_step(model, optimizer, 0)]
        assert isinstance(model, Failing)
        model.fails_in = where
        with pytest.raises(ArithmeticError, match=where):
            loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        if where == "backward" and schedule == "overlapped" and isinstance(optimizer, infinity.AdamW):
            raise _TornError
        optimizer.zero_grad()  # plain PyTorch keeps the gradients that had arrived
        return [*seen, one_step(model, optimizer, 2), one_step(model, optimizer, 3)]

    with contextlib.suppress(_TornError):
        same(offload, partial(Failing, checkpointing=checkpointing), script, schedule=schedule)


class _TornError(Exception):
    """Under the overlapped schedule some parameters are updated already when a backward fails; see below."""


def test_exception_in_overlapped_backward_is_final(offload: MakeEngine) -> None:
    model = build(Failing)
    offload(model, schedule="overlapped")
    optimizer = infinity.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    assert isinstance(model, Failing)
    model.fails_in = "backward"
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    for _ in range(2):
        with pytest.raises(infinity.IterationError, match=r"lost half-way.*start again from the last saved state"):
            one_step(model, optimizer, 2)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_reset_iteration(offload: MakeEngine, where: str) -> None:
    """`reset_iteration` gives memory back at once, without waiting for the next forward."""
    model = build(Failing)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters())
    assert isinstance(model, Failing)
    model.fails_in = where
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    engine.reset_iteration()
    nothing_gathered(engine)
    assert engine._runtime.budgets["gradients"].used_nbytes == 0
    optimizer.step()
    assert engine.metrics()["optimizer/chunks"] == 0
    one_step(model, optimizer, 2)
    assert engine.metrics()["optimizer/chunks"] > 0


@BOTH
def test_two_backwards_of_one_graph(offload: MakeEngine, schedule: str) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        for step in range(3):
            loss = loss_of(model, batch(step))
            (loss * 0.5).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            (loss * 0.25).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return []

    if schedule != "overlapped":
        same(offload, Net, script, schedule=schedule)
        same(offload, Net, script, schedule=schedule, host={"budget": "440KiB"})
        return
    model = build(Net)
    offload(model, schedule=schedule)
    with pytest.raises(infinity.IterationError, match=r"several backwards before step\(\) use schedule=.synchronous."):
        script(model, infinity.AdamW(model.parameters()))


@BOTH
def test_gradient_of_an_input(offload: MakeEngine, schedule: str) -> None:
    """`torch.autograd.grad` leaves no gradient behind, so nothing is updated."""

    def make() -> nn.Module:
        return nn.Sequential(Block(), Block(), Block())

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        torch.manual_seed(3)
        seen: list[Any] = []
        for _ in range(3):
            x = torch.randn(5, 37, requires_grad=True)
            (grad,) = torch.autograd.grad(model(x).square().sum(), x)
            seen.append(grad)
            model(x).square().sum().backward()
            assert x.grad is not None
            seen.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    same(offload, make, script, schedule=schedule)


@BOTH
@pytest.mark.parametrize("checkpointing", [None, "nr", "re"])
def test_dropped_graph(offload: MakeEngine, schedule: str, checkpointing: str | None) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            seen.append(loss_of(model, batch(50 + step)).item())
            seen.append(one_step(model, optimizer, step))
        return seen

    same(offload, partial(Net, checkpointing=checkpointing), script, schedule=schedule)


@pytest.mark.pairs
@BOTH
@pytest.mark.parametrize("checkpointing", [None, "nr", "re"])
@pytest.mark.parametrize("budget", ["1MiB", "440KiB"])
def test_two_forwards_one_backward(
    offload: MakeEngine, schedule: str, checkpointing: str | None, budget: str
) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(4):
            loss = loss_of(model, batch(step)) + loss_of(model, batch(50 + step))
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    same(offload, partial(Net, checkpointing=checkpointing), script, schedule=schedule, host={"budget": budget})


@BOTH
def test_a_graph_older_than_its_parameters_is_refused(offload: MakeEngine, schedule: str) -> None:
    """Plain PyTorch refuses it as well, unless AdamW is fused: the parameters were modified in place."""

    def twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = loss_of(model, batch(0))
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]

    plain = build(Net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice(plain, torch.optim.AdamW(plain.parameters()))
    model = build(Net)
    offload(model, schedule=schedule)
    optimizer = infinity.AdamW(model.parameters())
    with pytest.raises(infinity.IterationError, match="updated between this forward and its backward"):
        twice(model, optimizer)
    one_step(model, optimizer, 1)


def test_step_without_gradients(offload: MakeEngine) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        optimizer.step()
        seen = [one_step(model, optimizer, 0)]
        optimizer.step()
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        optimizer.step()
        return [*seen, one_step(model, optimizer, 2)]

    same(offload, Net, script, schedule="synchronous")


def test_closure(offload: MakeEngine) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        return [optimizer.step(closure), optimizer.step(closure)]

    same(offload, Net, script, schedule="synchronous")
    same(offload, Net, script, schedule="synchronous", host={"budget": "64MiB"})


# Backwards in which no unit takes part ---------------------------------------------------------------------------


class _Probe(Net):
    """Linear probing: the blocks compute without a graph, and only the head, which is always there, trains."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
@pytest.mark.parametrize("make", [_Probe, lambda: nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 29))])
def test_only_parameters_that_are_always_there_train(
    offload: MakeEngine, schedule: str, make: Callable[[], nn.Module]
) -> None:
    """Their gradients were never collected when no unit took part in the backward, and they never trained."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [one_step(model, optimizer, step) for step in range(4)]

    same(offload, make, script, schedule=schedule, resident_threshold="5KiB", host={"budget": "600KiB"})


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_no_unit_takes_part_while_gradients_accumulate(offload: MakeEngine, schedule: str) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        losses = []
        for step in range(3):
            for part in range(2):
                loss = loss_of(model, batch(2 * step + part))
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            clip = infinity.clip_grad_norm_ if isinstance(optimizer, infinity.AdamW) else nn.utils.clip_grad_norm_
            losses.append(float(clip(list(model.parameters()), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    same(offload, _Probe, script, schedule=schedule, resident_threshold="5KiB", host={"budget": "600KiB"})
