"""Every optimizer gives the bits of torch's, keeps no more state than it needs, and moves the bytes that the plan says.

State layouts other than AdamW's broke peers (PEER_DEEPSPEED section 4, number 9).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.optim.splitmaster import join_master, split_master
from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_traffic, gathered_parameters
from tests.zoo import Frozen, Net, OddNet, batch, build, loss_of


class ReferenceLion(torch.optim.Optimizer):
    """Lion as its authors published it: algorithm 2 of "Symbolic Discovery of Optimization Algorithms"."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = m.clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@dataclass(frozen=True)
class Case:
    """One optimizer with settings: ours, torch's, and bytes of fp32 state per parameter."""

    ours: Callable[..., torch.optim.Optimizer]
    plain: Callable[..., torch.optim.Optimizer]
    state_nbytes: int
    settings: dict[str, Any] = field(default_factory=dict)
    planned: str = "adamw"  # Config.optimizer when the plan is made for it


SGD = partial(torch.optim.SGD, foreach=False, fused=False)
CASES = {
    "sgd": Case(infinity.SGD, SGD, 0, {"lr": 0.1, "weight_decay": 0.1}, "sgd"),
    "sgd up": Case(infinity.SGD, SGD, 0, {"lr": 0.01, "maximize": True}, "sgd"),
    "momentum": Case(infinity.SGD, SGD, 4, {"lr": 0.1, "momentum": 0.9}, "sgd_momentum"),
    "dampened": Case(infinity.SGD, SGD, 4, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, "sgd_momentum"),
    "nesterov": Case(
        infinity.SGD, SGD, 4, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "sgd_momentum"
    ),
    "adam": Case(infinity.Adam, partial(torch.optim.Adam, fused=True), 8, {"lr": 1e-2, "weight_decay": 0.1}, "adam"),
    "lion": Case(infinity.Lion, ReferenceLion, 4, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}, "lion"),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
HELD, SPILLED = {"budget": "1MiB"}, {"budget": "440KiB"}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _assert_same(
    case: Case, offload: MakeEngine, make: Callable[[], nn.Module] = Net, **settings: Any
) -> infinity.Engine:
    plain, ours = build(make), build(make)
    expected = _train(plain, case.plain(plain.parameters(), **case.settings))
    engine = offload(ours, **settings)
    assert _train(ours, case.ours(ours.parameters(), **case.settings)) == expected
    found = gathered_parameters(ours)
    assert not [name for name, want in plain.named_parameters() if not torch.equal(want, found[name])]
    return engine


@ALL
@pytest.mark.parametrize("host", [HELD, SPILLED], ids=["held", "spilled"])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("is_planned", [True, False], ids=["planned", "taken"])
def test_bits_and_traffic(
    offload: MakeEngine, case: Case, host: dict[str, Any], schedule: str, is_planned: bool
) -> None:
    """Whether the plan was made for this optimizer or for AdamW, which keeps more."""
    planned = {"optimizer": case.planned} if is_planned else {}
    engine = _assert_same(case, offload, schedule=schedule, host=host, chunk="32KiB", **planned)
    assert_traffic(engine, Loop(Net))
    parameters = engine.plan.trainable_parameters
    per_step = engine.traffic.per_step
    records = [record for state in engine._runtime.states.values() for record in state.records]
    payload = sum(r.chunk.payload_numel for r in records if r.lease is None) * case.state_nbytes
    assert [counted["nvme_read_bytes/state"] for counted in per_step] == [0, payload, payload, payload]
    assert [counted["nvme_write_bytes/state"] for counted in per_step] == [payload] * 4
    assert engine.plan.state_bytes == parameters * (4 + case.state_nbytes)


@ALL
@pytest.mark.parametrize("make", [Frozen, OddNet])
def test_awkward_models(offload: MakeEngine, case: Case, make: type[nn.Module]) -> None:
    _assert_same(case, offload, make, optimizer=case.planned)


def test_less_state_leaves_more_room(offload: MakeEngine) -> None:
    """Host memory that AdamW's moments would take keeps the state of more parameters, planned or not."""

    def held_numel(engine: infinity.Engine) -> int:
        states = engine._runtime.states.values()
        return sum(record.chunk.numel for state in states for record in state.records if record.lease is not None)

    host = {"budget": "900KiB"}
    adamw = offload(build(Net), schedule="overlapped", host=host)
    taken = build(Net)
    engine = offload(taken, schedule="overlapped", host=host)
    infinity.Lion(taken.parameters())
    planned = offload(build(Net), schedule="overlapped", host=host, optimizer="lion")
    counts = [held_numel(one) for one in (adamw, engine, planned)]
    assert counts[0] < counts[1] <= counts[2]
    smallest = [one.plan.placement.host_minimum_nbytes for one in (adamw, planned)]
    assert smallest[1] < smallest[0]


def test_more_state_than_planned_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, optimizer="sgd")
    with pytest.raises(infinity.ConfigError, match=r"keeps 8 bytes.*planned for 0.*offload with optimizer='adamw'"):
        infinity.AdamW(model.parameters())
    _train(model, infinity.SGD(model.parameters(), lr=0.1), 1)


# Two halves, and a master apart ------------------------------------------------------------------------------------


class Halves:
    """A plain model whose parameters are the rounded values of an fp32 master, which any torch optimizer updates."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = build(Net)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(dtype))
        self.masters = {n: nn.Parameter(p.detach().clone()) for n, p in self.model.named_parameters()}
        self.optimizer = case.plain(self.masters.values(), **case.settings)

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name].grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                master = self.masters[name]
                rounded = split_master(master)[0] if self.dtype is torch.bfloat16 else master.to(self.dtype)
                parameter.copy_(rounded)


@ALL
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("host", [HELD, {"budget": "500KiB"}], ids=["held", "spilled"])
def test_narrow_precisions_keep_the_master_of_the_reference(
    offload: MakeEngine, case: Case, precision: str, dtype: torch.dtype, host: dict[str, Any], tmp_path: Path
) -> None:
    """The fake device computes in fp32 everywhere. What is saved is the master, which must be the reference's."""
    reference = Halves(case, dtype)
    model = build(Net)
    device = {"kind": "fake", "budget": "8MiB"}
    engine = offload(model, precision=precision, device=device, host=host, chunk="48KiB", optimizer=case.planned)
    optimizer = case.ours(model.parameters(), **case.settings)
    for step in range(4):
        expected = loss_of(reference.model, batch(step))
        expected.backward()  # type: ignore[no-untyped-call]
        loss = loss_of(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == expected.item()
        reference.step()
        optimizer.step()
    engine.save(tmp_path / "checkpoint")
    saved = _saved_masters(tmp_path / "checkpoint")
    assert not [name for name, master in reference.masters.items() if not torch.equal(master, saved[name])]


def _saved_masters(folder: Path) -> dict[str, Tensor]:
    found = {}
    with CheckpointReader(folder) as checkpoint:
        for name, entry in checkpoint.index.parameters.items():
            found[name] = torch.empty(entry.shape, dtype=torch.float32)
            checkpoint.read(name, "parameter", 0, found[name].view(-1))
    return found


def test_an_edit_in_fp16_becomes_the_master(offload: MakeEngine, tmp_path: Path) -> None:
    for budget in ("500KiB", "4MiB"):
        model = build(Net)
        engine = offload(model, precision="fp16", host={"budget": budget})
        optimizer = infinity.AdamW(model.parameters(), lr=1e-4)
        _train(model, optimizer, 2)
        weight = model.get_parameter("blocks.1.up.weight")
        with infinity.gathered(weight), torch.no_grad():
            model.get_parameter("blocks.1.up.weight")[3].fill_(0.75)
        engine.save(tmp_path / budget)
        master = _saved_masters(tmp_path / budget)["blocks.1.up.weight"]
        assert torch.equal(master[3], torch.full_like(master[3], 0.75))
        assert not torch.equal(master[2], master[2].half().float())  # what was not edited keeps its full precision


# State in torch's format, checkpoints, groups ----------------------------------------------------------------------


@ALL
def test_state_dicts_go_both_ways(offload: MakeEngine, case: Case) -> None:
    """Half of the training here and half in torch, either way round."""
    plain, ours = build(Net), build(Net)
    theirs = case.plain(plain.parameters(), **case.settings)
    offload(ours, schedule="synchronous")
    mine = case.ours(ours.parameters(), **case.settings)
    _train(plain, theirs, 2)
    _train(ours, mine, 2)
    saved = mine.state_dict()
    if case.state_nbytes:
        for number, state in theirs.state_dict()["state"].items():
            assert state.keys() == saved["state"][number].keys()
            assert all(torch.equal(value, saved["state"][number][name]) for name, value in state.items())
    again = build(Net)
    again.load_state_dict(gathered_parameters(ours))
    resumed = case.plain(again.parameters(), **case.settings)
    resumed.load_state_dict(copy.deepcopy(saved))  # torch trains on with the very tensors
    expected = _train(plain, theirs, 2, first=2)
    assert _train(again, resumed, 2, first=2) == expected
    mine.load_state_dict(saved)
    assert _train(ours, mine, 2, first=2) == expected


@ALL
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_checkpoint_continues_with_the_same_bits(
    offload: MakeEngine, case: Case, precision: str, tmp_path: Path
) -> None:
    """PEER_DEEPSPEED section 4, number 2."""
    model = build(Net)
    engine = offload(model, precision=precision, host={"budget": "500KiB"}, chunk="48KiB")
    optimizer = case.ours(model.parameters(), **case.settings)
    _train(model, optimizer, 2)
    engine.save(tmp_path / "checkpoint", optimizer=optimizer)
    expected = _train(model, optimizer, 2, first=2)
    other = build(Net, seed=1)
    resumed = offload(other, precision=precision, host={"budget": "2MiB"}, optimizer=case.planned)
    optimizer = case.ours(other.parameters(), **case.settings)
    resumed.load(tmp_path / "checkpoint", optimizer=optimizer)
    assert _train(other, optimizer, 2, first=2) == expected


def test_a_checkpoint_of_another_optimizer_is_refused(offload: MakeEngine, tmp_path: Path) -> None:
    model = build(Net)
    engine = offload(model)
    optimizer = infinity.Lion(model.parameters(), lr=1e-3)
    _train(model, optimizer, 1)
    engine.save(tmp_path / "checkpoint")
    other = build(Net)
    engine = offload(other)
    adamw = infinity.AdamW(other.parameters())
    with pytest.raises(infinity.CheckpointError, match=r"has 'exp_avg' of .* here keeps 'exp_avg', 'exp_avg_sq'"):
        engine.load(tmp_path / "checkpoint")
    _train(other, adamw, 1)


@pytest.mark.parametrize(
    ("make", "bad", "match"),
    [
        (infinity.SGD, {"lr": -1.0}, "lr is -1.0"),
        (infinity.SGD, {"momentum": -0.1}, "momentum is -0.1"),
        (infinity.SGD, {"nesterov": True}, "nesterov needs a momentum"),
        (infinity.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs a momentum"),
        (infinity.Adam, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        (infinity.Lion, {"betas": (-0.9, 0.9)}, r"betas\[0\] is -0.9"),
        (infinity.Lion, {"weight_decay": -1}, "weight_decay is -1"),
    ],
)
def test_settings_out_of_range(offload: MakeEngine, make: Any, bad: dict[str, Any], match: str) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.ConfigError, match=match):
        make(model.parameters(), **bad)
    infinity.AdamW(model.parameters())  # the refused one is not attached


def test_a_momentum_that_comes_later_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    optimizer = infinity.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(infinity.ConfigError, match="built without"):
        _train(model, optimizer, 1)


def test_the_master_is_split_without_loss() -> None:
    master = torch.randn(1000)
    assert torch.equal(join_master(*split_master(master)), master)
