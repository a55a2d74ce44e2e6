"""Partition into units: every parameter is in exactly one, and each is gathered by everyone who may read it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.units import RESIDENT_NAME, Parameters, UnitSpec, partition
from tests import zoo
from tests.conftest import MakeEngine

KIB = 1024


class Block(nn.Module):
    """A block of 3.2 KiB; `inner` puts repeated children into it."""

    def __init__(self, inner: int = 0) -> None:
        super().__init__()
        self.line = nn.Linear(24, 33)
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    """Holds what it is given by name."""

    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def blocks(n: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(n))


def split(model: nn.Module, threshold_nbytes: int = KIB, **settings: object) -> dict[str, UnitSpec]:
    """Units by name. Checks what holds for every partition."""
    specs = partition(model, resident_threshold_nbytes=threshold_nbytes, **settings)  # type: ignore[arg-type]
    check(model, specs)
    return {spec.name: spec for spec in specs}


def check(model: nn.Module, specs: list[UnitSpec]) -> None:
    owned = [id(entry.parameter) for spec in specs for entry in spec.own]
    assert sorted(owned) == sorted(id(parameter) for parameter in model.parameters())
    assert len({spec.name for spec in specs}) == len(specs)
    assert len({id(spec.module) for spec in specs if not spec.resident}) == len([s for s in specs if not s.resident])
    order = {id(module): number for number, module in enumerate(model.modules())}
    streamed = [spec for spec in specs if not spec.resident]
    assert [spec.resident for spec in specs] == [False] * len(streamed) + [True] * (len(specs) - len(streamed))
    assert [order[id(s.module)] for s in streamed] == sorted(order[id(s.module)] for s in streamed)
    chosen = {id(spec.module) for spec in streamed}
    for spec in streamed:
        assert model.get_submodule(spec.name) is spec.module
        assert {id(entry.parameter) for entry in spec.own + spec.borrowed} == subtree(spec.module, chosen)
        assert not {id(e.parameter) for e in spec.own} & {id(e.parameter) for e in spec.borrowed}
        assert type(spec.module).forward is not nn.Module.forward


def subtree(module: nn.Module, chosen: set[int]) -> set[int]:
    """Parameters below a module, without those of units nested in it."""
    found = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    for child in module.children():
        if id(child) not in chosen:
            found |= subtree(child, chosen)
    return found


def names(entries: list[object]) -> list[str]:
    return [entry.name for entry in entries]  # type: ignore[attr-defined]


def test_blocks_large_modules_and_the_rest() -> None:
    units = split(Model(embed=nn.Embedding(64, 24), norm=nn.LayerNorm(24), layers=blocks(3), head=nn.Linear(24, 64)))
    assert list(units) == ["embed", "layers.0", "layers.1", "layers.2", "head", RESIDENT_NAME]
    assert names(units["layers.1"].own) == ["layers.1.line.weight", "layers.1.line.bias"]
    assert names(units[RESIDENT_NAME].own) == ["norm.weight", "norm.bias"]
    assert units[RESIDENT_NAME].module.norm.weight is units[RESIDENT_NAME].own[0].parameter


@pytest.mark.parametrize(
    "container",
    [
        lambda: blocks(2),
        lambda: nn.Sequential(Block(), Block()),
        lambda: nn.ModuleDict({"first": Block(), "second": Block()}),
    ],
    ids=["list", "sequential", "dict"],
)
def test_blocks_are_found_in_every_container(container: Callable[[], nn.Module]) -> None:
    made = container()
    units = split(Model(layers=made), threshold_nbytes=KIB * KIB)
    assert list(units) == [f"layers.{name}" for name, _ in made.named_children()]


def attributes(n: int, first: int = 0) -> dict[str, Block]:
    return {f"b{number}": Block() for number in range(first, first + n)}


def test_blocks_that_are_attributes_are_found_where_they_are_most_of_the_model() -> None:
    units = split(Model(embed=nn.Embedding(8, 24), **attributes(3)), threshold_nbytes=9 * KIB)
    assert list(units) == ["b0", "b1", "b2", RESIDENT_NAME]


def test_blocks_that_are_attributes_of_a_model_with_large_parameters_of_its_own() -> None:
    model = Model(position=nn.Parameter(torch.zeros(512)), **attributes(3))
    assert list(split(model, threshold_nbytes=2 * KIB)) == ["", "b0", "b1", "b2"]


def test_the_outermost_attributes_are_blocks_unless_more_siblings_lie_in_them() -> None:
    towers = Model(left=Model(**attributes(3)), right=Model(**attributes(3)))
    assert [name.count(".") for name in split(towers, threshold_nbytes=4 * KIB)] == [1] * 6
    pairs = {f"b{number}": Model(**attributes(2)) for number in range(3)}
    assert list(split(Model(**pairs), threshold_nbytes=4 * KIB)) == ["b0", "b1", "b2"]


def test_attributes_are_no_blocks_where_the_model_is_small_or_has_units_for_most_of_it() -> None:
    assert list(split(Model(**attributes(2)), threshold_nbytes=7 * KIB)) == [RESIDENT_NAME]
    layers = split(Model(layers=blocks(3), **attributes(2)), threshold_nbytes=4 * KIB)
    assert list(layers) == ["layers.0", "layers.1", "layers.2", RESIDENT_NAME]
    lines = split(Model(**{f"line{number}": nn.Linear(24, 33) for number in range(3)}), threshold_nbytes=4 * KIB)
    assert list(lines) == [RESIDENT_NAME]


def test_a_sequential_model_is_its_own_container() -> None:
    assert list(split(nn.Sequential(Block(), nn.GELU(), Block()))) == ["0", "2"]


def test_nested_lists_are_looked_through() -> None:
    units = split(Model(stages=nn.ModuleList([blocks(2), blocks(3)])))
    assert list(units) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.1.2"]


def test_two_stacks() -> None:
    units = split(Model(encoder=Model(layers=blocks(2)), decoder=Model(layers=blocks(2))))
    assert list(units) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]


def test_only_the_outermost_repeats_are_blocks() -> None:
    units = split(Model(layers=nn.ModuleList(Block(inner=3) for _ in range(2))), threshold_nbytes=0)
    assert list(units) == ["layers.0", "layers.1"]
    assert len(units["layers.0"].own) == 2 + 3 * 2


def test_a_single_block_is_looked_into() -> None:
    units = split(Model(layers=nn.ModuleList([Block(inner=3)])))
    assert list(units) == ["layers.0.line", "layers.0.inner.0", "layers.0.inner.1", "layers.0.inner.2"]


def test_repeats_without_parameters_are_no_blocks() -> None:
    units = split(Model(layers=nn.ModuleList([nn.GELU(), nn.GELU(), nn.Linear(24, 24)])))
    assert list(units) == ["layers.2"]


def test_one_big_linear() -> None:
    model = nn.Linear(64, 64)
    units = split(model)
    assert list(units) == [""]
    assert units[""].module is model
    assert not units[""].resident
    assert list(split(model, threshold_nbytes=KIB * KIB)) == [RESIDENT_NAME]


def test_the_threshold_is_in_bytes_and_inclusive() -> None:
    model = Model(line=nn.Linear(16, 16, bias=False, dtype=torch.bfloat16))
    assert list(split(model, threshold_nbytes=512)) == ["line"]
    assert list(split(model, threshold_nbytes=513)) == [RESIDENT_NAME]


def test_without_parameters_there_are_no_units() -> None:
    assert split(Model(act=nn.GELU())) == {}


def test_small_parameters_of_the_root_are_resident() -> None:
    units = split(Model(temperature=nn.Parameter(torch.ones(())), layers=blocks(2)))
    assert list(units) == ["layers.0", "layers.1", RESIDENT_NAME]
    assert names(units[RESIDENT_NAME].own) == ["temperature"]


def test_a_root_with_large_parameters_is_a_unit_around_the_blocks() -> None:
    units = split(Model(position=nn.Parameter(torch.randn(40, 24)), head=nn.Linear(24, 64), layers=blocks(2)))
    assert list(units) == ["", "layers.0", "layers.1"]
    assert names(units[""].own) == ["position", "head.weight", "head.bias"]


def test_a_unit_takes_children_that_it_may_never_call() -> None:
    units = split(Model(attention=nn.MultiheadAttention(32, 2)))
    assert list(units) == ["attention"]
    assert "attention.out_proj.weight" in names(units["attention"].own)


# Modules without a forward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loose",
    [
        lambda: nn.ParameterList(torch.randn(24, 24) for _ in range(2)),
        lambda: nn.ParameterDict({"a": torch.randn(24, 24), "b": torch.randn(24, 24)}),
        lambda: nn.ModuleList([nn.ParameterList([torch.randn(24, 24)]), nn.ParameterList([torch.randn(24, 24)])]),
    ],
    ids=["list", "dict", "lists"],
)
def test_what_is_never_called_belongs_to_its_parent(loose: Callable[[], nn.Module]) -> None:
    units = split(Model(part=Model(loose=loose(), norm=nn.LayerNorm(24)), layers=blocks(2)))
    assert list(units) == ["part", "layers.0", "layers.1"]
    assert len(units["part"].own) == 4


def test_a_parameter_twice_in_a_module_counts_once() -> None:
    shared = nn.Parameter(torch.randn(16, 16))
    model = Model(part=Model(a=shared, b=shared))
    assert list(split(model, threshold_nbytes=KIB + 1)) == [RESIDENT_NAME]
    assert list(split(model, threshold_nbytes=KIB)) == ["part"]


class Lists(zoo.Net):
    """Uses a `ParameterList` twice in its forward."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.loose = nn.ParameterList(torch.randn(37, 37) / 37 for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ self.loose[0].T
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x @ self.loose[1].T)
        return out


def test_parameter_lists_train(offload: MakeEngine) -> None:
    model, plain = zoo.build(Lists), zoo.build(Lists)
    offload(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        losses = []
        for net, update in ((model, optimizer), (plain, expected)):
            loss = zoo.loss_of(net, zoo.batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            update.step()
            update.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]


# Sharing ----------------------------------------------------------------------------------------------------------


def test_a_tied_weight_is_borrowed_by_the_later_unit() -> None:
    units = split(zoo.Net(tied=True))
    assert names(units["embed"].own) == ["embed.weight"]
    assert (names(units["head"].own), names(units["head"].borrowed)) == ([], ["embed.weight"])
    (entry,) = units["embed"].own
    assert [attribute for _, attribute in entry.owners] == ["weight", "weight"]


def test_a_parameter_tied_into_every_block() -> None:
    layers = blocks(3)
    for layer in layers:
        layer.line.bias = layers[0].line.bias
    units = split(Model(layers=layers))
    assert names(units["layers.0"].own) == ["layers.0.line.weight", "layers.0.line.bias"]
    assert names(units["layers.2"].own) == ["layers.2.line.weight"]
    assert names(units["layers.2"].borrowed) == ["layers.0.line.bias"]
    assert len(units["layers.0"].own[1].owners) == 3


def test_a_block_listed_twice_is_one_unit() -> None:
    first, second = Block(), Block()
    assert list(split(Model(layers=nn.ModuleList([first, second, first])))) == ["layers.0", "layers.1"]


def test_stacks_that_share_their_blocks_make_each_a_unit_once() -> None:
    layers = blocks(2)
    units = split(Model(encoder=layers, decoder=nn.ModuleList(reversed(layers))))
    assert list(units) == ["encoder.0", "encoder.1"]
    assert not any(unit.borrowed for unit in units.values())


def test_a_second_name_for_a_block_does_not_split_it() -> None:
    layers = nn.ModuleList(Block(inner=3) for _ in range(2))
    assert list(split(Model(first=layers[0], layers=layers))) == ["layers.0", "layers.1"]


def test_a_large_module_with_two_names_is_one_unit() -> None:
    line = nn.Linear(24, 24)
    units = split(Model(a=line, b=Model(line=line)))
    assert list(units) == ["a"]
    assert names(units["a"].own) == ["a.weight", "a.bias"]


# unit_classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["Model", Model])
def test_unit_classes_by_name_and_class(wanted: str | type[nn.Module]) -> None:
    root = nn.Sequential(Model(layers=blocks(2)), Block(), nn.Linear(4, 4))
    units = split(root, unit_classes=(wanted,))
    assert list(units) == ["0", "1.line", RESIDENT_NAME]  # the blocks are inside; nothing else is looked for


def test_unit_classes_matches_subclasses_of_a_class_but_names_exactly() -> None:
    class Special(Block):
        pass

    root = nn.Sequential(Special(), Block())
    assert list(split(root, threshold_nbytes=KIB * KIB, unit_classes=(Block,))) == ["0", "1"]
    assert list(split(root, threshold_nbytes=KIB * KIB, unit_classes=("Block",))) == ["1", RESIDENT_NAME]
    assert list(split(root, threshold_nbytes=KIB * KIB, unit_classes=("Special", Block))) == ["0", "1"]


def test_unit_classes_may_name_the_model_itself() -> None:
    units = split(Model(layers=blocks(2)), unit_classes=("Model",))
    assert list(units) == [""]


def test_unit_classes_that_match_nothing_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="unit_classes = Blok, Conv2d matches no module"):
        partition(Model(layers=blocks(2)), resident_threshold_nbytes=0, unit_classes=("Blok", nn.Conv2d))


def test_unit_classes_without_a_forward_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"unit_classes = ModuleList chooses 'layers', .* has no forward"):
        partition(Model(layers=blocks(2)), resident_threshold_nbytes=0, unit_classes=("ModuleList",))


# Refusals ---------------------------------------------------------------------------------------------------------


class _Tagged(torch.Tensor):
    pass


class _Special(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nn.parameter.UninitializedParameter, "is lazy .* run one forward"),
        (lambda: nn.Parameter(torch.ones(3).as_subclass(_Tagged)), "is a _Tagged; only plain nn.Parameter"),
        (lambda: _Special(torch.ones(3)), "is a _Special; .* can be offloaded once"),
        (lambda: nn.Parameter(torch.eye(3).to_sparse()), "sparse or complex"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "sparse or complex"),
    ],
    ids=["lazy", "subclass", "special", "sparse", "complex"],
)
def test_parameters_that_cannot_be_offloaded(make: Callable[[], nn.Parameter], reason: str) -> None:
    model = Model(layers=blocks(2), part=Model(odd=make()))
    with pytest.raises(UnsupportedModelError, match=rf"'part\.odd' .*{reason}"):
        partition(model, resident_threshold_nbytes=0)


# Any model --------------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Model:
    """A random model: containers, modules with several names, tied weights, parameters anywhere."""
    pool: list[nn.Module] = []

    def make(depth: int) -> nn.Module:
        kinds = ["linear", "block", "none"] + (["list", "dict", "sequential", "model", "loose"] * 2 if depth else [])
        match draw(st.sampled_from(kinds + (["again"] if pool else []))):
            case "again":
                return draw(st.sampled_from(pool))
            case "linear":
                module: nn.Module = nn.Linear(4, 4)
            case "block":
                module = Block(inner=draw(st.sampled_from([0, 2])))
            case "none":
                module = nn.ReLU()
            case "loose":
                module = nn.ParameterList(torch.empty(draw(st.integers(1, 400))) for _ in range(2))
            case kind:
                module = container(kind, [make(depth - 1) for _ in range(draw(st.integers(0, 3)))])
        pool.append(module)
        return module

    def container(kind: str, children: list[nn.Module]) -> nn.Module:
        named = {f"c{number}": child for number, child in enumerate(children)}
        match kind:
            case "list":
                return nn.ModuleList(children)
            case "sequential":
                return nn.Sequential(*children)
            case "dict":
                return nn.ModuleDict(named)
            case _:
                return Model(p=nn.Parameter(torch.zeros(draw(st.integers(1, 400)))), **named)

    root = Model(top=make(3), other=make(2))
    linears = [module for module in root.modules() if isinstance(module, nn.Linear) and module.in_features == 4]
    if len(linears) > 1 and draw(st.booleans()):
        linears[-1].weight = linears[0].weight
    return root


@settings(deadline=None)
@given(trees(), st.sampled_from([0, 300, 2000, 10**6]))
def test_every_parameter_is_in_exactly_one_unit(model: nn.Module, threshold_nbytes: int) -> None:
    units = split(model, threshold_nbytes)
    again = split(model, threshold_nbytes)
    assert [(name, names(unit.own)) for name, unit in units.items()] == [(n, names(u.own)) for n, u in again.items()]


@settings(deadline=None)
@given(trees(), st.sampled_from([0, 300]))
def test_a_borrowed_parameter_belongs_to_an_earlier_unit(model: nn.Module, threshold_nbytes: int) -> None:
    before: set[int] = set()
    for unit in split(model, threshold_nbytes).values():
        assert {id(entry.parameter) for entry in unit.borrowed} <= before
        before |= {id(entry.parameter) for entry in unit.own}


@settings(deadline=None)
@given(trees())
def test_every_module_that_may_run_finds_its_parameters_gathered(model: nn.Module) -> None:
    """Each parameter that a module holds is in a unit around that module."""
    units = split(model, 0).values()
    for module in model.modules():
        around = [unit for unit in units if any(part is module for part in unit.module.modules())]
        held = {id(entry.parameter) for unit in around for entry in (*unit.own, *unit.borrowed)}
        assert {id(parameter) for parameter in module._parameters.values() if parameter is not None} <= held


@settings(deadline=None)
@given(trees())
def test_every_holder_of_a_parameter_is_known(model: nn.Module) -> None:
    held = {(id(module), name) for module in model.modules() for name, p in module._parameters.items() if p is not None}
    owners = [(id(module), name) for entry in Parameters(model) for module, name in entry.owners]
    assert sorted(owners) == sorted(held)


def test_backward_begins_with_what_encloses(offload: MakeEngine) -> None:
    """A unit around others begins its backward before them, and its forward too."""
    engine = offload(zoo.build(zoo.Nested))
    names = {unit.index: unit.name for unit in engine._runtime.units}
    trace, _ = engine._runtime.order.upcoming()
    expected = "embed first first.inner.0 first.inner.1 second second.inner.0 second.inner.1 head"
    backward = "head second second.inner.1 second.inner.0 first first.inner.1 first.inner.0 embed"
    assert [names[access.unit] for access in trace] == expected.split() + backward.split()


def _unfound() -> nn.Module:
    """Blocks that no rule finds: each lies in a module of its own class."""
    holders = [type(f"Holder{number}", (Model,), {})(block=Block()) for number in range(3)]
    return Model(**{f"part{number}": holder for number, holder in enumerate(holders)})


def test_a_model_whose_blocks_were_not_found_gets_a_hint(offload: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    offload(_unfound(), resident_threshold="4KiB")
    assert "stay on the device for good" in caplog.text
    assert "unit_classes=['Block']" in caplog.text
    assert "Block (3 times)" in caplog.text


def test_a_model_whose_blocks_were_chosen_gets_no_hint(offload: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    offload(_unfound(), resident_threshold="4KiB", unit_classes=["Block"])
    assert "unit_classes" not in caplog.text


@pytest.mark.parametrize("settings", [{"micro_batches": 2}, {"activations": "host"}], ids=["slices", "activations"])
def test_settings_that_only_units_follow_are_refused_without_units(
    offload: MakeEngine, settings: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"would do nothing: .* unit_classes=\['Block'\]"):
        offload(_unfound(), resident_threshold="4KiB", **settings)
