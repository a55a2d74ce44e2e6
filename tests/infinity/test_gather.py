"""Gathering by itself: uploads that fail and uploads ahead of their access."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity
from infinity.order import Phase
from storage.errors import PoolExhaustedError
from tests.conftest import MakeEngine
from tests.infinity.test_flat_memory import needs_shared_memory
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import gathered_parameters
from tests.storage.test_huge_pages import flags_of, needs_huge_pages
from tests.zoo import Net, batch, build, loss_of

KINDS = ["fake", pytest.param("cpu", marks=needs_shared_memory)]  # copies; computes in the memory of the shard


@pytest.mark.parametrize("kind", KINDS)
def test_failed_upload_is_forgotten(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The next forward uploads again; it never computes with the memory that the failed upload left unfilled."""
    plain, ours = build(Net), build(Net)
    engine = offload(ours, device={"kind": kind, "budget": "8MiB"})
    runtime = engine._runtime
    used_nbytes = runtime.device.budget.used_nbytes
    with monkeypatch.context() as patched:

        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("the link is down")

        patched.setattr(runtime.device, "upload" if kind == "fake" else "note_shared", fail)
        with pytest.raises(RuntimeError, match="the link is down"):
            ours(batch(0))
    nothing_gathered(engine)
    assert runtime.device.budget.used_nbytes == used_nbytes
    assert torch.equal(loss_of(ours, batch(0)), loss_of(plain, batch(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_failed_allocation_is_forgotten(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Torch may be out of memory although the budget is not."""
    ours = build(Net)
    engine = offload(ours, device={"kind": kind, "budget": "8MiB"})
    runtime = engine._runtime
    used_nbytes = runtime.device.budget.used_nbytes
    group = runtime.groups[0] if runtime.groups[0] not in runtime.resident_groups else runtime.groups[1]
    with monkeypatch.context() as patched:

        def fail(*args: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        patched.setattr(group, "allocate_flat" if kind == "fake" else "borrow_flat", fail)
        with pytest.raises(torch.OutOfMemoryError):
            runtime.gatherer.gather(group, "somebody", Phase.FORWARD)
    assert runtime.device.budget.used_nbytes == used_nbytes
    assert runtime.pool.lent_nbytes == 0
    nothing_gathered(engine)


def _upload_everything_ahead(engine: infinity.Engine) -> None:
    async def nothing() -> None:
        """Only to know that the loop has heard of everything before."""

    runtime = engine._runtime
    assert runtime.io.submit(nothing(), "nothing").wait(100)
    for group in runtime.groups:
        assert group in runtime.resident_groups or runtime.gatherer.upload_ahead(group, Phase.BACKWARD)


def test_uploaded_ahead_before_an_update(offload: MakeEngine) -> None:
    """A backward that was expected and never came leaves an upload behind; the next forward wants the new values."""
    plain, ours = build(Net), build(Net)
    engine = offload(ours, schedule="synchronous", host={"budget": "64MiB"})
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), infinity.AdamW(ours.parameters(), weight_decay=1e-2)
    for step in range(3):
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            loss = loss_of(model, batch(step))
            loss.backward()
            if model is ours:
                _upload_everything_ahead(engine)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for name, parameter in gathered_parameters(ours).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name


def test_no_memory_for_a_read_leaves_no_reservation(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offload(build(Net), host={"budget": "300KiB"})
    runtime = engine._runtime
    copy = next(copy for copy in runtime.copies if copy.block is None)
    used_nbytes = runtime.budgets["window"].used_nbytes

    def fail(*args: object) -> None:
        raise PoolExhaustedError("somebody else has it")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.pool, "lease", fail)
        with pytest.raises(PoolExhaustedError):
            runtime.gatherer.gather(copy.group, "somebody", Phase.FORWARD)
    assert runtime.budgets["window"].used_nbytes == used_nbytes


@needs_huge_pages
def test_a_large_gather_asks_for_huge_pages(offload: MakeEngine) -> None:
    """Its memory is new every time, and would come in pages of 4 KiB, a fault each."""
    found = []

    def look(module: nn.Module, args: object) -> None:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        found.append("hg" in flags_of(weight.data_ptr() + (weight.nbytes & ~4095)))

    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
    offload(model, host={"budget": "64MiB"}, device={"kind": "cpu", "budget": "64MiB"})
    for layer in model:
        layer.register_forward_pre_hook(look)
    for _ in range(2):
        model(torch.ones(1, 1024)).sum().backward()
    assert found == [True] * 4
