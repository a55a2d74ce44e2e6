"""Partition into units: repeated blocks, large owners, what is left, and parameters that several modules share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.units import UnitSpec, find_parameters, partition

KIB = 1024


class Block(nn.Module):
    """A block of two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class OtherBlock(Block):
    """The same, of another class."""


class Net(nn.Module):
    """Children by name, and parameters of the root."""

    def __init__(self, parameters: dict[str, nn.Parameter] | None = None, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        for name, parameter in (parameters or {}).items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def split(model: nn.Module, threshold: int = 64 * KIB, **options: object) -> list[UnitSpec]:
    return partition(model, resident_threshold_nbytes=threshold, **options)  # type: ignore[arg-type]


def names(specs: list[UnitSpec]) -> list[str]:
    return ["resident" if spec.resident else spec.name for spec in specs]


def own(spec: UnitSpec) -> list[str]:
    return [entry.name for entry in spec.own]


def borrowed(spec: UnitSpec) -> list[str]:
    return [entry.name for entry in spec.borrowed]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (nn.ModuleList([Block(), Block(), Block()]), ["blocks.0", "blocks.1", "blocks.2"]),
        (nn.Sequential(Block(), Block()), ["blocks.0", "blocks.1"]),
        (nn.ModuleDict({"a": Block(), "b": Block()}), ["blocks.a", "blocks.b"]),
        (nn.ModuleList([Block(), OtherBlock(), Block()]), ["blocks.0", "blocks.2"]),
        (nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])]), ["blocks.0.0", "blocks.0.1"]),
        (nn.ModuleList([nn.Sequential(Block(), nn.ReLU(), Block())]), ["blocks.0.0", "blocks.0.2"]),
        (nn.Sequential(nn.ReLU(), nn.ReLU(), Block(), Block()), ["blocks.2", "blocks.3"]),
    ],
    ids=["list", "sequential", "dict", "mixed", "nested-lists", "sequential-in-list", "activations"],
)
def test_repeated_blocks_are_units(container: nn.Module, expected: list[str]) -> None:
    specs = split(Net(blocks=container, norm=nn.LayerNorm(8)))
    assert [spec.name for spec in specs if not spec.resident] == expected
    assert specs[-1].resident
    assert own(specs[-1])[-2:] == ["norm.weight", "norm.bias"]


def test_blocks_inside_blocks_belong_to_the_outer_one() -> None:
    experts = [Net(router=nn.Linear(4, 4), experts=nn.ModuleList([Block(), Block()])) for _ in range(2)]
    specs = split(nn.ModuleList(experts))
    assert names(specs) == ["0", "1"]
    assert len(own(specs[0])) == 2 + 2 * 4


def test_two_stacks_as_in_an_encoder_and_decoder() -> None:
    shared = nn.Embedding(512, 64)
    head = nn.Linear(64, 512, bias=False)
    head.weight = shared.weight
    encoder = Net(embed=shared, block=nn.ModuleList([Block(), Block()]), norm=nn.LayerNorm(8))
    decoder = Net(embed=shared, block=nn.ModuleList([OtherBlock(), OtherBlock()]), norm=nn.LayerNorm(8))
    specs = split(Net(shared=shared, encoder=encoder, decoder=decoder, head=head))
    assert names(specs) == [
        *("shared", "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1", "head", "resident")
    ]
    assert own(specs[0]) == ["shared.weight"]
    assert (own(specs[5]), borrowed(specs[5])) == ([], ["shared.weight"])
    assert len(specs[0].own[0].owners) == 2  # the embedding is one module under three names; the head is the other
    assert own(specs[6]) == [f"{side}.norm.{name}" for side in ("encoder", "decoder") for name in ("weight", "bias")]


def test_a_single_large_layer_is_one_unit() -> None:
    model = nn.Linear(256, 256)
    (spec,) = split(model)
    assert (spec.name, spec.module, spec.resident) == ("", model, False)
    assert own(spec) == ["weight", "bias"]


def test_a_single_small_layer_stays_on_the_device() -> None:
    (spec,) = split(nn.Linear(4, 4))
    assert spec.resident


def test_a_large_parameter_of_the_root_takes_the_rest_of_the_model_with_it() -> None:
    table = nn.Parameter(torch.zeros(256, 256))
    model = Net({"table": table}, blocks=nn.ModuleList([Block(), Block()]), norm=nn.LayerNorm(8))
    specs = split(model)
    assert names(specs) == ["", "blocks.0", "blocks.1"]
    assert own(specs[0]) == ["table", "norm.weight", "norm.bias"]


def test_a_large_owner_takes_its_subtree_but_no_unit_of_its_own_inside() -> None:
    big = Net(
        {"table": nn.Parameter(torch.zeros(256, 256))}, wide=nn.Linear(256, 256), tower=nn.Sequential(Block(), Block())
    )
    specs = split(Net(big=big))
    assert names(specs) == ["big", "big.tower.0", "big.tower.1"]
    assert own(specs[0]) == ["big.table", "big.wide.weight", "big.wide.bias"]


def test_a_list_of_parameters_belongs_to_the_module_that_is_called() -> None:
    tables = nn.ParameterList([nn.Parameter(torch.zeros(128, 128)), nn.Parameter(torch.zeros(128, 128))])
    specs = split(Net(part=Net(tables=tables), other=Net(tables=nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}))))
    assert names(specs) == ["part", "resident"]
    assert own(specs[0]) == ["part.tables.0", "part.tables.1"]


def test_a_class_that_is_never_called_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'blocks' of that class has no forward"):
        split(Net(blocks=nn.ModuleList([Block()])), unit_classes=["ModuleList"])


def test_the_threshold_is_the_smallest_size_that_streams() -> None:
    layer = nn.Linear(16, 16, bias=False)
    nbytes = 16 * 16 * 4
    assert not split(Net(layer=layer), threshold=nbytes)[0].resident
    assert split(Net(layer=layer), threshold=nbytes + 1)[0].resident


def test_one_module_used_several_times_is_one_unit() -> None:
    block = Block(64)
    specs = split(nn.ModuleList([block, block, block]))
    assert sum(len(spec.own) for spec in specs) == 4
    assert all(not spec.borrowed for spec in specs)


def test_a_module_in_two_stacks_is_one_unit() -> None:
    first, second = Block(), Block()
    specs = split(Net(there=nn.ModuleList([first, second]), back=nn.ModuleList([second, first])))
    assert names(specs) == ["there.0", "there.1"]
    assert all(not spec.borrowed for spec in specs)


def test_a_parameter_tied_between_blocks_is_owned_by_the_first() -> None:
    blocks = [Block(), Block(), Block()]
    blocks[1].up.weight = blocks[2].up.weight = blocks[0].up.weight
    specs = split(nn.ModuleList(blocks))
    assert "0.up.weight" in own(specs[0])
    assert borrowed(specs[1]) == borrowed(specs[2]) == ["0.up.weight"]
    assert len(specs[0].own[0].owners) == 3


@pytest.mark.parametrize("wanted", ["OtherBlock", OtherBlock], ids=["name", "class"])
def test_classes_decide_what_a_block_is(wanted: str | type[nn.Module]) -> None:
    model = Net(blocks=nn.ModuleList([Block(), OtherBlock(), Block()]), last=OtherBlock())
    specs = split(model, unit_classes=[wanted])
    assert names(specs) == ["blocks.1", "last", "resident"]


def test_a_class_matches_its_subclasses_and_a_name_does_not() -> None:
    model = nn.ModuleList([Block(), OtherBlock()])
    assert names(split(model, unit_classes=[Block])) == ["0", "1"]
    assert names(split(model, unit_classes=["Block"])) == ["0", "resident"]


def test_the_model_itself_may_be_the_block() -> None:
    for wanted in (Block, "Block"):
        (spec,) = split(Block(), unit_classes=[wanted])
        assert (spec.name, spec.resident) == ("", False)


def test_a_class_that_is_nowhere_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="unit_classes names Blok, Linear"):
        split(nn.ModuleList([nn.LayerNorm(2)]), unit_classes=["Blok", nn.Linear])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net(lazy=nn.LazyLinear(3)), "'lazy.weight' is lazy"),
        (lambda: Net({"z": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}), "'z' is sparse or complex"),
        (lambda: Net({"s": nn.Parameter(torch.eye(2).to_sparse())}), "'s' is sparse or complex"),
        (lambda: Net({"u": Special(torch.zeros(1))}), "'u' is a Special;"),
    ],
    ids=["lazy", "complex", "sparse", "subclass"],
)
def test_parameters_that_cannot_be_laid_out_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        split(make())


class Special(nn.Parameter):
    """A parameter of another class."""


def test_models_without_parameters_have_no_units() -> None:
    assert split(nn.Sequential(nn.ReLU(), nn.Dropout())) == []


def test_every_owner_of_a_parameter_is_known() -> None:
    model = Net(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    model.b.weight = model.a.weight
    entries = find_parameters(model)
    assert [entry.name for entry in entries] == ["a.weight", "a.bias", "b.bias"]
    assert entries[0].owners == [(model.a, "weight"), (model.b, "weight")]


# Any model ---------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """A random model: containers, shared modules, tied weights, parameters anywhere."""
    pool: list[nn.Module] = []

    def make(depth: int) -> nn.Module:
        kinds = ["linear", "block", "none"] + (["list", "dict", "sequential", "net"] * 2 if depth else [])
        kind = draw(st.sampled_from(kinds + (["again"] if pool else [])))
        if kind == "again":
            return draw(st.sampled_from(pool))
        if kind in ("linear", "block", "none"):
            module: nn.Module = {"linear": lambda: nn.Linear(4, 4), "block": Block, "none": nn.ReLU}[kind]()
        else:
            children = [make(depth - 1) for _ in range(draw(st.integers(0, 3)))]
            named = {f"c{number}": child for number, child in enumerate(children)}
            if kind == "list":
                module = nn.ModuleList(children)
            elif kind == "sequential":
                module = nn.Sequential(*children)
            elif kind == "dict":
                module = nn.ModuleDict(named)
            else:
                module = Net({"p": nn.Parameter(torch.zeros(draw(st.integers(1, 40))))}, **named)
        pool.append(module)
        return module

    root = Net(top=make(3), other=make(2))
    linears = [module for module in root.modules() if isinstance(module, nn.Linear) and module.in_features == 4]
    if len(linears) > 1 and draw(st.booleans()):
        linears[-1].weight = linears[0].weight
    return root


@given(trees(), st.sampled_from([1, 64, 100, 1 << 20]))
def test_any_model_is_partitioned(model: nn.Module, threshold: int) -> None:
    specs = split(model, threshold)
    owned = [id(entry.parameter) for spec in specs for entry in spec.own]
    assert sorted(owned) == sorted(id(parameter) for parameter in model.parameters())
    assert len({id(spec.module) for spec in specs if not spec.resident}) == sum(not spec.resident for spec in specs)
    assert all(not spec.resident for spec in specs[:-1])
    before: set[int] = set()
    for spec in specs:
        own_ids = {id(entry.parameter) for entry in spec.own}
        borrowed_ids = {id(entry.parameter) for entry in spec.borrowed}
        assert borrowed_ids <= before
        inside = {id(parameter) for parameter in spec.module.parameters()}
        assert own_ids | borrowed_ids <= inside
        before |= own_ids
    order = {id(module): number for number, module in enumerate(model.modules())}
    places = [order[id(spec.module)] for spec in specs if not spec.resident]
    assert places == sorted(places)
    assert [(s.name, own(s)) for s in specs] == [(s.name, own(s)) for s in split(model, threshold)]


@given(trees())
def test_every_module_that_may_run_finds_its_parameters_gathered(model: nn.Module) -> None:
    """Each parameter that a module owns belongs to a unit around that module, or to the resident one."""
    specs = split(model, 1)
    for module in model.modules():
        for parameter in module._parameters.values():
            around = [spec for spec in specs if any(part is module for part in spec.module.modules())]
            held = {id(entry.parameter) for spec in around for entry in (*spec.own, *spec.borrowed)}
            assert id(parameter) in held
