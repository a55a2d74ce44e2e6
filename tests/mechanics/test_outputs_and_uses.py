"""What a module does with its outputs and its parameters: in-place changes, views, use by siblings, compilation."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import BOTH, nothing_gathered, same
from tests.zoo import Block, Net, batch, build, loss_of, one_step


class ViewOut(nn.Module):
    """Returns a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(37, 37)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x).view(-1, 37)
        return y.view(x.shape)


class InPlace(Net):
    """Changes the outputs of its units in place, plain ones and views."""

    def __init__(self) -> None:
        super().__init__()
        self.views = nn.ModuleList(ViewOut() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, view in zip(self.blocks, self.views, strict=False):
            x = block(x)
            x += 1
            x = view(x)
            x *= 0.5
            x[..., 0] = 0
        out: Tensor = self.head(x)
        return out.div_(3)


class Sibling(nn.Module):
    """Reads a parameter of a module that has run long before, and of one that has not run."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Linear(37, 29)
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.gain.weight.mean()
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else self._checkpointed(block, x)
        out: Tensor = functional.linear(x, self.embed.weight) + self.gain(x)
        return out

    def _checkpointed(self, block: nn.Module, x: Tensor) -> Any:
        return checkpoint(self._scaled, block, x, use_reentrant=self.checkpointing)

    def _scaled(self, block: nn.Module, x: Tensor) -> Any:
        return block(x) @ self.gain.weight.T @ self.gain.weight * 0.1


class Skip(Net):
    """Units that are never called."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[2](self.embed(ids)))
        return out


@dataclass
class Parts:
    """Not a container that torch knows."""

    first: Tensor
    second: Tensor


class Structured(nn.Module):
    """Units that take and give tuples, dicts, keywords and None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.pairs = nn.ModuleList(Pair() for _ in range(3))
        self.head = nn.Linear(37, 29)

    def forward(self, ids: Tensor) -> Tensor:
        state: dict[str, Any] = {"left": self.embed(ids), "right": None}
        for pair in self.pairs:
            state = pair(**state)
        out: Tensor = self.head(state["left"] + state["right"].sum(-1, keepdim=True))
        return out


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(37, 37), nn.Linear(37, 37)

    def forward(self, *, left: Tensor, right: Tensor | None) -> dict[str, Tensor | None]:
        right = left if right is None else right
        return {"left": left + self.a(right), "right": self.b(right).relu()}


class Accumulating(nn.Module):
    """A unit that adds to an input that needed no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.adders = nn.ModuleList(Adder() for _ in range(3))

    def forward(self, ids: Tensor) -> Any:
        total = torch.zeros(*ids.shape, 29)
        total[..., 0] = 1
        return self.adders[2](self.adders[1](self.adders[0](total), total.detach().clone()), total.detach().clone())


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(29, 29)

    def forward(self, total: Tensor, more: Tensor | None = None) -> Tensor:
        if more is not None:
            more += self.line(total)
            return more
        total += self.line(total.clone())
        return total


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [one_step(model, optimizer, step) for step in range(4)]


@BOTH
@pytest.mark.parametrize("make", [InPlace, Sibling, Skip, Structured, Accumulating])
def test_models(offload: MakeEngine, schedule: str, make: type[nn.Module]) -> None:
    same(offload, make, _steps, schedule=schedule)


@BOTH
@pytest.mark.parametrize("reentrant", [True, False])
def test_use_by_a_sibling_in_a_recomputation(offload: MakeEngine, schedule: str, reentrant: bool) -> None:
    same(offload, lambda: Sibling(reentrant), _steps, schedule=schedule)


@pytest.mark.parametrize("reentrant", [True, False])
def test_use_by_a_sibling_where_gradients_spill(offload: MakeEngine, reentrant: bool) -> None:
    """A gradient that was read back too early must not keep the memory that the next one needs."""
    same(offload, lambda: Sibling(reentrant), _steps, schedule="synchronous", host={"budget": "288KiB"})


class Views(nn.Module):
    """Reads the weight of a module that never runs: through a view, and again when it is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.idle = nn.Linear(37, 29, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        first = x @ self.idle.weight.T
        second = functional.linear(x.tanh(), self.idle.weight)
        return first + second + (x * self.idle.weight[3]).sum()


@BOTH
def test_views_and_second_uses_of_what_never_runs(offload: MakeEngine, schedule: str) -> None:
    same(offload, Views, _steps, schedule=schedule)


@pytest.mark.parametrize("make", [Sibling, Views])
def test_what_is_gathered_on_use_is_released_between(offload: MakeEngine, make: type[nn.Module]) -> None:
    """It has no memory between forward and backward, nor after that, without which the backward would find garbage."""
    model = build(make)
    engine = offload(model, schedule="synchronous")
    infinity.AdamW(model.parameters())
    for step in range(2):
        loss = loss_of(model, batch(step))
        nothing_gathered(engine)
        loss.backward()  # type: ignore[no-untyped-call]
        nothing_gathered(engine)


def test_use_by_a_sibling_in_evaluation(offload: MakeEngine) -> None:
    model = build(Sibling)
    engine = offload(model)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), build(Sibling)(batch(0)))
    nothing_gathered(engine)


class InPlaceInput(Net):
    """Its units change their inputs in place, with and without a graph behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Starts() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * 2
        for block in self.blocks:
            x = block(x) + 1
        out: Tensor = self.head(x)
        return out


class Starts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(37, 37)

    def forward(self, x: Tensor) -> Any:
        return self.line(x.relu_())


@BOTH
def test_an_input_changed_in_place(offload: MakeEngine, schedule: str) -> None:
    """The hooks put nothing between an input and its unit, so what torch allows stays allowed."""
    same(offload, InPlaceInput, _steps, schedule=schedule)


class Hidden:
    """A container that nobody can look into."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


class Containing(nn.Module):
    """Units that return a container of their own."""

    def __init__(self, container: type[Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.layers = nn.ModuleList(Layer(container) for _ in range(2))
        self.head = nn.Linear(37, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            parts = layer(x)
            x = parts.first + parts.second
        out: Tensor = self.head(x)
        return out


class Layer(nn.Module):
    def __init__(self, container: type[Any]) -> None:
        super().__init__()
        self.line = nn.Linear(37, 37)
        self.container = container

    def forward(self, x: Tensor) -> Any:
        return self.container(self.line(x), x)


@BOTH
def test_dataclasses_are_looked_into(offload: MakeEngine, schedule: str) -> None:
    same(offload, lambda: Containing(Parts), _steps, schedule=schedule)


@BOTH
def test_passing_an_input_through_gathers_nothing(offload: MakeEngine, schedule: str) -> None:
    """The node behind an input that is returned runs after the unit is released."""
    engine = same(offload, lambda: Containing(Parts), _steps, schedule=schedule, host={"budget": "64MiB"})
    assert engine._runtime.gatherer.gathers == 4 * 2 * 4 + 7  # units, both ways, steps; 7 parameters to compare


def test_hidden_outputs_are_refused(offload: MakeEngine) -> None:
    model = build(lambda: Containing(Hidden))
    engine = offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'layers\.0' returns a Hidden.*register_pytree_node"):
        model(batch(0))
    with torch.no_grad():
        assert torch.equal(model(batch(0)), build(lambda: Containing(Hidden))(batch(0)))
    nothing_gathered(engine)


OUTSIDE: dict[str, Callable[[nn.Module], object]] = {
    "clone": lambda m: m.get_parameter("head.weight").clone(),
    "linear": lambda m: functional.linear(torch.randn(2, 37), m.get_parameter("head.weight")),
    "zeros_": lambda m: nn.init.zeros_(m.get_parameter("head.weight")),
    "tolist": lambda m: m.get_parameter("head.weight").tolist(),
    "numpy": lambda m: m.get_parameter("head.weight").detach().numpy(),
    "item": lambda m: m.get_parameter("head.weight")[0, 0].item(),
    "deepcopy of a parameter": lambda m: copy.deepcopy(m.get_parameter("head.weight")),
    "from_dlpack": lambda m: torch.from_dlpack(m.get_parameter("head.weight")),
    "asarray": lambda m: np.asarray(m.get_parameter("head.weight")),
    "pickle": lambda m: pickle.dumps(m.get_parameter("head.weight")),
    "torch.save": lambda m: torch.save(m.get_parameter("head.weight"), io.BytesIO()),
    "copy": lambda m: copy.copy(m.get_parameter("head.weight")),
    "data_ptr": lambda m: m.get_parameter("head.weight").data_ptr(),
    "untyped_storage": lambda m: m.get_parameter("head.weight").untyped_storage(),
    "share_memory_": lambda m: m.get_parameter("head.weight").share_memory_(),
    "pin_memory": lambda m: m.get_parameter("head.weight").pin_memory(),
    "view of another dtype": lambda m: m.get_parameter("head.weight").view(torch.int32),
    "print": lambda m: m.get_parameter("head.weight") + 0,
    "data": lambda m: m.get_parameter("head.weight").data.sum(),
}


@pytest.mark.parametrize("operation", OUTSIDE)
def test_refused_outside_a_forward(offload: MakeEngine, operation: str) -> None:
    model = build(Net)
    offload(model, schedule="overlapped")
    optimizer = infinity.AdamW(model.parameters())
    with pytest.raises(infinity.NotGatheredError, match=r"'(head|embed)\.weight'.*infinity\.gathered\(module\)"):
        OUTSIDE[operation](model)
    one_step(model, optimizer, 0)
    with pytest.raises(infinity.NotGatheredError):
        OUTSIDE[operation](model)


def test_memory_that_is_not_there_is_not_handed_out(offload: MakeEngine) -> None:
    """`to_dlpack` asks no class; reading what it gave ended the process."""
    model = build(Net)
    offload(model)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(model.get_parameter("head.weight"))
    with infinity.gathered(model):
        head = model.get_parameter("head.weight").detach()
        assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(head)), head)
    one_step(model, infinity.AdamW(model.parameters()), 0)


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "dtype": lambda m: m.to(torch.float64),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float64),
    "device": lambda m: m.to("meta"),
    "cuda": lambda m: m.cuda(),
    "both": lambda m: m.to(device="cpu", dtype=torch.bfloat16),
    "data": lambda m: setattr(m.get_parameter("embed.weight"), "data", torch.zeros(29, 37)),
}


@pytest.mark.parametrize("threshold", ["1KiB", "1MiB"])  # all but a few parameters are released, or none is
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_are_refused(offload: MakeEngine, conversion: str, threshold: str) -> None:
    model = build(Net)
    offload(model, resident_threshold=threshold, host={"budget": "4MiB"})
    expected = loss_of(model, batch(0)).item()
    if conversion == "cuda" and not torch.cuda.is_available():
        with pytest.raises((infinity.UnsupportedModelError, AssertionError, RuntimeError)):
            model.cuda()
    elif conversion == "device" and threshold == "1MiB":
        with pytest.raises(infinity.UnsupportedModelError, match="cannot become meta"):
            model.to("meta")  # torch has made a new parameter of a resident one by then, which the next forward finds
        with pytest.raises(infinity.UnsupportedModelError, match=r"in the place of offloaded parameter"):
            model(batch(0))
        return
    else:
        with pytest.raises(infinity.UnsupportedModelError, match=r"offloaded.*infinity\.Config"):
            CONVERSIONS[conversion](model)
    assert loss_of(model, batch(0)).item() == expected


@pytest.mark.parametrize("threshold", ["1KiB", "1MiB"])
def test_conversions_that_change_nothing_do_nothing(offload: MakeEngine, threshold: str) -> None:
    model = build(Net)
    offload(model, resident_threshold=threshold, schedule="synchronous", host={"budget": "4MiB"})
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before = list(model.parameters())
    assert model.to("cpu").to(torch.float32).float().cpu().to(device=torch.device("cpu")) is model
    assert model.type(torch.float32) is model
    assert {parameter.type() for parameter in model.parameters()} == {"torch.FloatTensor"}
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True) if p.grad is not None)
    assert loss_of(model, batch(1)).item() == loss_of(build(Net), batch(1)).item()


def test_state_dict_and_deepcopy_are_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.NotGatheredError, match=r"embed\.weight"):
        model.state_dict()
    for module in (model, model.get_submodule("blocks.0")):
        with pytest.raises(infinity.NotGatheredError, match="neither be deep-copied nor pickled"):
            copy.deepcopy(module)


# Dynamo asks every input for its gradient, which warns.
DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@DYNAMO
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_units(offload: MakeEngine, when: str, fullgraph: bool) -> None:
    def compile_blocks(model: Any) -> None:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=fullgraph)

    plain = build(Net)
    compile_blocks(plain)
    expected = _steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    model = build(Net)
    if when == "before":
        compile_blocks(model)
    engine = offload(model, schedule="overlapped")
    if when == "after":
        compile_blocks(model)
    assert _steps(model, infinity.AdamW(model.parameters(), lr=1e-2)) == expected
    nothing_gathered(engine)
    torch._dynamo.reset()


@DYNAMO
def test_compiled_model(offload: MakeEngine) -> None:
    torch._dynamo.reset()
    plain = build(Net)
    expected = [one_step(plain, torch.optim.AdamW(plain.parameters(), lr=0.0, fused=True), step) for step in range(2)]
    model = build(Net)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters(), lr=0.0)
    compiled = torch.compile(model, backend="aot_eager")
    losses = []
    for step in range(2):
        loss = loss_of(compiled, batch(step))  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-5)
    nothing_gathered(engine)
    torch._dynamo.reset()


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(37, 37), nn.Linear(37, 37), nn.Linear(37, 37)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return self.a(x) * self.b(x) + self.c(x) * self.b(memory) + self.a(memory)


class Remembering(Net):
    """Units use an input several times, which is used outside and by other units too, as in an encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ModuleList(Several() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = memory = self.embed(ids)
        for several in self.several:
            x = x + several(x, memory)
        out: Tensor = self.head(x)
        return out


@BOTH
def test_gradients_of_an_input_used_several_times_are_added_in_plain_order(offload: MakeEngine, schedule: str) -> None:
    """A sum that is grouped otherwise differs in the last bit: the hooks must not group what comes out of a unit."""
    same(offload, Remembering, _steps, schedule=schedule)


class Branches(nn.Module):
    """All units read the same tensor, so that the node behind it runs after the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.branches = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(37, 29)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head(torch.stack([branch(x) for branch in self.branches]).sum(0))
        return out


@BOTH
def test_units_beside_each_other_are_released_one_by_one(offload: MakeEngine, schedule: str) -> None:
    engine = same(offload, Branches, _steps, schedule=schedule)
    block = next(u for u in engine._runtime.units if u.name == "branches.0").groups[0].flat_nbytes
    resident = sum(group.flat_nbytes for group in engine._runtime.resident_groups)
    # A unit, its gradient, and one on its way down.
    assert engine.metrics()["device/peak_bytes"] <= 3 * block + 2 * resident
