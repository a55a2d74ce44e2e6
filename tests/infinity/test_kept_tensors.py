"""Tensors that constructors keep beside parameters have the values of ordinary construction, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters

WIDTH = 24


class Pair(NamedTuple):
    cosine: torch.Tensor
    sine: torch.Tensor


class Cache:
    """An object of the user's."""

    def __init__(self) -> None:
        angles = torch.outer(torch.arange(5.0), 1 / torch.arange(1.0, 4.0))
        self.pair = Pair(angles.cos(), angles.sin())
        self.itself = self


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 3)
        self.masks = [torch.ones(2, 2).tril(), (torch.arange(3), "text")]
        self.tables: dict[str, Any] = {"noise": torch.rand(4)}
        self.cache = Cache()
        self.hidden = [nn.Linear(WIDTH, 2)]  # a teacher that is not to be among the parameters
        self.workspace = torch.empty(3)  # ordinary construction leaves it undefined too
        self.alone = [nn.Parameter(torch.rand(2))]
        self.own_weight = [self.line]


def _kept(model: Any) -> list[torch.Tensor]:
    kept = [model.masks[0], model.masks[1][0], model.tables["noise"], *model.cache.pair]
    return [*kept, model.hidden[0].weight, model.hidden[0].bias, model.alone[0]]


def _empty(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    with infinity.empty_init():
        return make()


def test_what_lists_dictionaries_and_objects_hold(offload: MakeEngine) -> None:
    torch.manual_seed(3)
    plain = Keeping()
    model = _empty(Keeping)
    offload(model)
    for got, wanted in zip(_kept(model), _kept(plain), strict=True):
        assert type(got) is type(wanted)
        assert torch.equal(got, wanted)
    assert isinstance(model.cache.pair, Pair)
    assert model.workspace.device.type == "cpu"
    assert model.own_weight[0] is model.line
    assert torch.equal(gathered_parameters(model)["line.weight"], plain.line.weight)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_shares_memory_with_a_parameter_keeps_its_values(offload: MakeEngine, *, is_whole: bool) -> None:
    """As the buffer of a built model does, of which the parameter goes into shards."""

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)
            values = self.line.weight.data if is_whole else self.line.weight.data[1:, ::2].t()
            self.register_buffer("average", values)
            self.same = values

    torch.manual_seed(3)
    plain = Sharing()
    model = _empty(Sharing)
    engine = offload(model)
    torch.nn.init.zeros_(torch.empty(1 << 16))
    engine.metrics()
    assert torch.equal(model.average, plain.get_buffer("average"))
    assert model.average.stride() == plain.get_buffer("average").stride()
    assert model.same is model.average
    assert torch.equal(gathered_parameters(model)["line.weight"], plain.line.weight)


def test_numbers_drawn_in_memory_last_are_in_the_group_that_they_complete(offload: MakeEngine) -> None:
    """A group was placed at this step before the numbers were there; wav2vec 2 has such a parameter."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, 3)
            self.legacy = nn.Parameter(torch.Tensor(7).uniform_())

    torch.manual_seed(3)
    plain = Last()
    model = _empty(Last)
    offload(model)
    assert torch.equal(gathered_parameters(model)["legacy"], plain.legacy)
