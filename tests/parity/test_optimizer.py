"""What the optimizer does (groups, schedulers, accumulation, clipping) gives the bits of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity, assert_same, assert_traffic, train_offloaded, train_plain
from tests.zoo import Frozen, Net, OddNet, Skipping, batch, build, loss_of

SCHEDULES = ("overlapped", "synchronous")
HELD = {"budget": "1MiB"}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, vectors and one parameter of its own, each with other settings; one unit has parameters of all three."""
    named = [(n, p) for n, p in model.named_parameters() if not n.endswith("0.up.bias")]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "lr": 3e-2, "weight_decay": 0.3},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if n.endswith("0.up.bias")], "betas": (0.5, 0.9)},
    ]


def _cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameter_groups(offload: MakeEngine, schedule: str) -> None:
    assert_parity(Loop(Net, groups=_groups, schedule=_cosine), offload, schedule=schedule)


@pytest.mark.parametrize("hyper", [{"maximize": True, "weight_decay": 0.0}, {"eps": 0.1, "betas": (0.0, 0.5)}], ids=str)
def test_hyperparameters(offload: MakeEngine, hyper: dict[str, Any]) -> None:
    assert_parity(Loop(Net, hyper={"lr": 1e-3, **hyper}), offload, schedule="overlapped")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_part_of_the_parameters(offload: MakeEngine, schedule: str) -> None:
    """What the optimizer does not hold stays as it is, although it gets gradients."""

    def some(model: nn.Module) -> list[Tensor]:
        return [p for n, p in model.named_parameters() if "up" in n or "head" in n]

    assert_parity(Loop(Net, groups=some), offload, schedule=schedule, check_traffic=False)


@pytest.fixture(params=["held", "spilled"])
def host(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A host budget with which gradients wait in memory, and one with which they go through the swap file."""
    return {"budget": "1MiB" if request.param == "held" else "440KiB"}


def _is_spilled(engine: infinity.Engine) -> bool:
    return bool(engine.plan.placement.spilled_gradients)


@pytest.mark.parametrize("accumulate", [(2,), (4,), (1, 3, 2)], ids=str)
def test_accumulation(offload: MakeEngine, host: dict[str, Any], accumulate: tuple[int, ...]) -> None:
    loop = Loop(Net, accumulate=accumulate)
    engine = assert_parity(loop, offload, schedule="synchronous", host=host)
    assert _is_spilled(engine) == (host["budget"] != "1MiB")


@pytest.mark.parametrize("in_optimizer", [True, False], ids=["max_grad_norm", "clip_grad_norm_"])
@pytest.mark.parametrize("clipped", ["never", "sometimes", "always"])
def test_clipping(offload: MakeEngine, host: dict[str, Any], clipped: str, in_optimizer: bool) -> None:
    free = train_plain(Loop(Net, max_norm=1e9, accumulate=(1, 2)))
    norms = sorted(float(norm) for norm in free.norms)
    max_norm = {"never": 1e9, "sometimes": norms[1] * 1.001, "always": norms[0] / 10}[clipped]
    loop = Loop(Net, max_norm=max_norm, accumulate=(1, 2))
    engine = assert_parity(
        loop, offload, clip_in_optimizer=in_optimizer, check_traffic=False, schedule="synchronous", host=host
    )
    assert _is_spilled(engine) == (host["budget"] != "1MiB")
    # The first clip_grad_norm_ comes unexpected and reads what was spilled once more; later norms are already there.
    assert_traffic(engine, loop, from_step=0 if in_optimizer else 1)


@pytest.mark.parametrize("make", [OddNet, Frozen, Skipping])
def test_clipping_of_awkward_models(offload: MakeEngine, make: type[nn.Module]) -> None:
    loop = Loop(make, max_norm=0.1, accumulate=(2,))
    assert_parity(loop, offload, schedule="synchronous", check_traffic=make is not Skipping)


def test_max_grad_norm_adds_up_in_the_order_of_the_model(offload: MakeEngine) -> None:
    """As `clip_grad_norm_(model.parameters())` does, however the optimizer's groups order them."""

    def interleaved(model: nn.Module) -> list[dict[str, Any]]:
        groups = _groups(model)
        return [{**group, "params": group["params"][::-1]} for group in groups[::-1]]

    for groups in (_groups, interleaved):
        loop = Loop(Net, groups=groups, max_norm=0.1, accumulate=(1, 2))
        assert_parity(loop, offload, clip_in_optimizer=True, schedule="synchronous", host=HELD)


def test_accumulation_with_recomputation(offload: MakeEngine, host: dict[str, Any]) -> None:
    def make() -> Net:
        return Net(checkpointing="re")

    loop = Loop(make, accumulate=(3,), max_norm=0.1)
    assert_parity(loop, offload, clip_in_optimizer=True, schedule="synchronous", host=host)


def test_clipping_a_part_leaves_the_rest(offload: MakeEngine, host: dict[str, Any]) -> None:
    """Only the gradients of the parameters that are given are scaled, each by its own coefficient."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any) -> list[Tensor]:
        norms = []
        for step in range(3):
            loop.loss(model, loop.batch(step)).backward()  # type: ignore[no-untyped-call]
            parts = [[p for n, p in model.named_parameters() if word in n] for word in ("up", "down")]
            norms += [clip(part, 0.01 * number) for number, part in enumerate(parts, 1)]
            optimizer.step()
            optimizer.zero_grad()
        return norms

    loop = Loop(Net)
    plain = build(Net)
    plain_norms = run(plain, torch.optim.AdamW(plain.parameters(), fused=True), torch.nn.utils.clip_grad_norm_)
    ours = build(Net)
    offload(ours, schedule="synchronous", host=host)
    our_norms = run(ours, infinity.AdamW(ours.parameters()), infinity.clip_grad_norm_)
    assert all(map(torch.equal, plain_norms, our_norms))
    for name, parameter in list(ours.named_parameters()):
        with infinity.gathered(parameter):
            assert torch.equal(ours.get_parameter(name), plain.get_parameter(name)), name


def test_clipping_twice_is_refused(offload: MakeEngine) -> None:
    """Torch would scale again what was scaled already; the engine scales once, in the step."""
    model = build(Net)
    offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters(), max_grad_norm=0.01)
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    unclipped = infinity.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    assert optimizer.last_grad_norm is not None
    assert torch.equal(optimizer.last_grad_norm, unclipped)
    loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
    infinity.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(infinity.ConfigError, match="clipped twice"):
        infinity.clip_grad_norm_([model.get_parameter("head.weight")], 0.1)


def test_overlapped_moves_no_gradients(offload: MakeEngine) -> None:
    engine = assert_parity(Loop(Net), offload, schedule="overlapped")
    assert all(not counted.get("nvme_write_bytes/grad") for counted in engine.traffic.per_step)
    assert not engine.plan.placement.spilled_gradients


def test_two_engines_at_once(offload: MakeEngine) -> None:
    """Engines share nothing."""
    loop = Loop(Net)
    plain = train_plain(loop)
    first, _ = train_offloaded(loop, lambda model: offload(model, schedule="synchronous"))
    second, _ = train_offloaded(loop, lambda model: offload(model, schedule="overlapped"))
    assert_same(plain, first)
    assert_same(plain, second)


def test_gradients_that_share_memory_are_accumulated_by_themselves(offload: MakeEngine) -> None:
    """Where plain PyTorch adds them up wrongly; see `test_torch_facts.test_gradients_of_a_stack_share_their_memory`."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(400)) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.stack(list(self.parts)).sum(0) * x).sum()

    model = build(Stacked)
    offload(model, schedule="synchronous", host={"budget": "2MiB"})
    for _ in range(2):
        model(torch.arange(400.0)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, 2 * torch.arange(400.0))
