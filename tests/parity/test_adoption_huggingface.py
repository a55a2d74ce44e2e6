"""Hugging Face's own changes of a model, made after it was offloaded: longer embeddings, adapters of PEFT.

PEER_DEEPSPEED section 4, number 18 (HF #41959, #25241, #28510): late adapters and resized embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the Hugging Face tests need the extra 'hf'")

import infinity
from tests.conftest import MakeEngine
from tests.parity.hf_models import gpt2, hf_loss, llama, token_batch
from tests.parity.loops import gathered_parameters
from tests.zoo import build

Gathered = Callable[[nn.Module], AbstractContextManager[None]]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = hf_loss(model, token_batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _same(plain: nn.Module, ours: nn.Module) -> bool:
    found = gathered_parameters(ours)
    return all(torch.equal(value, found[name]) for name, value in plain.named_parameters())


@pytest.mark.parametrize("n_tokens", [70, 50], ids=["more", "fewer"])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["tied", "untied"])
def test_resized_token_embeddings(offload: MakeEngine, make: Callable[[], nn.Module], n_tokens: int) -> None:
    """Between `offload` and the optimizer: torch's own could not go on with parameters of another shape."""

    def run(model: Any, make_optimizer: Callable[..., torch.optim.Optimizer], gathered: Gathered) -> list[float]:
        torch.manual_seed(4)
        with gathered(model):
            model.resize_token_embeddings(n_tokens, mean_resizing=False)
        optimizer = make_optimizer(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            loss = hf_loss(model, token_batch(step) % n_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, ours = build(make).train(), build(make).train()
    expected = run(plain, partial(torch.optim.AdamW, fused=True), lambda model: nullcontext())
    engine = offload(ours, host={"budget": "2MiB"})
    assert run(ours, infinity.AdamW, infinity.gathered) == expected
    assert _same(plain, ours)
    assert ours.get_input_embeddings().weight.shape[0] == n_tokens  # type: ignore[operator]
    assert engine.plan.parameters == sum(parameter.numel() for parameter in plain.parameters())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_adapters_attached_late(offload: MakeEngine, schedule: str) -> None:
    """The base was offloaded as trainable; PEFT freezes it, and then it is never written again."""
    peft = pytest.importorskip("peft", reason="the Hugging Face tests need the extra 'hf'")

    def attach(model: nn.Module) -> nn.Module:
        torch.manual_seed(5)
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, settings).train()  # type: ignore[no-any-return]

    plain = attach(build(llama))
    expected = _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), range(3))
    ours = build(llama)
    engine = offload(ours, schedule=schedule)
    wrapped = attach(ours)
    optimizer = infinity.AdamW(wrapped.parameters(), lr=1e-2)
    assert _train(wrapped, optimizer, range(3)) == expected
    assert _same(plain, wrapped)
    trained = sum(group.shard_nbytes for group in engine._runtime.groups if group.trainable)
    assert all(step["nvme_write_bytes/param"] <= trained for step in engine.traffic.per_step)
    assert engine.plan.trainable_parameters < engine.plan.parameters // 4
