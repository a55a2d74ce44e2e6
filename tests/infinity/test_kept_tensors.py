"""Tensors that constructors keep beside parameters have the values of ordinary construction, wherever they are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import infinity
from infinity import kept_tensors
from infinity.recording import origins
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


@dataclass(slots=True)
class Slots:
    """An object that has no dictionary."""

    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Slots
    unset: Any = None


class Holders(nn.Module):
    """Every kind of thing in which Python keeps other things."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 3)
        self.frozen = Frozen(Slots(torch.rand(2)))
        self.recent = deque([torch.rand(3), 1])
        self.some = {torch.rand(4)}
        self.fixed = frozenset([torch.rand(5)])
        self.shared = (torch.rand(6),)
        self.twice = [self.shared, (self.shared, self.shared)]
        self.near: Any = Cache()
        self.chain: list[Any] = [self.near]
        for _ in range(kept_tensors._MOST_DEEP - 2):  # met here first, too deep to see what is in it
            self.chain = [self.chain]

    def found(self) -> list[torch.Tensor]:
        kept = [self.frozen.inner.table, self.recent[0], *self.some, *self.fixed, *self.shared, *self.twice[0]]
        return [*kept, *self.twice[1][0], *self.near.pair]


def test_what_slots_queues_sets_and_shared_tuples_hold(offload: MakeEngine) -> None:
    torch.manual_seed(3)
    plain = Holders()
    model = _empty(Holders)
    del model.near  # and again behind what leads to it on the long way
    model.near = model.chain
    for _ in range(kept_tensors._MOST_DEEP - 1):
        model.near = model.near[0]
    offload(model)
    for got, wanted in zip(model.found(), plain.found(), strict=True):
        assert torch.equal(got, wanted)
    assert model.twice[0] is model.shared
    assert model.twice[1][0] is model.shared


class Unwilling:
    """Answers no question about itself."""

    __slots__ = ("unset",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} before the connection is open")


class Spy:
    """Sees when code of its own runs."""

    def __init__(self) -> None:
        self.questions: list[str] = []

    @property
    def __class__(self) -> Any:
        self.questions.append("__class__")
        return Spy

    @property
    def lazy(self) -> None:
        self.questions.append("lazy")


def test_no_code_of_objects_in_attributes_runs(offload: MakeEngine) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, 3)
            self.unwilling = [Unwilling()]
            self.gone = [weakref.proxy(Spy())]
            self.spy = Spy()
            self.noise = {"late": torch.rand(2)}

    model = _empty(Odd)
    model.spy.questions.clear()  # a module asks what it is given
    offload(model)
    assert not model.noise["late"].is_meta
    assert not model.spy.questions


def test_numbers_and_texts_are_not_looked_at_one_by_one(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may hold a data set; and the same tuple may be in a tuple that is in a tuple, many times each."""
    nested: Any = (1.5, "word")
    for _ in range(12):
        nested = (nested,) * 3

    class Full(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, 3)
            self.samples = [list(range(1000)), {str(number): number for number in range(1000)}, nested]
            self.noise = torch.rand(2)

    visits: list[str] = []
    really_visit = kept_tensors._Walk._visit

    def visit(walk: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        visits.append(path)
        return really_visit(walk, path, *args, **kwargs)

    monkeypatch.setattr(kept_tensors._Walk, "_visit", visit)
    model = _empty(Full)
    offload(model)
    assert not model.noise.is_meta
    assert 0 < len(visits) < 1000
    visits.clear()
    monkeypatch.setattr(origins, "_ORIGINS", weakref.WeakKeyDictionary())
    offload(Full())
    assert not visits  # of what has memory nothing is wanted
