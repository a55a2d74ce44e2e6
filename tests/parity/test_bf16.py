"""bf16: the bits of a written reference of the same arithmetic, and a master that loses nothing between steps.

The reference is a plain model whose parameters are the high halves of an fp32 master, in the dtype in which the device
computes; gradients are added up in fp32, and the master is updated by the numpy reference of the kernel tests.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.groups import FlatGroup
from infinity.optim.hyper import AdamWHyper
from infinity.optim.splitmaster import join_master
from storage.types import TrafficTag
from tests.conftest import MakeEngine
from tests.infinity.test_kernels_bf16 import Operands, reference
from tests.parity.loops import Loop, assert_traffic, gathered_parameters
from tests.zoo import Frozen, Net, OddNet, Skipping, batch, build

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
BF16 = {"precision": "bf16"}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "recomputed": partial(Net, checkpointing="nr"),
    "tied": partial(Net, tied=True),
    "frozen": Frozen,
    "odd": OddNet,
    "skipping": Skipping,
}


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


class Reference:
    """The same training without an engine."""

    def __init__(self, make: Callable[[], nn.Module], compute_dtype: torch.dtype) -> None:
        self.model = build(make)
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16().to(compute_dtype)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        empty = {n: torch.zeros(p.numel()) for n, p in trained.items()}
        self.operands = {
            n: Operands.build(p.detach().float().reshape(-1), empty[n], empty[n], empty[n]) for n, p in trained.items()
        }
        self.steps = dict.fromkeys(trained, 0)
        self.grads: dict[str, Tensor] = {}

    def backward(self, ids: Tensor) -> float:
        loss = _loss(self.model, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.float().reshape(-1)
                self.grads[name] = self.grads[name] + grad if name in self.grads else grad
                parameter.grad = None
        return loss.item()

    def step(self, max_norm: float | None) -> None:
        scale = None
        if max_norm is not None:
            norm = torch.nn.utils.get_total_norm([self.grads[n] for n in self.operands if n in self.grads])
            scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for name, grad in self.grads.items():
            self.steps[name] += 1
            operands = self.operands[name].clone()
            operands.grad = grad
            self.operands[name] = reference(operands, HYPER, self.steps[name], scale)
            parameter = self.model.get_parameter(name)
            parameter.data.copy_(self.operands[name].hi.view(parameter.shape))
        self.grads.clear()

    def master(self, name: str) -> Tensor:
        return join_master(self.operands[name].hi, self.operands[name].lo)


def _read(engine: infinity.Engine, key: str, nbytes: int) -> Tensor:
    store = engine._runtime.store
    assert store is not None
    memory = memoryview(mmap.mmap(-1, nbytes))
    ticket = store.submit_read(key, memory, tag=TrafficTag("test", -1))
    assert ticket.wait(100)
    ticket.result()
    return torch.frombuffer(memory, dtype=torch.uint8)


def _master_of(engine: infinity.Engine, group: FlatGroup) -> Tensor:
    """The fp32 master of a group, joined of what the tiers hold."""
    copy, state = engine._runtime.copies[group.index], engine._runtime.states[group.index]
    hi = copy.tensor if copy.pinned else _read(engine, group.key, group.shard_nbytes).view(torch.bfloat16)
    lows = [
        r.views(r.lease.memory)[0]
        if r.lease is not None
        else _read(engine, r.key, r.nbytes).view(torch.int16)[: r.chunk.numel]
        for r in state.records
    ]
    return join_master(hi, torch.cat(lows))


def _run(
    offload: MakeEngine,
    make: Callable[[], nn.Module],
    *,
    steps: int = 4,
    accumulate: int = 1,
    max_norm: float | None = None,
    **settings: Any,
) -> infinity.Engine:
    model = build(make)
    engine = offload(model, **BF16, **settings)
    plain = Reference(make, engine._runtime.device.compute_dtype(infinity.Precision.BF16))
    optimizer = infinity.AdamW(
        model.parameters(), lr=HYPER.lr, weight_decay=HYPER.weight_decay, max_grad_norm=max_norm
    )
    number = 0
    for _ in range(steps):
        for _ in range(accumulate):
            loss = _loss(model, batch(number))
            loss.backward()  # type: ignore[no-untyped-call]
            assert loss.item() == plain.backward(batch(number))
            number += 1
        optimizer.step()
        plain.step(max_norm)
        optimizer.zero_grad()
    for name, parameter in gathered_parameters(model).items():
        assert torch.equal(parameter, plain.model.get_parameter(name)), name
    engine.metrics()  # everything has landed
    for index, state in engine._runtime.states.items():
        group = engine._runtime.groups[index]
        if state.records[0].is_initialised:
            master = _master_of(engine, group)
            for slot in group.layout.slots:
                mine = master[slot.offset : slot.stop].view(torch.int32)
                assert torch.equal(mine, plain.master(slot.name).view(torch.int32)), slot.name
    return engine


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
@pytest.mark.parametrize("model", MODELS)
def test_models(offload: MakeEngine, schedule: str, model: str) -> None:
    engine = _run(offload, MODELS[model], schedule=schedule, host={"budget": "400KiB"})
    if model in ("plain", "recomputed", "odd"):
        assert_traffic(engine, Loop(MODELS[model]))


@pytest.mark.parametrize("budget", ["250KiB", "64MiB"])
def test_accumulation_and_clipping(offload: MakeEngine, budget: str) -> None:
    settings: dict[str, Any] = {"schedule": "synchronous", "host": {"budget": budget}}
    engine = _run(offload, Net, accumulate=3, max_norm=0.05, **settings)
    assert bool(engine.plan.placement.spilled_gradients) == (budget == "250KiB")
    assert_traffic(engine, Loop(Net, accumulate=(3,)))


def test_several_chunks_on_a_fake_device(offload: MakeEngine) -> None:
    """The fake computes in fp32 whatever the machine can do."""
    device = {"kind": "fake", "budget": "1MiB"}
    engine = _run(offload, Net, schedule="overlapped", chunk="40KiB", host={"budget": "300KiB"}, device=device)
    assert engine.plan.placement.chunk_numel == 4096
    assert engine._runtime.groups[0].compute_dtype is torch.float32


def test_steps_smaller_than_a_bf16_add_up(offload: MakeEngine) -> None:
    """Every update is less than half a unit in the last place of bf16; parameters move all the same."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(64, 64, bias=False)
            nn.init.ones_(self.line.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x)  # type: ignore[no-any-return]

    model = One()
    offload(model, **BF16, schedule="overlapped", resident_threshold=0)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(40):
        out = model(torch.ones(1, 64, dtype=model.line.weight.dtype))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with infinity.gathered(model.line):
        assert torch.equal(model.line.weight.float(), torch.full((64, 64), 1 - 40e-4).bfloat16().float())
