"""A model that has been offloaded inside a model that is offloaded too: two engines, the same bits as plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.state_dicts import get_model_state_dict
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import gathered_parameters
from tests.zoo import Block, batch, build, loss_of

SCHEDULES = ("synchronous", "overlapped", "deferred")
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Inner(nn.Module):
    """Blocks behind a scale of its own, with a buffer that training changes."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x.flatten(0, 1)).view(x.shape)
        return out


class Outer(nn.Module):
    """Blocks around another model. `checkpointing`: None, or "nr", "re" around every block and the other model, or
    "span" around all of them; `is_teacher`: the other model runs without a graph; `calls`: how often it does."""

    def __init__(
        self, *, checkpointing: str | None = None, is_teacher: bool = False, calls: int = 1, width: int = 37
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.first = nn.ModuleList(Block(width) for _ in range(2))
        self.inner = Inner(width)
        self.last = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 29)
        self.checkpointing = checkpointing
        self.is_teacher = is_teacher
        self.calls = calls

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        spans = self.checkpointing == "span"
        x = checkpoint(self._span, x, use_reentrant=False) if spans else self._span(x)
        out: Tensor = self.head(x)
        return out

    def _span(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = self._run(block, x)
        for _ in range(self.calls):
            with torch.set_grad_enabled(not self.is_teacher and torch.is_grad_enabled()):
                found = self._run(self.inner, x)
            x = x + found
        for block in self.last:
            x = self._run(block, x)
        return x

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing in ("nr", "re"):
            return checkpoint(block, x, use_reentrant=self.checkpointing == "re")  # type: ignore[no-any-return]
        return block(x)  # type: ignore[no-any-return]


def frozen(make: Callable[[], Outer]) -> Outer:
    model = make()
    model.inner.requires_grad_(False)
    return model


def around(model: Outer) -> Iterator[nn.Parameter]:
    """The parameters of the outer model without those of the inner one."""
    inner = {id(parameter) for parameter in model.inner.parameters()}
    return (parameter for parameter in model.parameters() if id(parameter) not in inner)


def run(model: Outer, optimizers: list[torch.optim.Optimizer], *, accumulate: int = 1, steps: int = 3) -> list[float]:
    losses = []
    numbers = itertools.count()
    for _ in range(steps):
        for _ in range(accumulate):
            loss = loss_of(model, batch(next(numbers)))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def run_plain(make: Callable[[], Outer], **loop: Any) -> tuple[list[float], Outer]:
    model = build(make)
    assert isinstance(model, Outer)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(around(model), fused=True, **HYPER)]
    if next(model.inner.parameters()).requires_grad:
        optimizers.append(torch.optim.AdamW(model.inner.parameters(), fused=True, **HYPER))
    return run(model, optimizers, **loop), model


def optimizers_of(model: Outer) -> list[torch.optim.Optimizer]:
    """One per engine."""
    found: list[torch.optim.Optimizer] = [infinity.AdamW(around(model), **HYPER)]
    if next(model.inner.parameters()).requires_grad:
        found.append(infinity.AdamW(model.inner.parameters(), **HYPER))
    return found


def assert_same_model(ours: nn.Module, plain: nn.Module) -> None:
    found = gathered_parameters(ours)
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert not [name for name, want in plain.named_parameters() if not torch.equal(found[name], want)]
    buffers = dict(ours.named_buffers())
    assert not [name for name, want in plain.named_buffers() if not torch.equal(buffers[name], want)]


def assert_parity(offload: MakeEngine, make: Callable[[], Outer], settings: dict[str, Any], **loop: Any) -> None:
    losses, plain = run_plain(make, **loop)
    model = build(make)
    assert isinstance(model, Outer)
    engines = [offload(model.inner, **settings), offload(model, **settings)]
    assert run(model, optimizers_of(model), **loop) == losses
    assert_same_model(model, plain)
    for engine in engines:
        nothing_gathered(engine)


# The same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, "nr", "re", "span"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_are_trained(offload: MakeEngine, schedule: str, checkpointing: str | None) -> None:
    assert_parity(offload, partial(Outer, checkpointing=checkpointing), {"schedule": schedule})


@pytest.mark.parametrize("checkpointing", [None, "nr", "re", "span"])
@pytest.mark.parametrize("is_teacher", [False, True])
def test_the_inner_one_is_frozen(offload: MakeEngine, is_teacher: bool, checkpointing: str | None) -> None:
    """A frozen encoder, through which gradients pass, and a teacher, which runs without a graph."""
    make = partial(frozen, partial(Outer, checkpointing=checkpointing, is_teacher=is_teacher))
    assert_parity(offload, make, {"schedule": "overlapped"})


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_accumulated(offload: MakeEngine, schedule: str, calls: int) -> None:
    assert_parity(offload, partial(Outer, calls=calls), {"schedule": schedule}, accumulate=2)


@pytest.mark.parametrize("checkpointing", [None, "re", "span"])
def test_called_three_times(offload: MakeEngine, checkpointing: str | None) -> None:
    """In one forward of the outer model the inner one has three, whose backwards come in one."""
    assert_parity(offload, partial(Outer, calls=3, checkpointing=checkpointing), {"schedule": "overlapped"})


@pytest.mark.parametrize("empty", ["inner", "outer", "both"])
def test_built_empty(offload: MakeEngine, empty: str) -> None:
    """Each engine initialises its own part, and leaves the other's alone."""

    def fill(module: nn.Module) -> None:
        """Values that depend on the shape alone."""
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()

    def make() -> Outer:
        return Outer().apply(torch.no_grad()(fill))

    losses, plain = run_plain(make)
    with infinity.empty_init():
        hollow = Outer()
    model = hollow if empty != "inner" else make()
    model.inner = hollow.inner if empty != "outer" else make().inner
    offload(model.inner, init_fn=fill)
    offload(model, init_fn=fill)
    assert run(model, optimizers_of(model)) == losses
    assert_same_model(model, plain)


@pytest.mark.parametrize("is_inner_built", [True, False])
def test_initialised_from_the_seed(offload: MakeEngine, is_inner_built: bool) -> None:
    """Each engine gives its part the values of ordinary construction, whatever the other one has drawn before."""
    losses, plain = run_plain(Outer)
    built = build(Outer)
    torch.manual_seed(0)
    with infinity.empty_init():
        model = Outer()
    if is_inner_built:
        model.inner = built.inner  # type: ignore[assignment]
    torch.manual_seed(5)
    offload(model.inner)
    offload(model)
    assert run(model, optimizers_of(model)) == losses
    assert_same_model(model, plain)


# Either order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "between steps"])
def test_the_outer_one_first(offload: MakeEngine, when: str) -> None:
    """A module is put into an offloaded model, and offloaded before or after that; no adoption is needed."""
    make = Outer
    losses, plain = run_plain(make)
    model = build(make)
    assert isinstance(model, Outer)
    inner, model.inner = model.inner, nn.Identity()  # type: ignore[assignment]
    engine = offload(model)
    outers = infinity.AdamW(model.parameters(), **HYPER)
    if when == "between steps":
        model.inner = inner
        with pytest.raises(infinity.UnsupportedModelError, match=r"got parameters .*'inner.scale', 'inner.blocks.0"):
            run(model, [outers], steps=1)
    if when != "after":
        offload(inner)
        model.inner = inner
    else:
        model.inner = inner
        offload(inner)
    assert run(model, [outers, infinity.AdamW(inner.parameters(), **HYPER)]) == losses
    assert not engine.adopt()
    assert_same_model(model, plain)


def test_exchanged_between_two_steps(offload: MakeEngine) -> None:
    """Another module of another engine takes the place; the outer model is adopted without and with a change."""

    def trained(model: Outer, exchange: Callable[[], Inner]) -> Iterator[float]:
        for _ in range(2):
            loss = loss_of(model, batch(0))
            loss.backward()  # type: ignore[no-untyped-call]
            yield loss.item()
            model.zero_grad()
            model.inner = exchange()

    others = [build(Inner, seed) for seed in (1, 2)]
    plain = build(Outer)
    assert isinstance(plain, Outer)
    expected = list(trained(plain, iter(others).__next__))
    model = build(Outer)
    assert isinstance(model, Outer)
    others = [build(Inner, seed) for seed in (1, 2)]
    engine = offload(model.inner)
    outers = offload(model)
    for other in others:
        offload(other)
    got = list(trained(model, iter(others).__next__))
    assert got == expected
    assert not outers.adopt()
    model.more = nn.Linear(3, 3)
    assert outers.adopt()
    assert {name.partition(".")[0] for name in get_model_state_dict(outers)} == {
        "embed", "first", "last", "head", "more",
    }  # fmt: skip
    assert not engine.is_closed


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_closed_in_either_order(offload: MakeEngine, first: str) -> None:
    model = build(Outer)
    assert isinstance(model, Outer)
    inner, outer = offload(model.inner), offload(model)
    optimizers = optimizers_of(model)
    run(model, optimizers, steps=1)
    (inner if first == "inner" else outer).close()
    with pytest.raises(infinity.InfinityError, match="closed"):
        run(model, optimizers, steps=1)
    if first == "inner":
        outer.reset_iteration()
        model.inner = nn.Identity()  # type: ignore[assignment]
        run(model, optimizers[:1], steps=1)
    else:
        loss = model.inner(torch.ones(3, 11, 37)).pow(2).sum()
        loss.backward()
        optimizers[1].step()
    nothing_gathered(outer if first == "inner" else inner)


def test_one_that_is_closed_cannot_be_taken_in(offload: MakeEngine) -> None:
    model = build(Outer)
    assert isinstance(model, Outer)
    offload(model.inner).close()
    with pytest.raises(infinity.UnsupportedModelError, match=r"module 'inner' belongs to an engine that is closed"):
        offload(model)


# What belongs to whom ----------------------------------------------------------------------------------------------


def two(offload: MakeEngine, **settings: Any) -> tuple[Outer, infinity.Engine, infinity.Engine]:
    model = build(Outer)
    assert isinstance(model, Outer)
    inner = offload(model.inner, **settings)
    return model, inner, offload(model, **settings)


def test_each_plans_and_stores_its_own(offload: MakeEngine, tmp_path: Path) -> None:
    model, inner, outer = two(offload)
    numels = [sum(p.numel() for p in parameters) for parameters in (model.inner.parameters(), around(model))]
    assert [engine.plan.parameters for engine in (inner, outer)] == numels
    assert not [unit.name for unit in outer._runtime.units if unit.name.startswith("inner")]
    inside = {id(module) for module in model.inner.modules()}
    assert not [unit.name for unit in outer._runtime.units if id(unit.module) in inside]
    assert list(map(id, outer.parameters())) == list(map(id, around(model)))
    assert list(map(id, inner.parameters())) == list(map(id, model.inner.parameters()))
    assert len(list(tmp_path.iterdir())) == 2  # swap folders
    before = [engine.metrics()["nvme/read_bytes"] for engine in (inner, outer)]
    model.inner(torch.ones(3, 11, 37))
    after = [engine.metrics()["nvme/read_bytes"] for engine in (inner, outer)]
    assert after[0] > before[0]
    assert after[1] == before[1]


def test_hooks_stay_out_of_the_inner_model(offload: MakeEngine) -> None:
    """Closing the inner engine leaves none in it but those of the outer one at the border, for a backward that begins
    inside; closing both leaves none."""
    model = build(Outer)
    assert isinstance(model, Outer)
    inner, outer = offload(model.inner), offload(model, unit_classes=("Outer",))

    def count(module: nn.Module) -> int:
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
        return sum(map(len, kinds))

    inner.close()
    assert [name for name, module in model.inner.named_modules() if count(module)] == [""]
    assert count(model.inner) == 1
    outer.close()
    assert not [name for name, module in model.named_modules() if count(module)]


def test_state_dicts(offload: MakeEngine) -> None:
    """Torch's covers both where both are gathered, and refuses elsewhere; that of an engine covers its own."""
    _, plain = run_plain(Outer)
    model, inner, outer = two(offload)
    run(model, optimizers_of(model))
    with pytest.raises(infinity.NotGatheredError):
        model.state_dict()
    with infinity.gathered(model):
        found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    assert all(torch.equal(found[name], want) for name, want in plain.state_dict().items())
    parts = {
        f"{prefix}{name}": value
        for prefix, engine in (("", outer), ("inner.", inner))
        for name, value in get_model_state_dict(engine).items()
    }
    assert parts.keys() == found.keys()
    assert all(torch.equal(parts[name], want) for name, want in found.items())
    with infinity.gathered(model), torch.no_grad():
        model.load_state_dict({name: torch.zeros_like(value) for name, value in found.items()})
    assert not [name for name, value in gathered_parameters(model).items() if value.count_nonzero()]


def test_saved_and_loaded_apart(offload: MakeEngine, tmp_path: Path) -> None:
    losses, plain = run_plain(Outer, steps=4)
    model, inner, outer = two(offload)
    optimizers = optimizers_of(model)
    got = run(model, optimizers, steps=2)
    inner.save(tmp_path / "inner")
    outer.save(tmp_path / "outer")
    run(model, optimizers, steps=1)
    with pytest.raises(infinity.CheckpointError, match="belongs to another model"):
        outer.load(tmp_path / "inner")
    inner.load(tmp_path / "inner")
    outer.load(tmp_path / "outer")
    for number in (2, 3):
        loss = loss_of(model, batch(number))
        loss.backward()  # type: ignore[no-untyped-call]
        got.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert got == losses
    assert_same_model(model, plain)
    fresh = build(Outer, 9)
    assert isinstance(fresh, Outer)
    offload(fresh.inner, weights=tmp_path / "inner")
    offload(fresh, weights=tmp_path / "outer")


def test_parameters_cannot_be_shared(offload: MakeEngine) -> None:
    model = build(Outer)
    assert isinstance(model, Outer)
    model.head.bias = nn.Parameter(model.inner.scale[:29].detach().clone())
    model.inner.norm.weight = model.inner.scale
    model.last[0].norm.bias = model.inner.scale
    offload(model.inner)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'last.0.norm.bias' is 'scale' of another model"):
        offload(model)
    model.last[0].norm.bias = nn.Parameter(torch.zeros(37))
    engine = offload(model)
    train = optimizers_of(model)
    run(model, train, steps=1)
    model.last[0].norm.bias = model.inner.scale
    with pytest.raises(infinity.UnsupportedModelError, match=r"in the place of offloaded parameter 'last.0.norm.bias'"):
        run(model, train, steps=1)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'last.0.norm.bias' is 'scale' of another model"):
        engine.adopt()


def test_what_an_outer_engine_holds_is_not_taken_in(offload: MakeEngine) -> None:
    """Neither a part of its model, nor a parameter of it."""
    model = build(Outer)
    assert isinstance(model, Outer)
    offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match="offloaded once"):
        offload(model.inner)
    with pytest.raises(infinity.UnsupportedModelError, match="no parameters that another engine does not serve"):
        offload(nn.Sequential(model.inner))
    other = Block()
    other.norm.weight = model.inner.scale
    with pytest.raises(infinity.UnsupportedModelError, match=r"'norm.weight' is 'inner.scale' of another model"):
        offload(other)


def test_optimizers_refuse_parameters_of_the_other(offload: MakeEngine) -> None:
    losses, _ = run_plain(Outer)
    model, _, _ = two(offload)
    with pytest.raises(infinity.ConfigError, match=r"parameter 'scale' of .* belongs to the engine of another"):
        infinity.AdamW(model.parameters())
    optimizers = optimizers_of(model)
    outers = optimizers[0]
    with pytest.raises(infinity.ConfigError, match=r"parameter 'scale' of .* belongs to the engine of another"):
        outers.add_param_group({"params": list(model.inner.parameters()), "lr": 100.0})
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.ConfigError, match=r"parameters of several engines, 'scale' among them"):
        infinity.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(infinity.ConfigError, match=r"AdamW cannot update parameter 'scale'"):
        torch.optim.AdamW(model.inner.parameters()).step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert run(model, optimizers) == losses, "a group that was refused has changed what its neighbours are updated with"


# What goes on working ----------------------------------------------------------------------------------------------


def test_a_graph_made_in_a_gathered_block(offload: MakeEngine) -> None:
    """Its backward refuses behind the block, whichever engine's memory is gone; it would read what is freed."""
    model, inner, outer = two(offload)
    for layer in (model.head, model.inner.blocks[0].up):
        with infinity.gathered(model):
            loss = layer.weight.pow(2).sum()
        with pytest.raises(infinity.NotGatheredError, match="over"):
            loss.backward()
        with infinity.gathered(model.head), infinity.gathered(model.inner):
            loss = layer.weight.pow(2).sum()
            loss.backward()
        del loss
    for engine in (inner, outer):
        engine.reset_iteration()
        nothing_gathered(engine)


def test_use_outside_and_in_the_other_forward(offload: MakeEngine) -> None:
    """A parameter of the inner model that code of the outer one reads is not there: its engine is not inside."""

    class Reading(Outer):
        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.inner.blocks[0].up.bias * super().forward(ids).mean()
            return found

    model = build(Reading)
    assert isinstance(model, Outer)
    engines = [offload(model.inner), offload(model)]
    for use in (lambda: model.inner.blocks[0].up.bias + 1, lambda: model.head.weight + 1, lambda: model(batch(0))):
        with pytest.raises(infinity.NotGatheredError, match=r"'blocks.0.up.bias'|'head.weight'"):
            use()
    model.eval()
    Reading.forward = Outer.forward  # type: ignore[method-assign]
    model(batch(0))
    for engine in engines:
        engine.reset_iteration()
        nothing_gathered(engine)


def test_both_learn_their_order(offload: MakeEngine) -> None:
    """After one step everything is read ahead, though neither engine sees the whole of the model."""
    model, inner, outer = two(offload, schedule="synchronous")
    optimizers = optimizers_of(model)
    run(model, optimizers, steps=2)
    before = [engine.metrics() for engine in (inner, outer)]
    run(model, optimizers, steps=2)
    for engine, seen in zip((inner, outer), before, strict=True):
        now = engine.metrics()
        demanded = now["readahead/reads_on_demand"] - seen["readahead/reads_on_demand"]
        assert demanded == 0
        assert now["readahead/reads_ahead"] > seen["readahead/reads_ahead"]


class Wrapping(nn.Module):
    """A unit around another model, which uses a parameter of its own on what that gets; keeps what is made inside."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, width))
        self.shift = nn.Parameter(torch.zeros(400))  # large enough to be no resident
        self.inner = Inner(width)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        out: Tensor = self.inner(x * self.gain + self.shift[:37]) * self.gain
        return out


def test_a_backward_that_begins_inside(offload: MakeEngine) -> None:
    """A tensor that a hook of the user takes from inside the inner model leads to parameters around it."""

    def gradients(model: nn.Sequential, wrapping: Wrapping) -> list[Tensor]:
        kept: list[Tensor] = []
        wrapping.inner.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
        x = torch.linspace(-1, 1, 2 * 5 * 37).view(2, 5, 37).requires_grad_()
        model(x)
        kept[0].pow(2).mean().backward()  # type: ignore[no-untyped-call]
        found = [x.grad, wrapping.gain.grad, wrapping.inner.scale.grad]
        return [grad.clone() for grad in found if grad is not None]

    def make() -> nn.Sequential:
        return nn.Sequential(Block(), Wrapping())

    plain, ours = build(make), build(make)
    expected = gradients(plain, plain[1])  # type: ignore[index, arg-type]
    inner = offload(ours[1].inner)  # type: ignore[index]
    offload(ours, unit_classes=("Wrapping", "Block"))
    got = gradients(ours, ours[1])  # type: ignore[index, arg-type]
    assert len(got) == len(expected) == 3
    assert all(map(torch.equal, got, expected))
    nothing_gathered(inner)


def test_blocks_are_found_around(offload: MakeEngine) -> None:
    """Models of another engine are no blocks, in whatever container they stand, and count as no parameters."""
    model = nn.Sequential(nn.ModuleList([Inner(), Inner()]), nn.Sequential(Block(), Inner(), Block()), nn.Linear(37, 9))
    for module in list(model.modules()):
        if isinstance(module, Inner):
            offload(module)
    engine = offload(model)
    assert [unit.name for unit in engine._runtime.units] == ["1.0", "1.2", "2"]
    policy = {"wrap_policy": lambda module: [module[1][1]]}
    with pytest.raises(infinity.UnsupportedModelError, match="or one that another engine has offloaded"):
        offload(nn.Sequential(nn.Linear(3, 3), nn.Sequential(Block(), model[1][1])), **policy)  # type: ignore[index]


def test_three_deep(offload: MakeEngine) -> None:
    """An engine inside one that is inside a third."""

    class Outermost(Outer):
        def __init__(self) -> None:
            super().__init__()
            self.inner.blocks[1] = nn.Sequential(Block(), Inner())

    losses, plain = run_plain(Outermost)
    model = build(Outermost)
    assert isinstance(model, Outer)
    core = model.inner.blocks[1][1]  # type: ignore[index]
    engines = [offload(module, schedule="overlapped") for module in (core, model.inner, model)]
    optimizers: list[torch.optim.Optimizer] = [infinity.AdamW(engine.parameters(), **HYPER) for engine in engines]
    assert run(model, optimizers) == losses
    assert_same_model(model, plain)


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
@pytest.mark.parametrize("where", ["inner forward", "outer forward", "inner backward", "outer backward"])
@pytest.mark.parametrize("checkpointing", [None, "re"])
def test_a_failure_and_a_clean_retry(
    offload: MakeEngine, schedule: str, where: str, checkpointing: str | None
) -> None:
    """Whatever fails on whichever side of the border, both engines go on."""

    def script(model: Outer, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        seen: list[Any] = []

        def fail(*unused: Any) -> None:
            if "failed" not in seen:
                seen.append("failed")
                raise ArithmeticError

        block = model.inner.blocks[1] if "inner" in where else model.last[0]
        is_forward = "forward" in where
        hook = block.register_forward_hook(fail) if is_forward else block.up.weight.register_hook(fail)  # type: ignore[union-attr, operator]
        for attempt in range(3):
            try:
                seen += run(model, optimizers, steps=1)
            except ArithmeticError:
                seen.append(attempt)
                for optimizer in optimizers:
                    optimizer.zero_grad()
        hook.remove()
        return seen

    make = partial(Outer, checkpointing=checkpointing)
    plain, model = build(make), build(make)
    assert isinstance(plain, Outer)
    assert isinstance(model, Outer)
    parts = (around(plain), plain.inner.parameters())
    expected = script(plain, [torch.optim.AdamW(part, fused=True, **HYPER) for part in parts])
    engines = [offload(module, schedule=schedule) for module in (model.inner, model)]
    assert script(model, optimizers_of(model)) == expected
    assert 0 in expected
    assert_same_model(model, plain)
    for engine in engines:
        nothing_gathered(engine)


def test_gradients_of_both_at_once(offload: MakeEngine) -> None:
    """`torch.autograd.grad` with respect to parameters of two engines, where one unit of the outer is all around."""
    plain, model = build(Outer), build(Outer)
    expected = torch.autograd.grad(loss_of(plain, batch(0)), list(plain.parameters()))
    engines = [offload(model.inner), offload(model, unit_classes=("Outer",))]  # type: ignore[arg-type]
    got = torch.autograd.grad(loss_of(model, batch(0)), list(model.parameters()))
    assert all(map(torch.equal, got, expected))
    for engine in engines:
        nothing_gathered(engine)


def test_one_operation_over_parameters_of_both(offload: MakeEngine) -> None:
    """Neither engine takes the other's parameter for one of its own."""
    model, _, _ = two(offload)
    ours, theirs = model.last[1].up, model.inner.blocks[2].up
    for first, second in ((ours, theirs), (theirs, ours)):
        with pytest.raises(infinity.NotGatheredError):
            torch.add(first.weight, second.weight)
        handle = model.head.register_forward_pre_hook(lambda *unused: torch.add(ours.weight, theirs.weight) and None)
        with pytest.raises(infinity.NotGatheredError, match=r"'blocks.2.up.weight'"):
            model(batch(0))
        handle.remove()
        with infinity.gathered([first.weight, second.weight]):
            total = torch.add(first.weight, second.weight)
        with infinity.gathered(ours):
            ours_alone = ours.weight.detach().clone()
        with infinity.gathered(theirs):
            assert torch.equal(total, ours_alone + theirs.weight)
