"""Layer-wise micro-batches: the gradients of ordinary accumulation, while parameters are read once per step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import gathered_parameters
from tests.zoo import Attention, Block, Nested, Net, OddNet, build

TIGHT = {"budget": "360KiB"}
MakeModel = Callable[[], nn.Module]


def _batch(step: int, samples: int = 8) -> torch.Tensor:
    """Powers of two: means of means and the mean of all have the same bits."""
    return torch.randint(0, 29, (samples, 16), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _accumulated(make: MakeModel, micro_batches: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """Plain PyTorch with ordinary accumulation over the same slices."""
    model = build(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        for ids in _batch(step).chunk(micro_batches):
            (_loss(model, ids) / micro_batches).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _sliced(
    offload: MakeEngine, make: MakeModel, micro_batches: int, steps: int = 3, **settings: Any
) -> tuple[nn.Module, infinity.Engine]:
    model = build(make)
    engine = offload(model, micro_batches=micro_batches, **({"host": TIGHT} | settings))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        _loss(model, _batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, engine


def _attention() -> Attention:
    model = Attention()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        elif isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


MODELS: dict[str, MakeModel] = {
    "plain": Net,
    "non-reentrant": partial(Net, checkpointing="nr"),
    "reentrant": partial(Net, checkpointing="re"),
    "attention": _attention,
}


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_same_bits_as_ordinary_accumulation(
    offload: MakeEngine, make: MakeModel, micro_batches: int, schedule: str
) -> None:
    expected = _accumulated(make, micro_batches)
    model, engine = _sliced(offload, make, micro_batches, schedule=schedule)
    different = [name for name, p in gathered_parameters(model).items() if not torch.equal(p, expected[name])]
    assert not different
    nothing_gathered(engine)


class _Attributes(nn.Module):
    """A net whose blocks lie in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.names = [f"block{number}" for number in range(4)]
        for name in self.names:
            self.add_module(name, Block())
        self.head = nn.Linear(37, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for name in self.names:
            x = self.get_submodule(name)(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_blocks_that_are_attributes_are_sliced(offload: MakeEngine) -> None:
    """What is around them sees the whole batch, so their parameters alone have those bits, and after one step."""
    expected, whole = _accumulated(_Attributes, 4, steps=1), _accumulated(_Attributes, 1, steps=1)
    model, engine = _sliced(offload, _Attributes, 4, steps=1, resident_threshold="32KiB")
    found = {name: p for name, p in gathered_parameters(model).items() if name.startswith("block")}
    assert not [name for name, p in found.items() if not torch.equal(p, expected[name])]
    assert [name for name, p in found.items() if not torch.equal(p, whole[name])]
    nothing_gathered(engine)


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
def test_traffic_does_not_grow_with_the_micro_batches(offload: MakeEngine, schedule: str) -> None:
    """Also overlapped, which ordinary accumulation excludes: there is one backward."""
    traffic = []
    for micro_batches in (1, 2, 8):
        _, engine = _sliced(offload, Net, micro_batches, schedule=schedule)
        for step, counted in enumerate(engine.traffic.per_step):
            expected = engine.plan.expected_traffic(step)
            assert counted["nvme_read_bytes"] == expected.read_nbytes > 0
            assert counted["nvme_write_bytes"] == expected.write_nbytes > 0
        traffic.append(engine.traffic.per_step)
    assert traffic[0] == traffic[1] == traffic[2]


class Watching(Block):
    """Notes how large the batches are that it sees."""

    seen: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[0])
        return super().forward(x)


class Stack(nn.Module):
    """Embedding, blocks of a class, head."""

    def __init__(self, block: Callable[[], nn.Module] = Watching) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(37, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def test_slices_run_from_the_last_to_the_first_and_are_nearly_equal(offload: MakeEngine) -> None:
    model = build(Stack)
    offload(model, micro_batches=3)
    for block in model.get_submodule("blocks").children():
        assert isinstance(block, Watching)
        block.seen = []
    model(_batch(0, samples=8))
    assert [block.seen for block in model.get_submodule("blocks").children()] == [[2, 3, 3]] * 2
    with torch.no_grad():
        model(_batch(0, samples=8))
    model(_batch(0, samples=2))
    model(_batch(0, samples=1))
    assert [block.seen[3:] for block in model.get_submodule("blocks").children()] == [[8, 1, 1, 1]] * 2


@pytest.mark.parametrize("make", [OddNet, partial(Net, repeat=2)], ids=["odd", "repeated"])
def test_gradients_of_uneven_slices_are_those_of_the_batch(offload: MakeEngine, make: MakeModel) -> None:
    """But for rounding: a unit that runs twice adds its gradients run by run, not slice by slice."""
    whole, ours = build(make), build(make)
    offload(ours, micro_batches=3, host={"budget": "4MiB"})
    for model in (whole, ours):
        model(_batch(0)).float().pow(2).mean().backward()
    for name, parameter in whole.named_parameters():
        found = dict(ours.named_parameters())[name].grad
        assert (found is None) == (parameter.grad is None)
        if found is not None:
            torch.testing.assert_close(found, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_unit_around_units_is_not_sliced(offload: MakeEngine) -> None:
    """Its inner units are, so parameters are gathered as often as without slices."""
    counts = []
    for micro_batches in (1, 4):
        model = build(Nested)
        engine = offload(model, micro_batches=micro_batches)
        optimizer = infinity.AdamW(model.parameters())
        model(_batch(0)).float().mean().backward()
        optimizer.step()
        counts.append(engine._runtime.gatherer.gathers)
    assert counts[0] == counts[1]


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.over_batch = nn.BatchNorm1d(37)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.over_batch(x.transpose(1, 2)).transpose(1, 2))


class Balanced(Block):
    """Returns a number for the whole batch beside its output, as experts do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x.mean()


class First(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)[0]
        return out


def test_batch_norm_in_training_is_refused_by_name(offload: MakeEngine) -> None:
    model = build(partial(Stack, Normed))
    engine = offload(model, micro_batches=2)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'blocks\.0' has BatchNorm1d 'over_batch' in training"):
        model(_batch(0))
    nothing_gathered(engine)
    model.eval()
    model(_batch(0)).float().mean().backward()  # frozen statistics are the same for every slice


def test_outputs_without_a_batch_are_refused_by_name(offload: MakeEngine) -> None:
    model = build(partial(Stack, lambda: First(Balanced())))
    engine = offload(model, micro_batches=2, unit_classes=["Balanced", "Embedding", "Linear"])
    with pytest.raises(infinity.UnsupportedModelError, match=r"'blocks\.0\.block' returns tensors of shapes"):
        model(_batch(0))
    nothing_gathered(engine)


def test_hooks_of_the_user_on_a_sliced_unit_are_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, micro_batches=2)
    handle = model.get_submodule("blocks.1").register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'blocks\.1' has forward hooks of its own"):
        model(_batch(0))
    handle.remove()
    model(_batch(0))


def test_settings_are_checked() -> None:
    with pytest.raises(infinity.ConfigError, match="micro_batches = 0"):
        infinity.Config(micro_batches=0)
