"""What torch offers around a loop (autocast, compile, LR schedulers) gives the same bits around an offloaded model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import infinity
from tests.conftest import MakeEngine, small_config
from tests.leaks import LeakCheck, check_empty
from tests.mechanics.test_iterations import nothing_gathered, same
from tests.mechanics.test_outputs_and_uses import DYNAMO
from tests.parity.loops import gathered_parameters
from tests.zoo import Block, Net, batch, build, loss_of, one_step

SCHEDULES = pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])


# Autocast ----------------------------------------------------------------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("checkpointing", [None, "nr", "re"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_autocast(offload: MakeEngine, schedule: str, checkpointing: str | None, repeat: int) -> None:
    """A block that runs twice shares one cast of its weights, with and without the engine."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    make = partial(Net, blocks=2, checkpointing=checkpointing, repeat=repeat)
    same(offload, make, script, schedule=schedule, host={"budget": "440KiB"})


# Compiled units ----------------------------------------------------------------------------------------------------


@DYNAMO
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["module.compile()", "torch.compile(block)"])
def test_compiled_blocks(offload: MakeEngine, backend: str, how: str) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        assert isinstance(model, Net)
        torch._dynamo.reset()
        blocks = list(model.blocks)
        for number, block in enumerate(blocks):
            if how == "module.compile()":
                block.compile(backend=backend)
            else:
                model.blocks[number] = torch.compile(block, backend=backend)
        seen: list[Any] = []
        for step in range(3):
            seen.append(one_step(model, optimizer, step))
            with torch.no_grad():
                seen.append(model(batch(40 + step)))
        for number, block in enumerate(blocks):
            model.blocks[number] = block
        return seen

    same(offload, partial(Net, blocks=2), script, schedule="overlapped", host={"budget": "440KiB"})


# LR schedulers -----------------------------------------------------------------------------------------------------

_Make = Callable[[torch.optim.Optimizer], Any]
LR_SCHEDULERS: dict[str, _Make] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic, with betas": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True),
    "one cycle, with betas": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "one after the other": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.somewhere
@SCHEDULES
@pytest.mark.parametrize("make", LR_SCHEDULERS.values(), ids=LR_SCHEDULERS.keys())
def test_lr_schedulers(offload: MakeEngine, schedule: str, make: _Make) -> None:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        scheduler = make(optimizer)
        seen: list[Any] = []
        for step in range(6):
            loss = one_step(model, optimizer, step)
            scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
            group = optimizer.param_groups[0]
            seen += [loss, float(group["lr"]), tuple(map(float, group["betas"]))]
        return seen

    same(offload, partial(Net, blocks=2), script, schedule=schedule)


@SCHEDULES
def test_one_cycle_moves_the_momentum_of_sgd(offload: MakeEngine, schedule: str) -> None:
    plain, ours = build(Net), build(Net)
    offload(ours, schedule=schedule)
    losses = []
    for model, make in ((plain, torch.optim.SGD), (ours, infinity.SGD)):
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        losses.append([])
        for step in range(5):
            losses[-1].append(one_step(model, optimizer, step))
            scheduler.step()
    assert losses[0] == losses[1]
    found = gathered_parameters(ours)
    assert not [name for name, want in plain.named_parameters() if not torch.equal(want, found[name])]


# Transforms --------------------------------------------------------------------------------------------------------


@SCHEDULES
def test_vmap(offload: MakeEngine, schedule: str) -> None:
    """A model called under `torch.vmap` has its graph behind tensors that are no part of one."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            ids = torch.stack([batch(step), batch(step + 5)])
            loss = torch.vmap(model)(ids).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen += [loss.detach(), torch.vmap(torch.vmap(model))(ids)]
        return seen

    same(offload, Net, script, schedule=schedule)


@pytest.mark.parametrize(
    "transform",
    [
        lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
        torch.func.vjp,
        lambda model, x: torch.vmap(torch.func.jacrev(model))(x),
    ],
    ids=["grad", "vjp", "jacrev"],
)
def test_derivatives_of_torch_func_are_refused(offload: MakeEngine, transform: Callable[..., Any]) -> None:
    """By name; those of torch.autograd give the same."""
    x = torch.linspace(-1, 1, 37).view(1, 37)
    ours = build(lambda: nn.Sequential(Block(), Block()))
    expected = torch.autograd.functional.jacobian(ours, x)
    engine = offload(ours)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'0' is called inside a derivative of torch.func"):
        transform(ours, x)
    assert torch.equal(torch.autograd.functional.jacobian(ours, x), expected)
    engine.reset_iteration()
    nothing_gathered(engine)


# Engines one after another and beside each other -------------------------------------------------------------------


def test_twenty_engines_leave_nothing_behind(tmp_path: Path) -> None:
    """Memory, threads, descriptors and disk return to where they were (PEER_DEEPSPEED section 4, number 19)."""

    def round_of(number: int) -> int:
        model = build(partial(Net, blocks=6, width=128, hidden=256))
        host = {"budget": "6MiB"}
        settings = {"device": {"kind": "cpu", "budget": "16MiB"}, "host": host, "schedule": "overlapped"}
        with infinity.offload(model, small_config(tmp_path, **settings)) as engine:
            optimizer = infinity.AdamW(model.parameters())
            for step in range(2):
                one_step(model, optimizer, number + step)
        check_empty(engine)
        del engine, model, optimizer
        gc.collect()  # hooks and modules refer to each other; what an engine held is given back before that
        return int(psutil.Process().memory_info().rss)

    for number in range(4):  # what a process loads and keeps once
        round_of(number)
    before = LeakCheck.take()
    rss = [round_of(number) for number in range(20)]
    before.check([tmp_path])
    assert not list(tmp_path.iterdir())
    state_nbytes = 12 * 6 * 2 * 128 * 256
    assert max(rss[-5:]) - max(rss[:5]) < 2 * state_nbytes, "20 engines keep more than two engines' state"
