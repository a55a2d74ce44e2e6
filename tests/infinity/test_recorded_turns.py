"""Initialising at the end of a constructor takes memory for a part of the model, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import recorded_init
from infinity.devices.cpu import CpuDevice
from infinity.errors import PlacementError
from infinity.grouping import make_groups
from infinity.groups import ALONE, FlatGroup, Unit
from infinity.init import staging_nbytes
from infinity.materialise import FirstValues
from infinity.optim.kernels import kernel_for
from infinity.recorded_init import RecordedValues
from infinity.recording import turns
from infinity.recording.plan import Numbers
from infinity.units import partition
from tests.conftest import MakeEngine
from tests.infinity.recorded import different, empty

WIDTH = 192
BLOCKS = 12


class Block(nn.Module):
    """Four weights of one size, of which constructors initialise some parts and what comes at the end others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.proj(self.norm(x)) + x
        return hidden + self.drop(self.down(self.up(hidden).relu()))


class Blocks(nn.Module):
    """What the others begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def each(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _init_weight(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class Apply(Blocks):
    """Biases are drawn by the constructors, and weights at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(_init_weight)


class Zeros(Blocks):
    """Nothing is drawn at the end."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.each():
            nn.init.zeros_(block.proj.bias)


class Gpt(Blocks):
    """Embedding and norms keep what constructors gave them; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, WIDTH)
        self.head = nn.Linear(WIDTH, 61, bias=False)
        self.head.weight = self.embed.weight
        self.apply(_init_linear)
        for block in self.each():
            block.down.weight.data.mul_(0.5)


class OwnGenerator(Blocks):
    """Two generators, of which one is used in two passes over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            for block in self.each():
                nn.init.normal_(block.proj.weight[: WIDTH // 2], generator=generator)
                nn.init.uniform_(block.up.bias[3:7])


class Reseeding(Blocks):
    """Seeds in between, and goes back to a state that it has been in."""

    def __init__(self) -> None:
        super().__init__()
        state = torch.get_rng_state()
        for number, block in enumerate(self.each()):
            if number % 3 == 0:
                torch.manual_seed(number)
            nn.init.normal_(block.up.weight)
        torch.set_rng_state(state)
        for block in self.each():
            nn.init.uniform_(block.down.weight[1:])


class Small(Blocks):
    """Fewer than 16 numbers are drawn in another way than more, and an odd number of them leaves one behind."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.each():
            nn.init.normal_(block.norm.weight[:7])
            nn.init.normal_(block.proj.weight)
            block.up.bias.data[:5].random_(0, 9)
            block.down.bias.data.copy_(torch.randn(WIDTH) * 0.1)


class Teacher(nn.Module):
    """A copy of a model, block by block or by a dictionary of all, that was initialised at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Apply(), Blocks()
        for mine, theirs in zip(self.student.each(), self.teacher.each(), strict=True):
            theirs.load_state_dict(mine.state_dict())
            with torch.no_grad():
                mine.proj.weight.copy_(theirs.up.weight[:WIDTH])  # read before it was changed, and after
        self.student.apply(_init_weight)


class Scaled(Blocks):
    """All blocks read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.rand(WIDTH)
        for block in self.each():
            block.proj.weight.data.mul_(scale)
        self.apply(lambda module: nn.init.uniform_(module.weight) if isinstance(module, nn.LayerNorm) else None)


class Held(Blocks):
    """Buffers without memory and with it, of which the numbers are drawn between those of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH, device="cpu"))
        for block in self.each():
            block.register_buffer("mask", torch.rand(WIDTH))
            nn.init.normal_(block.proj.weight)
        for block in self.each():
            block.norm.weight.data.copy_(block.get_buffer("mask"))


class Pairs(Blocks):
    """Every block reads the one before it, twice."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(2):
            for one, other in zip(self.each(), self.each()[1:], strict=False):
                with torch.no_grad():
                    other.proj.weight.add_(one.proj.weight)


class Centred(Blocks):
    """All depends on all, so that no order is better."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            total = torch.zeros(WIDTH, WIDTH)
            for block in self.each():
                total += block.proj.weight
            for block in self.each():
                block.proj.weight -= total / BLOCKS


class Coins(Blocks):
    """Values decide what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.each():
            block.proj.weight.data.copy_(torch.bernoulli(block.up.weight.data[:WIDTH].abs()))


def _groups(model: nn.Module) -> tuple[list[FlatGroup], list[Unit]]:
    kernel = kernel_for(infinity.Precision.FP32)
    specs = partition(model, resident_threshold_nbytes=1024)
    return make_groups(specs, infinity.Precision.FP32, kernel, CpuDevice(1 << 30), ALONE)


CHEAP = [Apply, Zeros, Gpt, OwnGenerator, Reseeding, Small, Teacher, Scaled, Held, Pairs]


@pytest.mark.parametrize("make", [*CHEAP, Centred, Coins], ids=lambda make: make.__name__)
def test_values_and_generator_are_those_of_ordinary_construction(
    offload: MakeEngine, make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(3)
    plain, after = make(), torch.get_rng_state()
    model = empty(make)
    offload(model, host={"budget": "32MiB"})
    assert different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("make", CHEAP, ids=lambda make: make.__name__)
def test_the_model_is_not_held_whole(make: Callable[[], nn.Module]) -> None:
    model = empty(make)
    groups, units = _groups(model)
    largest = max(group.layout.numel * 4 for group in groups)
    assert largest <= staging_nbytes(model, units, groups) <= 3 * largest


@pytest.mark.parametrize("make", [Apply, Zeros, Gpt], ids=lambda make: make.__name__)
def test_the_budgets_need_not_hold_the_model(offload: MakeEngine, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    plain = make()
    unit_nbytes = sum(parameter.nbytes for parameter in Block().parameters())
    model = empty(make)
    engine = offload(model, host={"budget": 4 * unit_nbytes}, device={"kind": "cpu", "budget": 4 * unit_nbytes})
    assert 0 < engine.metrics()["host/peak_bytes"] <= 4 * unit_nbytes
    assert different(model, plain) == []


@pytest.mark.parametrize(("make", "is_twice"), [(Apply, True), (Zeros, False), (Gpt, False), (Blocks, False)])
def test_numbers_are_drawn_twice_only_where_that_saves_memory(make: Callable[[], nn.Module], is_twice: bool) -> None:
    model = empty(make)
    groups, _ = _groups(model)
    steps = RecordedValues(model, groups, FirstValues()).plan.steps
    assert any(step.numbers is Numbers.PUT_BACK for step in steps) == is_twice


@pytest.mark.parametrize(("make", "planned"), [(Blocks, 0), (Zeros, 1), (Apply, 2)])
def test_other_orders_are_planned_only_where_they_could_hold_less(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], planned: int
) -> None:
    """Every order holds the largest group, and one in which numbers are drawn twice has to save half."""
    plans: list[str] = []

    def noting(plan: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            plans.append(plan.__name__)
            return plan(*arguments)

        return noted

    for plan in (turns.in_turns, turns.in_turns_drawn_twice):
        monkeypatch.setattr(recorded_init, plan.__name__, noting(plan))
    model = empty(make)
    RecordedValues(model, _groups(model)[0], FirstValues())
    assert plans == ["in_turns", "in_turns_drawn_twice"][:planned]


def test_an_initialisation_that_needs_the_whole_model_is_told(offload: MakeEngine) -> None:
    text = "initialisation of the empty model.*larger host budget.*larger device budget.*with memory.*init_fn="
    with pytest.raises(PlacementError, match=text):
        offload(empty(Centred), host={"budget": "3MiB"}, device={"kind": "cpu", "budget": "4MiB"})
    torch.manual_seed(3)
    offload(Centred(), host={"budget": "3MiB"}, device={"kind": "cpu", "budget": "4MiB"})
