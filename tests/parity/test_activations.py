"""Unit-boundary checkpoints: the bits of a forward that saves everything, counted bytes, and nothing left behind."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.observe.shortages import report_of
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import ReadError, SwapFullError
from storage.types import IoRequest, Op, Priority
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity, train_offloaded
from tests.zoo import Attention, Net, batch, build, loss_of

POLICIES = ("recompute", "host", "nvme")
KIB = 1024
BATCH, SEQ, HIDDEN = 16, 64, 32


def wide_batch(number: int) -> torch.Tensor:
    """Large enough that the inputs of units are worth offloading: 128 KiB each."""
    return batch(number).repeat(1 + BATCH * SEQ // batch(number).numel(), 1)


def settings_for(policy: str, inputs: int = 2, **settings: Any) -> dict[str, Any]:
    """Settings with room for so many inputs in host memory."""
    nbytes = input_nbytes() * inputs
    activations = {"policy": policy, "host_budget": nbytes, "nvme_budget": "4MiB"}
    return {"activations": activations, "host": {"budget": 800 * KIB + nbytes}, **settings}


def input_nbytes() -> int:
    """Bytes of the input of a block of `Net`."""
    seen: list[int] = []
    model = build(Net)
    next(iter(blocks_of(model))).register_forward_pre_hook(lambda module, args: seen.append(args[0].nbytes))
    model(wide_batch(0))
    return -(-seen[0] // 4096) * 4096


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "Block"]


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits(offload: MakeEngine, policy: str, schedule: str) -> None:
    loop = Loop(Net, batch=wide_batch)
    inputs = 8 if policy == "host" else 2
    settings = settings_for(policy, inputs, schedule=schedule)
    engine = assert_parity(loop, offload, check_traffic=False, **settings)
    packed = engine._runtime.activations.packed_nbytes
    assert (packed > 0) == (policy != "recompute")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make", [Attention, partial(Net, tied=True), partial(Net, checkpointing="nr")], ids=["attention", "tied", "nested"]
)
def test_same_bits_in_other_models(offload: MakeEngine, policy: str, make: Any) -> None:
    assert_parity(Loop(make, batch=wide_batch), offload, check_traffic=False, **settings_for(policy, inputs=8))


def test_accumulation_and_clipping(offload: MakeEngine) -> None:
    loop = Loop(Net, batch=wide_batch, accumulate=(2,), max_norm=0.1)
    assert_parity(loop, offload, check_traffic=False, **settings_for("nvme", schedule="synchronous"))


@pytest.mark.parametrize("inputs", [1, 2, 3, 8])
def test_bytes_equal_the_closed_form(offload: MakeEngine, inputs: int) -> None:
    """Of E inputs, E - N are read where host memory has room for N; one more is written, ahead of what may come."""
    loop = Loop(Net, batch=wide_batch, steps=3)
    settings = settings_for("nvme", inputs=inputs, schedule="synchronous")
    _, engine = train_offloaded(loop, lambda model: offload(model, **settings))
    count = engine._runtime.activations.packed_nbytes // loop.steps // input_nbytes()
    assert count >= 2
    for moved in engine.traffic.per_step:
        read = moved.get("nvme_read_bytes/activation", 0) // input_nbytes()
        written = moved.get("nvme_write_bytes/activation", 0) // input_nbytes()
        assert read == max(count - inputs, 0)
        assert written == (count - max(inputs, 2) + 1 if count >= inputs else 0)


@pytest.mark.parametrize("policy", ["host", "nvme"])
def test_memory_is_given_back(offload: MakeEngine, policy: str) -> None:
    model = build(Net)
    engine = offload(model, **settings_for(policy, inputs=8))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    activations, budget = engine._runtime.activations, engine._runtime.budgets["activations"]
    loss = loss_of(model, wide_batch(0))
    assert activations.held_nbytes > 0
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    gc.collect()
    assert activations.held_nbytes == 0
    dropped = loss_of(model, wide_batch(1))
    assert activations.held_nbytes > 0
    del dropped
    gc.collect()
    assert activations.held_nbytes == 0
    with torch.no_grad():
        loss_of(model, wide_batch(2))
    assert activations.held_nbytes == 0
    assert budget.used_nbytes == 0
    optimizer.zero_grad()


def test_a_graph_can_be_used_twice(offload: MakeEngine) -> None:
    grads = []
    for policy in ("none", "nvme"):
        model = build(Net)
        engine = offload(model, **settings_for(policy, schedule="synchronous"))
        infinity.AdamW(model.parameters(), lr=1e-2)
        loss = loss_of(model, wide_batch(0))
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        engine.close()
    assert all(map(torch.equal, *grads))


def test_too_small_a_budget_is_refused_with_the_arithmetic_and_the_engine_goes_on(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, **settings_for("host", inputs=1))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(infinity.PlacementError, match=r"activations\.host_budget = .*Raise it to at least") as refusal:
        loss_of(model, wide_batch(0))
    assert "activations: " in str(report_of(refusal.value))
    optimizer.zero_grad()
    loss_of(model, wide_batch(0)[:1]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert engine.metrics()["step"] == 1


def test_an_input_that_could_not_be_saved_keeps_no_memory(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full costs the iteration, and not a part of the budget for good."""
    model = build(Net)
    engine = offload(model, **settings_for("nvme", inputs=2))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

    def refuse(key: str, nbytes: int) -> None:
        raise SwapFullError(f"no space for {key}")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runtime.store, "create", refuse)
        with pytest.raises(SwapFullError):
            loss_of(model, wide_batch(0))
    gc.collect()
    assert engine._runtime.activations.held_nbytes == 0
    optimizer.zero_grad()
    loss_of(model, wide_batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _is_input(request: IoRequest) -> bool:
    return request.key.startswith("activation")


def _is_read_ahead(request: IoRequest) -> bool:
    return _is_input(request) and request.priority is Priority.READ_AHEAD


def _bits(model: nn.Module) -> list[torch.Tensor]:
    with infinity.gathered(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("fault", ["read ahead", "read", "write"])
def test_a_transfer_of_an_input_that_failed_is_tried_again(offload: MakeEngine, fault: str) -> None:
    """What was read ahead, or written behind, at once; what backward waits for, when it is asked for the next time."""
    drives: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        drives.append(FaultyBackend(backend))
        return drives[-1]

    trained = []
    for fails in (False, True):
        model = build(Net)
        offload(model, wrap_backend=wrap, **settings_for("nvme", inputs=2, schedule="synchronous"))
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        hit = []
        if fails and fault == "write":
            hit.append(drives[-1].inject(Fault.NO_SPACE, op=Op.WRITE, when=_is_input))
        loss = loss_of(model, wide_batch(0))
        if fails and fault == "read ahead":
            hit.append(drives[-1].inject(Fault.IO_ERROR, op=Op.READ, when=_is_read_ahead))
        if fails and fault == "read":
            hit.append(drives[-1].inject(Fault.IO_ERROR, op=Op.READ, when=_is_input, times=None))
            with pytest.raises(ReadError, match="activation"):
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            drives[-1].clear()
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert all(injection.hits for injection in hit)
        trained.append(_bits(model))
    assert all(map(torch.equal, *trained))


def test_inputs_that_cannot_be_written_cost_their_forward(offload: MakeEngine) -> None:
    drives: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        drives.append(FaultyBackend(backend))
        return drives[-1]

    model = build(Net)
    engine = offload(model, wrap_backend=wrap, **settings_for("nvme", inputs=1, schedule="synchronous"))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    drives[-1].inject(Fault.NO_SPACE, op=Op.WRITE, when=_is_input, times=None)
    with pytest.raises(SwapFullError, match="activation"):
        loss_of(model, wide_batch(0))
    drives[-1].clear()
    gc.collect()
    assert engine._runtime.activations.held_nbytes == 0
    loss_of(model, wide_batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class _Fails(nn.Module):
    def __init__(self, inner: nn.Module, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.error, self.fails = inner, error, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        if self.fails:
            raise self.error("in the forward")
        return found


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_that_fails_leaves_nothing_open(offload: MakeEngine, policy: str, error: type[BaseException]) -> None:
    """Hooks for saved tensors that stayed open would change every later graph of this thread."""

    def make() -> nn.Module:
        net = Net()
        block = blocks_of(net)[-1]
        inner = next(iter(block.children()))
        name = next(iter(dict(block.named_children())))
        setattr(block, name, _Fails(inner, error))
        return net

    model = build(make)
    engine = offload(model, **settings_for(policy, inputs=8))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(error, match="in the forward"):
        loss_of(model, wide_batch(0))
    for module in model.modules():
        if isinstance(module, _Fails):
            module.fails = False
    loss = loss_of(model, wide_batch(0))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    del loss
    gc.collect()
    assert engine._runtime.activations.held_nbytes == 0
    weight = torch.ones(2, requires_grad=True)
    product = weight * weight
    assert product.grad_fn is not None
    assert product.grad_fn._saved_self is weight


def test_settings() -> None:
    assert infinity.Config(activations="nvme") == infinity.Config(activations={"policy": "nvme"})
    with pytest.raises(infinity.ConfigError, match=r"activations\.policy.*did you mean 'nvme'"):
        infinity.Config(activations="nvm")
    with pytest.raises(infinity.ConfigError, match="contradicts micro_batches = 2"):
        infinity.Config(activations="host", micro_batches=2)


def test_the_budget_is_a_part_of_the_host_budget(offload: MakeEngine) -> None:
    engine = offload(build(Net), **settings_for("nvme"))
    terms = {term.name: term.nbytes for term in engine.plan.placement.host}
    assert terms["activations"] == 2 * input_nbytes()
    assert sum(terms.values()) <= 800 * KIB + 2 * input_nbytes()
    with pytest.raises(infinity.PlacementError, match="inputs of units"):
        offload(build(Net), activations="host", host={"budget": "700KiB"})


class _ByName(nn.Module):
    """Blocks that are called by keyword, with an input that all share and one that changes between them."""

    def __init__(self, *, changes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, HIDDEN)
        self.blocks = nn.ModuleList([_Scaled() for _ in range(3)])
        self.changes = changes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, scale = self.embed(ids), torch.full((HIDDEN,), 0.5)
        for block in self.blocks:
            x = block(x=x, scale=scale)
            if self.changes:
                scale.add_(1)
        return x


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.down(torch.tanh(self.up(x))) * scale
        return x + nn.functional.dropout(grown, 0.3, training=self.training)


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_by_keyword_and_random_numbers(offload: MakeEngine, policy: str) -> None:
    engine = assert_parity(
        Loop(_ByName, batch=wide_batch), offload, check_traffic=False, **settings_for(policy, inputs=8)
    )
    assert (engine._runtime.activations.packed_nbytes > 0) == (policy != "recompute")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_that_was_changed_in_place_is_refused(offload: MakeEngine, policy: str) -> None:
    model = build(partial(_ByName, changes=True))
    offload(model, **settings_for(policy, inputs=8, schedule="synchronous"))
    infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="changed in place after the forward"):
        loss_of(model, wide_batch(0)).backward()  # type: ignore[no-untyped-call]
