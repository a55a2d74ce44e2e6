"""Views of parameters that code keeps from a forward or a backward: they show the present values while they live."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.torch_compat import are_referred_to, holders_are_told_apart, is_held_by_code
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered
from tests.zoo import Net, batch, build, loss_of, one_step

SCHEDULES = ("synchronous", "overlapped", "deferred")


def _weight(model: nn.Module) -> Tensor:
    weight = model.get_submodule("blocks.1").up.weight
    assert isinstance(weight, Tensor)
    return weight


def _keep(model: nn.Module, take: Any) -> list[Tensor]:
    """Let a hook of a block keep what `take` makes of its weight in the next forward."""
    kept: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not kept:
            kept.append(take(_weight(model)))

    model.get_submodule("blocks.1.up").register_forward_hook(hook)
    return kept


TAKES = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "row": lambda w: w[1],
    "transposed": lambda w: w.t(),
    "row of detach": lambda w: w.detach()[1],
    "row of rows": lambda w: w[1:][0],
    "part": lambda w: torch.split(w, 1)[0],
}


@pytest.mark.parametrize("take", TAKES)
def test_view_kept_from_an_evaluation(offload: MakeEngine, take: str) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model)
    kept = _keep(model, TAKES[take])
    with torch.no_grad():
        model(batch(0))
    assert torch.equal(kept[0], TAKES[take](_weight(plain)))
    kept.clear()
    with torch.no_grad():
        model(batch(0))
    kept.clear()
    engine._runtime.gatherer.release_unviewed()
    nothing_gathered(engine)


def _optimizers(models: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "plain": torch.optim.AdamW(models["plain"].parameters(), fused=True),
        "ours": infinity.AdamW(models["ours"].parameters()),
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("take", TAKES)
def test_view_kept_from_a_training_forward(offload: MakeEngine, take: str, schedule: str) -> None:
    """As in plain PyTorch, it shows what the optimizer makes of the parameter."""
    models: dict[str, nn.Module] = {"plain": build(Net), "ours": build(Net)}
    engine = offload(models["ours"], schedule=schedule)
    optimizers = _optimizers(models)
    kept = {name: _keep(model, TAKES[take]) for name, model in models.items()}
    for step in range(3):
        losses = [one_step(models[name], optimizers[name], step) for name in models]
        assert losses[0] == losses[1]
        engine.metrics()
        assert torch.equal(kept["ours"][0], kept["plain"][0])
    kept["ours"].clear()
    engine._runtime.gatherer.release_unviewed()


class Remembers(nn.Module):
    """Keeps a view of its weight from every forward, and its loss uses the one of the forward before."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = torch.tanh(line(x))
        penalty = sum((view.square().sum() for view in self.last), torch.zeros(()))
        self.last = [line.weight.T[2:5] for line in self.lines]  # type: ignore[operator,union-attr,index]
        return x.square().sum() + 0.1 * penalty


def _train_alike(models: dict[str, nn.Module], *, steps: int) -> None:
    """Losses are equal in every step, and so are the views that the models have kept of it."""
    optimizers = _optimizers(models)
    for step in range(steps):
        losses = []
        for name, model in models.items():
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step), requires_grad=True)
            loss = model(x)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        for ours, plain in zip(models["ours"].last, models["plain"].last, strict=True):  # type: ignore[arg-type]
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_view_of_the_last_forward_is_part_of_the_loss(offload: MakeEngine, schedule: str) -> None:
    models: dict[str, nn.Module] = {"plain": build(Remembers), "ours": build(Remembers)}
    offload(models["ours"], schedule=schedule, unit_classes=["Linear"], resident_threshold=0)
    _train_alike(models, steps=4)


@pytest.mark.parametrize("take", TAKES)
def test_view_kept_from_a_backward(offload: MakeEngine, take: str) -> None:
    models: dict[str, nn.Module] = {"plain": build(Net), "ours": build(Net)}
    engine = offload(models["ours"])
    optimizers = _optimizers(models)
    kept: dict[str, list[Tensor]] = {}
    for name, model in models.items():
        views = kept[name] = []

        def hook(module: nn.Module, args: Any, grads: Any, views: list[Tensor] = views) -> None:
            views[:] = [TAKES[take](module.weight)]

        model.get_submodule("blocks.1.up").register_full_backward_hook(hook)
    for step in range(2):
        losses = [one_step(models[name], optimizers[name], step) for name in models]
        assert losses[0] == losses[1]
        engine.metrics()
        assert torch.equal(kept["ours"][0], kept["plain"][0])


def test_a_view_that_has_grown_old_is_found(offload: MakeEngine) -> None:
    """A collection in the middle of the forward moves it away from the young objects."""
    model, plain = build(Net), build(Net)
    offload(model)

    def take(weight: Tensor) -> Tensor:
        view = weight[1]
        gc.collect()
        return view

    kept = _keep(model, take)
    loss_of(model, batch(0))
    assert torch.equal(kept[0], _weight(plain)[1])


def test_views_of_what_is_always_there_outlive_the_engine(offload: MakeEngine) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model, resident_threshold="8KiB")
    assert "head.weight" in {slot.name for group in engine._runtime.resident_groups for slot in group.layout.slots}
    view = model.get_parameter("head.weight").detach()[1]
    engine.close()
    assert torch.equal(view, plain.get_parameter("head.weight")[1])


def test_steps_that_are_alike_are_looked_at_once(offload: MakeEngine) -> None:
    """Where nobody keeps a view, every unit is released as ever, and the objects of Python are not looked through."""
    model = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(model.parameters())
    searches = []
    for step in range(4):
        loss = loss_of(model, batch(step))
        nothing_gathered(engine)
        loss.backward()  # type: ignore[no-untyped-call]
        nothing_gathered(engine)
        optimizer.step()
        optimizer.zero_grad()
        searches.append(engine._runtime.gatherer.kept.searches)
    assert 0 < searches[0] <= 4  # kinds of units, forward and backward
    assert searches[0] == searches[-1]


def test_views_that_only_a_graph_needs_keep_no_memory(offload: MakeEngine) -> None:
    """Python has objects for them, which the graph keeps alive: they are told from what code holds."""

    class Multiplied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(30, 30) / 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight.t() * self.weight[0].view(1, -1))

    model = build(lambda: nn.Sequential(*(Multiplied() for _ in range(3))))
    engine = offload(model, unit_classes=["Multiplied"], resident_threshold=0)
    for _ in range(2):
        loss = model(torch.randn(4, 30)).sum()
        nothing_gathered(engine)
        loss.backward(retain_graph=True)
        nothing_gathered(engine)
        loss.backward()
        nothing_gathered(engine)


@pytest.mark.parametrize("reentrant", [False, True])
def test_view_kept_from_a_checkpointed_forward(offload: MakeEngine, *, reentrant: bool) -> None:
    """The forward that is run again in the backward keeps another one."""

    class Checkpointed(Remembers):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self._run, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

        def _run(self, x: Tensor) -> Tensor:
            self.last = []
            return super().forward(x)

    models: dict[str, nn.Module] = {"plain": build(Checkpointed), "ours": build(Checkpointed)}
    offload(models["ours"], unit_classes=["Linear"], resident_threshold=0)
    _train_alike(models, steps=3)


def test_detached_values_in_a_graph_keep_no_memory(offload: MakeEngine) -> None:
    """What only the graph holds goes with the unit, as ever: the backward brings it back."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for line in self.lines:
                x = line(x) * line.weight.detach()[0]  # type: ignore[operator,union-attr,index]
            return x

    model, plain = build(Scaled), build(Scaled)
    engine = offload(model, schedule="synchronous")
    x = torch.randn(4, 30)
    loss = model(x).sum()
    nothing_gathered(engine)
    loss.backward()
    plain(x).sum().backward()
    assert torch.equal(model.get_parameter("lines.1.weight").grad, plain.get_parameter("lines.1.weight").grad)  # type: ignore[arg-type]


def test_an_evaluation_beside_a_waiting_graph_keeps_nothing(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    loss = loss_of(model, batch(0))
    with torch.no_grad():
        model(batch(1))
    nothing_gathered(engine)
    loss.backward()  # type: ignore[no-untyped-call]


def test_kept_views_outlive_the_engine(offload: MakeEngine) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model)
    kept = _keep(model, TAKES["detach"])
    with torch.no_grad():
        model(batch(0))
    engine.close()
    assert torch.equal(kept[0], _weight(plain))


@pytest.mark.skipif(
    not holders_are_told_apart(), reason="this torch does not tell tensors that code holds from those of a graph"
)
def test_holders_are_told_apart() -> None:
    weight = torch.ones(3)
    assert is_held_by_code(weight) is False  # nobody but the one who asks
    other = weight
    assert is_held_by_code(weight)
    graph = torch.ones(3, requires_grad=True) * weight
    del other
    assert not is_held_by_code(weight)
    assert graph.requires_grad


@pytest.fixture
def nobody_has_asked() -> Iterator[None]:
    """How holders are told apart is found out once in a process, when it is first asked."""
    holders_are_told_apart.cache_clear()
    yield
    holders_are_told_apart.cache_clear()


@pytest.mark.usefixtures("nobody_has_asked")
def test_finding_out_who_holds_a_tensor_is_not_seen_by_hooks_for_saved_tensors() -> None:
    """The hooks of a checkpoint would count one tensor more than when the forward runs again."""
    elsewhere = holders_are_told_apart()
    holders_are_told_apart.cache_clear()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.device("meta"):
        here = holders_are_told_apart()
    assert here is elsewhere
    assert not packed


@pytest.mark.usefixtures("nobody_has_asked")
def test_the_first_kept_view_is_from_a_checkpointed_forward(offload: MakeEngine) -> None:
    model, plain = (build(partial(Net, checkpointing="nested")) for _ in range(2))
    offload(model)
    for each in (model, plain):
        kept = _keep(each, TAKES["row of detach"])
        loss_of(each, batch(0)).backward()  # type: ignore[no-untyped-call]
        assert kept
    assert torch.equal(kept[0], TAKES["row of detach"](_weight(plain)))


def test_what_refers_to_a_tensor() -> None:
    """What is asked in a backward, and always with older versions of torch."""
    weight = torch.ones(3)
    graph = torch.ones(3, requires_grad=True) * weight
    assert not are_referred_to([weight])
    module = nn.Module()
    module.kept = weight
    assert are_referred_to([weight])
    module.kept = [weight]
    assert are_referred_to([weight])
    del module.kept
    assert not are_referred_to([weight])
    assert graph.requires_grad


class Lines(nn.Module):
    """Its input needs no gradient, so the graph saves nothing of the first weight, and a view of every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = torch.tanh(line(x))
        return x.square().sum()


@pytest.mark.parametrize("number", [0, 1])
def test_a_kept_view_in_place_of_one_that_a_graph_saves(offload: MakeEngine, number: int) -> None:
    """The memory of a weight and the weight are used as often as where a unit that is alike has a graph alone."""
    models: dict[str, nn.Module] = {"plain": build(Lines), "ours": build(Lines)}
    offload(models["ours"], unit_classes=["Linear"], resident_threshold=0)
    optimizers = _optimizers(models)
    kept: dict[str, list[Tensor]] = {name: [] for name in models}
    for name, model in models.items():

        def hook(module: nn.Module, args: Any, output: Any, views: list[Tensor] = kept[name]) -> None:
            views[:] = [module.weight.t()] if step % 2 else []

        model.get_submodule(f"lines.{number}").register_forward_hook(hook)
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    for step in range(4):  # what is looked at now and then, such as for a log
        losses = [model(x) for model in models.values()]
        assert [len(views) for views in kept.values()] == [step % 2] * 2
        assert all(view.untyped_storage().nbytes() for view in kept["ours"])  # else reading it ends the process
        for ours, plain in zip(kept["ours"], kept["plain"], strict=True):
            assert torch.equal(ours, plain)
        for loss, optimizer in zip(losses, optimizers.values(), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class Scaled(nn.Module):
    """Multiplies by a part of its weight, which the graph saves; when it is told so it keeps that very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(31, 30))
        self.keeps = False
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        part = self.weight[1]
        self.last = part if self.keeps else None
        return x * part


class ScaledTwice(nn.Module):
    """`reentrant`: the kind of checkpoint that it uses, if any."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scaled() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return x.square().sum()

    def keep(self, keeps: bool) -> None:
        for part in self.parts:
            part.keeps = keeps

    def kept(self) -> list[Tensor]:
        last = [part.last for part in self.parts if part.last is not None]
        assert all(one.untyped_storage().nbytes() for one in last)  # else reading it ends the process
        return last


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_kept_view_that_the_graph_saves_too(offload: MakeEngine, reentrant: bool | None) -> None:
    """It changes no count: the graph holds the same tensor in the steps in which code does not."""
    models = {name: build(lambda: ScaledTwice(reentrant)) for name in ("plain", "ours")}
    offload(models["ours"], unit_classes=["Scaled"], resident_threshold=0)
    optimizers = _optimizers(models)

    def compare() -> None:
        ours, plain = models["ours"].kept(), models["plain"].kept()
        assert len(ours) == len(plain) == 2 * (step % 3 == 2)
        assert all(map(torch.equal, ours, plain))

    for step in range(6):
        losses = []
        for model in models.values():
            model.keep(step % 3 == 2)
            losses.append(model(torch.ones(4, 30, requires_grad=True)))
        compare()
        for loss in losses:
            loss.backward()
        compare()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        compare()
