"""`engine.adopt()`: a model that changes after it was offloaded gives the numbers of plain PyTorch that does the same.

PEER_DEEPSPEED section 4, number 18: resized embeddings, adapters attached late, parameters that go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from storage.backends.base import Backend
from storage.backends.faulty import FaultyBackend
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters
from tests.zoo import Block, Frozen, Net, batch, build, loss_of

SCHEDULES = ("overlapped", "synchronous", "deferred")
HOSTS = {"streamed": {"budget": "600KiB"}, "in memory": {"budget": "64MiB"}}
Optimizer = torch.optim.Optimizer


def _train(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    loss = loss_of(model, batch(step))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _read(model: nn.Module, module: nn.Module) -> Any:
    """A block in which parameters of a module can be read, offloaded or not."""
    is_offloaded = any(hasattr(parameter, "ref") for parameter in module.parameters())
    return infinity.gathered(module) if is_offloaded else torch.no_grad()


# Changes: each is made on both models, and gives what the optimizer has to learn of ------------------------------


def replace_head(model: Any) -> Iterable[Tensor]:
    torch.manual_seed(5)
    model.head = nn.Linear(37, 29)
    return list(model.head.parameters())


def resize_embedding(model: Any) -> Iterable[Tensor]:
    """As `resize_token_embeddings` does it: a longer parameter in the place of the old one, with its values."""
    torch.manual_seed(6)
    with _read(model, model.embed), torch.no_grad():
        longer = torch.cat([model.embed.weight.detach().clone(), torch.randn(5, 37)])
    model.embed.weight = nn.Parameter(longer)
    model.embed.num_embeddings = len(longer)
    return [model.embed.weight]


def add_blocks(model: Any) -> Iterable[Tensor]:
    torch.manual_seed(7)
    model.blocks.insert(2, Block())
    model.blocks.append(Block())
    return [*model.blocks[2].parameters(), *model.blocks[5].parameters()]


def add_parameter_in_a_unit(model: Any) -> Iterable[Tensor]:
    model.blocks[1].up.bias = nn.Parameter(torch.full((53,), 0.01))
    return [model.blocks[1].up.bias]


def remove_block(model: Any) -> Iterable[Tensor]:
    del model.blocks[1]
    return []


def remove_bias(model: Any) -> Iterable[Tensor]:
    model.blocks[3].down.bias = None
    return []


def tie(model: Any) -> Iterable[Tensor]:
    model.head.weight = model.embed.weight
    return []


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


def add_adapters(model: Any) -> Iterable[Tensor]:
    """Everything frozen, a trained low-rank adapter around every first projection."""
    torch.manual_seed(8)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = _Lora(block.up)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


CHANGES: dict[str, Callable[[Any], Iterable[Tensor]]] = {
    "head replaced": replace_head,
    "embedding resized": resize_embedding,
    "blocks added": add_blocks,
    "parameter added": add_parameter_in_a_unit,
    "block removed": remove_block,
    "bias removed": remove_bias,
    "tied": tie,
    "adapters": add_adapters,
}


def _run(model: nn.Module, optimizer: Optimizer, changes: list[str], engine: infinity.Engine | None) -> list[float]:
    losses = [_train(model, optimizer, step) for step in range(2)]
    for number, change in enumerate(changes):
        if added := list(CHANGES[change](model)):
            optimizer.add_param_group({"params": added, "lr": 5e-3})
        elif engine is not None:
            assert engine.adopt()
        losses += [_train(model, optimizer, 2 * number + step) for step in range(2, 4)]
    return losses


def _check(
    offload: MakeEngine, changes: list[str], make: Callable[[], nn.Module] = Net, **settings: Any
) -> infinity.Engine:
    plain, ours = build(make), build(make)
    expected = _run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), changes, None)
    engine = offload(ours, **settings)
    assert _run(ours, infinity.AdamW(ours.parameters(), lr=1e-2), changes, engine) == expected
    found = gathered_parameters(ours)
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert not [name for name, value in plain.named_parameters() if not torch.equal(value, found[name])]
    assert not engine.adopt()
    return engine


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_numbers_are_those_of_plain_pytorch(offload: MakeEngine, schedule: str, host: str, change: str) -> None:
    _check(offload, [change], schedule=schedule, host=HOSTS[host])


def test_one_change_after_another(offload: MakeEngine) -> None:
    changes = ["blocks added", "head replaced", "block removed", "embedding resized", "adapters"]
    engine = _check(offload, changes, schedule="synchronous", host={"budget": "600KiB"})
    assert len(engine.traffic.per_step) == 12
    assert all(step["h2d_bytes"] and step["d2h_bytes"] for step in engine.traffic.per_step)
    assert all(step["nvme_write_bytes"] for step in engine.traffic.per_step[:10])


@pytest.mark.parametrize("change", ["head replaced", "block removed"])
def test_resident_parameters(offload: MakeEngine, change: str) -> None:
    _check(offload, [change], schedule="synchronous", resident_threshold="64MiB", host={"budget": "1200KiB"})


def test_a_model_with_a_frozen_part_is_unfrozen(offload: MakeEngine) -> None:
    """Gradual unfreezing: what had no state gets it, the rest keeps its own."""

    def run(model: Any, optimizer: Optimizer, engine: infinity.Engine | None) -> list[float]:
        losses = [_train(model, optimizer, step) for step in range(2)]
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
            else:
                with pytest.raises(RuntimeError, match="floating point"):
                    parameter.requires_grad_(True)
        if engine is not None:
            with pytest.raises(infinity.UnsupportedModelError, match=r"was frozen when.*engine\.adopt"):
                loss_of(model, batch(2))
            assert engine.adopt()
        return [*losses, *(_train(model, optimizer, step) for step in range(2, 5))]

    plain, ours = build(Frozen), build(Frozen)
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), None)
    engine = offload(ours)
    assert run(ours, infinity.AdamW(ours.parameters(), lr=1e-2), engine) == expected
    assert engine.plan.trainable_parameters == engine.plan.parameters - 37


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "state_format": "int8"},
        {"precision": "fp16", "state_format": "int8"},
    ],
    ids=str,
)
def test_narrow_formats_keep_their_bits(offload: MakeEngine, settings: dict[str, str]) -> None:
    """A block is put in and taken out again: the rest goes on as if nothing had happened, bit for bit."""

    def run(is_changed: bool) -> tuple[list[float], dict[str, Tensor]]:
        model: Any = build(Net)
        engine = offload(model, **settings)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = [_train(model, optimizer, step) for step in range(2)]
        if is_changed:
            model.extra = nn.Linear(50, 50)
            assert engine.adopt()
            del model.extra
            assert engine.adopt()
        losses += [_train(model, optimizer, step) for step in range(2, 5)]
        return losses, gathered_parameters(model)

    expected, values = run(False)
    losses, found = run(True)
    assert losses == expected
    assert all(torch.equal(value, found[name]) for name, value in values.items())


@pytest.mark.parametrize(
    "make_optimizer", [partial(infinity.SGD, momentum=0.9), infinity.SGD, infinity.Lion, infinity.Adam]
)
def test_other_optimizers(offload: MakeEngine, make_optimizer: Callable[..., Optimizer]) -> None:
    model: Any = build(Net)
    plain = build(Net)
    engine = offload(model)
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    reference_engine = offload(plain)
    reference = make_optimizer(plain.parameters(), lr=1e-3)
    for step in range(2):
        assert _train(model, optimizer, step) == _train(plain, reference, step)
    model.extra = nn.Linear(50, 50)
    assert engine.adopt()
    for step in range(2, 4):
        assert _train(model, optimizer, step) == _train(plain, reference, step)
    assert not reference_engine.adopt()


def test_an_optimizer_built_after_the_change(offload: MakeEngine) -> None:
    """Building it adopts what came in between."""
    plain, ours = build(Net), build(Net)
    offload(ours)
    losses = []
    for model, make in ((plain, partial(torch.optim.AdamW, fused=True)), (ours, infinity.AdamW)):
        replace_head(model)
        optimizer = make(model.parameters())
        losses.append([_train(model, optimizer, step) for step in range(3)])
    assert losses[0] == losses[1]


def test_what_is_put_under_the_drives_stays(offload: MakeEngine) -> None:
    wrapped: list[Backend] = []

    def wrap(backend: Backend) -> Backend:
        wrapped.append(FaultyBackend(backend))
        return wrapped[-1]

    model: Any = build(Net)
    engine = offload(model, wrap_backend=wrap)
    replace_head(model)
    assert engine.adopt()
    assert len(wrapped) == 2


def test_objects_and_hooks_of_kept_parameters_stay(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())
    kept = model.blocks[1].up.weight
    kept.tag = "mine"
    seen: list[str] = []
    handle = kept.register_hook(lambda grad: seen.append("hook"))
    other = model.blocks[2].up.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("post"))
    _train(model, optimizer, 0)
    assert sorted(seen) == ["hook", "post"]
    optimizer.add_param_group({"params": list(add_parameter_in_a_unit(model))})  # in the unit of the first
    assert model.blocks[1].up.weight is kept
    assert kept.tag == "mine"
    _train(model, optimizer, 1)
    assert sorted(seen) == ["hook", "hook", "post", "post"]
    handle.remove()
    other.remove()
    _train(model, optimizer, 2)
    assert len(seen) == 4
    assert engine.metrics()["step"] == 3


def test_what_was_removed_says_so_and_leaves_the_optimizer(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())
    _train(model, optimizer, 0)
    gone = model.blocks[1]
    before = engine.plan.placement.nvme_nbytes
    n_before = len(optimizer.param_groups[0]["params"])
    del model.blocks[1]
    assert engine.adopt()
    assert engine.plan.placement.nvme_nbytes < before
    assert len(optimizer.param_groups[0]["params"]) == n_before - len(list(gone.parameters()))
    with pytest.raises(infinity.NotGatheredError, match=r"'blocks.1.up.weight', which had been removed"):
        gone.up.weight.sum()
    with pytest.raises(infinity.ConfigError, match="removed"), infinity.gathered(gone):
        pass
    assert gone.up.weight.grad is None
    assert gone.up.weight.shape == (53, 37)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    _train(model, optimizer, 1)


def test_a_checkpoint_of_the_changed_model(offload: MakeEngine, tmp_path: Path) -> None:
    model: Any = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())
    _train(model, optimizer, 0)
    optimizer.add_param_group({"params": list(replace_head(model))})
    _train(model, optimizer, 1)
    engine.save(tmp_path / "saved", optimizer=optimizer)
    expected = [_train(model, optimizer, step) for step in range(2, 4)]
    engine.load(tmp_path / "saved", optimizer=optimizer)
    assert [_train(model, optimizer, step) for step in range(2, 4)] == expected


def test_a_graph_of_before_is_refused(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    loss = loss_of(model, batch(0))
    model.extra = nn.Linear(50, 50)
    assert engine.adopt()
    with pytest.raises(infinity.InfinityError):
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer = infinity.AdamW(model.parameters())
    _train(model, optimizer, 0)


def test_adopting_in_the_middle_is_refused(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    head, model.head = model.head, nn.Linear(37, 29)
    n_groups = len(optimizer.param_groups)
    with pytest.raises(infinity.IterationError, match=r"between two steps, but gradients of .* wait.*zero_grad"):
        optimizer.add_param_group({"params": list(model.head.parameters())})
    assert len(optimizer.param_groups) == n_groups  # nothing has been added
    optimizer.step()
    with infinity.gathered(model.blocks[0]), pytest.raises(infinity.CheckpointError, match="in use"):
        engine.adopt()
    model.head = head
    assert not engine.adopt()
    _train(model, optimizer, 1)


def test_adopting_inside_a_forward_is_refused(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())

    def change(*_: Any) -> None:
        model.extra = nn.Linear(3, 3)
        engine.adopt()

    handle = model.blocks[0].register_forward_pre_hook(change)
    with pytest.raises(infinity.IterationError, match="a forward or a backward is under way"):
        model(batch(0))
    handle.remove()
    del model.extra
    _train(model, optimizer, 1)


@pytest.mark.parametrize("bad", ["budget", "lazy", "meta", "drive"])
def test_a_change_that_does_not_fit_changes_nothing(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Refused before anything moves: undone, the run goes on with the same bits."""
    plain, model = build(Net), build(Net)
    engine = offload(model, device={"kind": "cpu", "budget": "200KiB"})
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    optimizer = infinity.AdamW(model.parameters())
    assert _train(model, optimizer, 0) == _train(plain, reference, 0)
    with torch.device("meta" if bad == "meta" else "cpu"):
        model.extra = {"budget": nn.Linear(300, 300), "lazy": nn.LazyLinear(3)}.get(bad, nn.Linear(30, 30))
    error: Any = {"budget": infinity.PlacementError, "drive": infinity.CheckpointError}.get(
        bad, infinity.UnsupportedModelError
    )
    if bad == "drive":
        monkeypatch.setattr("infinity.carry.os.posix_fallocate", _full)
    with pytest.raises(error):
        engine.adopt()
    monkeypatch.undo()
    del model.extra
    assert not engine.adopt()
    assert _train(model, optimizer, 1) == _train(plain, reference, 1)


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_durable_steps_refuse(offload: MakeEngine) -> None:
    model: Any = build(Net)
    engine = offload(model, durability="step", schedule="synchronous")
    model.extra = nn.Linear(50, 50)
    with pytest.raises(infinity.ConfigError, match="durability='step'"):
        engine.adopt()
