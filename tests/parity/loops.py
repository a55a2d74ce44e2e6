"""The same training loop with plain PyTorch and through an engine, and what each of them gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.zoo import batch, build, loss_of

Groups = Callable[[nn.Module], Any]


def _all_parameters(model: nn.Module) -> Iterable[Tensor]:
    return model.parameters()


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        accumulate: micro-batches of every step, used in turn.
        max_norm: clip to this norm before every step, with `clip_grad_norm_`.
        groups: what the optimizer is given, made of the model.
        schedule: makes an LR scheduler of the optimizer.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of
    batch: Callable[[int], Tensor] = batch
    steps: int = 4
    accumulate: Sequence[int] = (1,)
    max_norm: float | None = None
    groups: Groups = _all_parameters
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    hyper: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1}, hash=False)

    def micro_batches(self, step: int) -> int:
        return self.accumulate[step % len(self.accumulate)]


@dataclass
class Outcome:
    """What a loop gave: the loss of every micro-batch, the norm of every clipped step, the parameters at the end."""

    losses: list[float]
    norms: list[Tensor]
    parameters: dict[str, Tensor]


@lru_cache(maxsize=16)  # the same loop is compared with many settings, one after the other
def train_plain(loop: Loop) -> Outcome:
    """The loop with torch's fused AdamW. What it gives is shared: nobody changes it."""
    model = build(loop.make)
    optimizer = torch.optim.AdamW(loop.groups(model), fused=True, **loop.hyper)
    losses, norms = _run(loop, model, optimizer, torch.nn.utils.clip_grad_norm_)
    return Outcome(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


def train_offloaded(
    loop: Loop, make_engine: Callable[[nn.Module], infinity.Engine], *, clip_in_optimizer: bool = False
) -> tuple[Outcome, infinity.Engine]:
    """The loop through an engine, which stays open.

    Args:
        make_engine: offloads the model.
        clip_in_optimizer: clip with the optimizer's `max_grad_norm` instead of `infinity.clip_grad_norm_`.
    """
    model = build(loop.make)
    engine = make_engine(model)
    clip = loop.max_norm if clip_in_optimizer else None
    optimizer = infinity.AdamW(loop.groups(model), max_grad_norm=clip, **loop.hyper)
    losses, norms = _run(loop, model, optimizer, None if clip_in_optimizer else infinity.clip_grad_norm_)
    return Outcome(losses, norms, gathered_parameters(model)), engine


def _run(
    loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., Tensor] | None
) -> tuple[list[float], list[Tensor]]:
    scheduler = loop.schedule(optimizer) if loop.schedule is not None else None
    losses, norms, number = [], [], 0
    torch.manual_seed(7)  # for dropout
    for step in range(loop.steps):
        for _ in range(loop.micro_batches(step)):
            loss = loop.loss(model, loop.batch(number))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            number += 1
        if loop.max_norm is not None and clip is not None:
            norms.append(clip(list(model.parameters()), loop.max_norm))
        optimizer.step()
        if isinstance(optimizer, infinity.AdamW) and optimizer.max_grad_norm is not None:
            assert optimizer.last_grad_norm is not None
            norms.append(optimizer.last_grad_norm)
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return losses, norms


def gathered_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters of an offloaded model, gathered one at a time."""
    return dict(_gather_each(model))


def _gather_each(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, released in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        with infinity.gathered(released):
            yield name, getattr(module, name.rpartition(".")[2]).detach().clone()


def assert_same(plain: Outcome, ours: Outcome) -> None:
    """Every bit is the same."""
    assert ours.losses == plain.losses
    assert len(ours.norms) == len(plain.norms)
    assert all(map(torch.equal, ours.norms, plain.norms))
    assert ours.parameters.keys() == plain.parameters.keys()
    different = [n for n, p in plain.parameters.items() if not torch.equal(p, ours.parameters[n])]
    assert not different


def assert_traffic(engine: infinity.Engine, loop: Loop, *, from_step: int = 0) -> None:
    """The counters of every step equal the closed forms; every unit ran once per micro-batch."""
    per_step = engine.traffic.per_step
    assert len(per_step) == loop.steps
    for step, counted in list(enumerate(per_step))[from_step:]:
        expected = engine.plan.expected_traffic(step, loop.micro_batches(step))
        kinds = {"param": expected.param, "state": expected.state, "grad": expected.grad}
        for kind, want in kinds.items():
            got = (counted[f"nvme_read_bytes/{kind}"], counted[f"nvme_write_bytes/{kind}"])
            assert got == (want.read_nbytes, want.write_nbytes), f"{kind} of step {step}"
        assert counted["nvme_read_bytes"] == expected.read_nbytes
        assert counted["nvme_write_bytes"] == expected.write_nbytes
        assert counted["nvme_read_padding_bytes"] == sum(want.read_padding_nbytes for want in kinds.values())
        assert counted["nvme_write_padding_bytes"] == sum(want.write_padding_nbytes for want in kinds.values())


def assert_parity(
    loop: Loop,
    offload: Callable[..., infinity.Engine],
    *,
    clip_in_optimizer: bool = False,
    check_traffic: bool = True,
    traffic_from_step: int = 0,
    **settings: Any,
) -> infinity.Engine:
    """The loop gives the same bits through an engine with these settings, and moves the bytes it should.

    A model whose backward runs in an unexpected order is mispredicted once: its first step may read more, and the
    second one find some of that in memory.
    """
    plain = train_plain(loop)
    ours, engine = train_offloaded(
        loop, lambda model: offload(model, **settings), clip_in_optimizer=clip_in_optimizer
    )
    assert_same(plain, ours)
    if check_traffic:
        assert_traffic(engine, loop, from_step=traffic_from_step)
    return engine


def smallest_budget(
    offload: Callable[..., infinity.Engine], tier: str, model: nn.Module, **settings: Any
) -> int:
    """The smallest budget, as the refusal of a far too small one names it."""
    with pytest.raises(infinity.PlacementError) as refusal:
        offload(model, **settings, **{tier: {"budget": 4096} | ({"kind": "cpu"} if tier == "device" else {})})
    found = re.search(rf"smallest {tier} budget that works \((\d+) bytes\)", str(refusal.value))
    assert found
    return int(found[1])
