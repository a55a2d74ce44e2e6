"""A training loop shared out among ranks, the same loop on one, and what each of them gives."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.gradients import gradient_nbytes
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, batch, build, loss_of

ROWS = 4  # sequences in a micro-batch, shared out among the ranks
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One run. `settings` are those of `infinity.Config`."""

    accumulate: int = 1
    max_norm: float | None = None
    clip_in_optimizer: bool = False
    no_sync: bool = False
    meta: bool = False  # built without memory, initialised by the engine
    vocab: int = 29  # makes the embedding and the head large
    blocks: int = 4
    frozen: bool = False  # the embedding does not train
    smallest: bool = False  # with the smallest host budget that works
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    per_step: Sequence[dict[str, int]] = ()
    expected: Sequence[tuple[int, int]] = ()
    metrics: dict[str, float] = field(default_factory=dict)


def make_config(folder: Path, settings: dict[str, Any]) -> infinity.Config:
    given = {
        "precision": "fp32",
        "device": {"kind": "cpu", "budget": "64MiB"},
        "host": {"budget": "64MiB"},
        "nvme": {"paths": [str(folder)]},
        "resident_threshold": 0,
        "rank_timeout_s": 30.0,
    }
    return infinity.Config(**(given | settings))


def make_net(case: Case) -> nn.Module:
    model = Net(blocks=case.blocks, vocab=case.vocab)
    model.embed.requires_grad_(not case.frozen)
    if case.meta:  # drawn once more when everything is made
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    return model


def built_on(rank: int, case: Case) -> nn.Module:
    """The model as a rank builds it; the first rank's values count."""
    if not case.meta:
        return build(partial(make_net, case), seed=rank)
    torch.manual_seed(rank)
    with infinity.empty_init():
        return make_net(case)


def smallest_host(folder: Path, model: nn.Module, settings: dict[str, Any], **offload: Any) -> dict[str, Any]:
    """The smallest host budget of all ranks on this machine, as the refusal of a far too small one names it."""
    with pytest.raises(infinity.PlacementError) as refusal:
        infinity.offload(model, make_config(folder, settings | {"host": {"budget": 1}}), **offload)
    told = r"smallest host budget that works \((\d+) bytes\)(?:.*host.budget = .* \((\d+))?"
    found = re.search(told, str(refusal.value))
    assert found
    if os.environ["LOCAL_WORLD_SIZE"] == "1":
        return {"host": {"budget": int(found[1])}}
    return {"host": {"budget": int(found[2])}}  # what it says to give for all ranks of this machine


def train_share(folder: Path, case: Case, rank: int, size: int, **offload: Any) -> Outcome:
    """The share of one rank of the run."""
    settings = case.settings
    if case.smallest:
        settings = settings | smallest_host(folder, built_on(0, case), settings, **offload)
    model = built_on(rank, case)
    with infinity.offload(model, make_config(folder, settings), **offload) as engine:
        clip = case.max_norm if case.clip_in_optimizer else None
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=clip)
        outcome = Outcome([], [], {})
        updated_early, before = 0, engine.metrics()
        for step in range(STEPS):
            for ids in _micro_batches(case, step):
                loss = loss_of(model, ids.chunk(size)[rank])
                with engine.no_sync():
                    loss.backward()  # type: ignore[no-untyped-call]
                outcome.losses.append(loss.item())
            if case.max_norm is not None and not case.clip_in_optimizer:
                outcome.norms.append(infinity.clip_grad_norm_(list(model.parameters()), case.max_norm).item())
            updated_early += engine._updates.has_begun
            optimizer.step()
            if case.clip_in_optimizer and optimizer.last_grad_norm is not None:
                outcome.norms.append(optimizer.last_grad_norm.item())
            optimizer.zero_grad()
        outcome.per_step = engine.traffic.per_step
        forms = [engine.plan.expected_traffic(step, case.accumulate) for step in range(STEPS)]
        outcome.expected = [(form.read_nbytes, form.write_nbytes) for form in forms]
        outcome.metrics = engine.metrics()
        outcome.metrics["updated_early"] = updated_early
        received = "ranks/received_bytes"
        outcome.metrics["received"] = outcome.metrics.get(received, 0) - before.get(received, 0)
        outcome.metrics["numel"] = sum(group.layout.numel for group in engine._runtime.groups)
        outcome.metrics["units"] = sum(not unit.resident for unit in engine._runtime.units)
        states = engine._runtime.states.values()
        outcome.metrics["swapped states"] = sum(any(r.lease is None for r in state.records) for state in states)
        outcome.metrics["chunked"] = len(engine.plan.placement.chunked)
        outcome.metrics["host budget"] = engine.plan.placement.host_budget_nbytes
        groups = engine._runtime.groups
        outcome.metrics["largest"] = max(max(g.shard_nbytes, g.trainable * gradient_nbytes(g)) for g in groups)
        outcome.metrics["pinned"] = engine.plan.placement.state_pinned_nbytes
        outcome.parameters = gathered_parameters(model)
    return outcome


def train_whole(case: Case) -> Outcome:
    """The run in plain PyTorch, on whole batches, in one process."""
    if case.meta:
        torch.manual_seed(0)
        model = make_net(case)
    else:
        model = build(partial(make_net, case), seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)
    outcome = Outcome([], [], {})
    for step in range(STEPS):
        for ids in _micro_batches(case, step):
            loss = loss_of(model, ids)
            loss.backward()  # type: ignore[no-untyped-call]
            outcome.losses.append(loss.item())
        if case.max_norm is not None:
            outcome.norms.append(_exact_norm(trained))
            torch.nn.utils.clip_grad_norm_(trained, case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return outcome


def _exact_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of the gradients, in fp64: torch loses digits of large ones, whose squares it adds in fp32."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


def _micro_batches(case: Case, step: int) -> list[Tensor]:
    numbers = range(step * case.accumulate, (step + 1) * case.accumulate)
    return [batch(number, vocab=case.vocab, shape=(ROWS, 11)) for number in numbers]


def assert_as_whole(whole: Outcome, shares: Sequence[Outcome], tolerance: float = 1e-6) -> None:
    """The ranks together gave what one process gives, and every rank holds the same bits."""
    for number, loss in enumerate(whole.losses):
        mean = sum(share.losses[number] for share in shares) / len(shares)
        assert abs(mean - loss) <= tolerance * abs(loss), f"loss {number}: {mean} instead of {loss}"
    for share in shares:
        assert share.norms == shares[0].norms
        assert len(share.norms) == len(whole.norms)
        for ours, theirs in zip(share.norms, whole.norms, strict=True):
            assert abs(ours - theirs) <= tolerance * theirs
        assert_same_bits(share.parameters, shares[0].parameters)
    for name, value in whole.parameters.items():
        torch.testing.assert_close(shares[0].parameters[name], value, rtol=1e-4, atol=2e-6, msg=name)


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
