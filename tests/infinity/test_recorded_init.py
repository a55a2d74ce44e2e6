"""What constructors do under `infinity.empty_init()` is done later: the values are those of ordinary construction."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import infinity
from infinity.devices.cpu import CpuDevice
from infinity.grouping import make_groups
from infinity.groups import ALONE
from infinity.init import staging_nbytes
from infinity.optim.kernels import kernel_for
from infinity.units import partition
from tests.conftest import MakeEngine, small_config
from tests.infinity.recorded import different, empty
from tests.parity.loops import gathered_parameters
from tests.zoo import Attention, Nested, Net, OddNet

WIDTH = 24


class Late(nn.Module):
    """Makes its children first and draws for itself then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        nn.init.uniform_(self.scale)


class Raw(nn.Module):
    """Parameters and buffers made by factories."""

    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.Parameter(torch.randn(3, WIDTH) * 0.02)
        self.uniform = nn.Parameter(torch.rand(WIDTH, 5).t())  # not contiguous
        self.zero, self.one = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.ones(2, 3))
        self.filled = nn.Parameter(torch.full((5,), 0.25))
        self.like = nn.Parameter(torch.randn_like(self.normal) + torch.rand_like(self.normal))
        self.new = nn.Parameter(self.normal.new_zeros(4) + self.normal.new_full((4,), 2.0))
        self.identity = nn.Parameter(torch.eye(4))
        self.chosen = nn.Parameter(torch.randint(2, 9, (11,)), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(9), requires_grad=False)
        self.coins = nn.Parameter(torch.bernoulli(torch.full((40,), 0.3)))
        self.gauss = nn.Parameter(torch.normal(0.0, 0.1, (6, 6)))
        self.part = nn.Parameter(torch.randn(4, 8)[1:3, 2:5])
        self.single = nn.Parameter(torch.tensor(0.5))
        self.pair = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.array = nn.Parameter(torch.as_tensor(np.arange(3.0, dtype=np.float32)))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.line = nn.Linear(WIDTH, 3)


class Applied(nn.Module):
    """Initialises everything once more at its end, as many GPTs do."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH)) for _ in range(blocks))
        self.embed = nn.Embedding(29, WIDTH, padding_idx=3)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.startswith("blocks.1."):
                parameter.data.mul_(0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
            module.weight.data[3].zero_()


class EveryParameter(nn.Module):
    """The loop of PyTorch's own tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(16, 2, 2, 1, 20, batch_first=True)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)


class Copies(nn.Module):
    """Layers that are equal, because they are copies of one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 20, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.again = copy.deepcopy(self.encoder.layers[0])


class Initialisers(nn.Module):
    """Every initialiser of `torch.nn.init`, some of which do nothing without memory."""

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"dirac_": (4, 3, 3)}
        calls: dict[str, Callable[[torch.Tensor], object]] = {
            "orthogonal_": lambda t: nn.init.orthogonal_(t, gain=0.5),
            "sparse_": lambda t: nn.init.sparse_(t, 0.4),
            "trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.5, a=-0.2, b=0.7),
            "kaiming_uniform_": nn.init.kaiming_uniform_,
            "kaiming_normal_": nn.init.kaiming_normal_,
            "xavier_normal_": nn.init.xavier_normal_,
            "eye_": nn.init.eye_,
            "dirac_": nn.init.dirac_,
            "constant_": lambda t: nn.init.constant_(t, 0.3),
        }
        for name, call in calls.items():
            parameter = nn.Parameter(torch.empty(shapes.get(name, (6, 9))))
            call(parameter)
            self.register_parameter(name, parameter)
        self.tail = nn.Parameter(torch.rand(3))


class Seeds(nn.Module):
    """Seeds the generator, goes back to earlier states, and draws from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.second = nn.Linear(WIDTH, 3)
        self.third = nn.Linear(WIDTH, 3)
        own = torch.Generator().manual_seed(11)
        self.fourth = nn.Parameter(torch.randn(40, generator=own))
        nn.init.normal_(self.third.weight, generator=own)
        nn.init.trunc_normal_(self.third.bias, generator=own)
        nn.init.uniform_(self.first.bias, generator=own)
        self.fifth = nn.Parameter(torch.rand(5))
        torch.manual_seed(13)
        self.sixth = nn.Linear(WIDTH, 3)
        torch.manual_seed(13)
        self.seventh = nn.Linear(WIDTH, 3)


class Buffers(nn.Module):
    """Buffers of every origin, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.line = nn.Linear(WIDTH, 3)
        self.register_buffer("frequencies", 1.0 / (100.0 ** (torch.arange(0, 16, 2).float() / 16)))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        self.register_buffer("table", torch.tensor([[1, 2], [3, 4]]), persistent=False)
        self.register_buffer("noise", torch.randn(4, device="cpu") * 2)
        self.register_buffer("rows", torch.from_numpy(np.arange(4)))
        self.register_buffer("number", torch.tensor(3))
        self.after = nn.Parameter(torch.rand(4) + self.get_buffer("rows").to(torch.float32))
        self.plain = torch.linspace(0, 1, 4)


class WithMemory(nn.Module):
    """Parameters that are made with memory in spite of all, and draw out of order, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 3)
        self.legacy = nn.Parameter(torch.Tensor(3, WIDTH))
        nn.init.xavier_uniform_(self.legacy)
        self.explicit = nn.Parameter(torch.randn(5, device="cpu"))
        self.array = nn.Parameter(torch.from_numpy(np.arange(3.0, dtype=np.float32)))
        self.large = nn.Linear(WIDTH, 40, device="cpu")  # a unit of its own
        self.rest = nn.Linear(WIDTH, 3)
        self.register_buffer("partly", torch.arange(6.0, device="cpu"))
        self.get_buffer("partly")[2:4].normal_()


class Slices(nn.Module):
    """Parameters that are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        first, second = torch.randn(4, WIDTH).chunk(2)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)


class Converted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 7)
        self.line.weight.data = self.line.weight.data * 2
        self.other = nn.Linear(7, 7).requires_grad_(False)
        self.half().float()
        nn.init.normal_(self.other.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, WIDTH)
        self.head = nn.Linear(WIDTH, 29, bias=False)
        self.head.weight = self.embed.weight
        self.rest = nn.Linear(WIDTH, 3)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = parametrizations.weight_norm(nn.Linear(WIDTH, 7))
        self.tail = nn.Linear(WIDTH, 3)


class InParts(nn.Module):
    """A projection whose three parts are drawn one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        for part in self.qkv.weight.chunk(3):
            nn.init.xavier_uniform_(part)
        with torch.no_grad():
            self.qkv.weight[:, :5].normal_()
        self.out = nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, 8, num_layers=2)
        self.conv = nn.Conv2d(3, 4, 3)


KINDS = [
    *(Late, Raw, Applied, EveryParameter, Copies, Initialisers, Seeds, Buffers, Converted, Tied, Normalised, InParts),
    *(Recurrent, WithMemory, Slices, Net, OddNet, Nested, Attention),
]


def _built(make: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, torch.Tensor]:
    """Ordinary construction: the model, and the generator's state after it."""
    torch.manual_seed(seed)
    return make(), torch.get_rng_state()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_same_values_as_ordinary_construction(offload: MakeEngine, make: Callable[[], nn.Module]) -> None:
    plain, after = _built(make)
    before = torch.random.manual_seed(3).get_state()
    model = empty(make)
    assert any(parameter.is_meta for parameter in model.parameters())
    if make is not Seeds:
        assert torch.equal(torch.get_rng_state(), before)  # building draws nothing
    offload(model)
    assert different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), after)


# What cannot be recorded -------------------------------------------------------------------------------------------
# Not of `torch.linspace`: in a process in which transformers was first to build on meta, torch's list of what obeys a
# device (`torch.utils._device`) has transformers' replacement of it for good, and linspace gives real values.


@pytest.mark.parametrize(
    "make",
    [
        lambda: float(torch.arange(3.0)[1]),
        lambda: torch.arange(3.0).cpu(),
        lambda: bool(torch.ones(3).any()),
        lambda: torch.zeros(3, device="cpu").copy_(torch.ones(3)),
        lambda: parametrizations.orthogonal(nn.Linear(7, 5), use_trivialization=False),
        lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    ],
    ids=["float", "cpu", "bool", "copy", "geqrf", "inside"],
)
def test_what_needs_values_at_once_is_refused(make: Callable[[], Any]) -> None:
    with infinity.empty_init(), pytest.raises(infinity.UnsupportedModelError, match=r"aten\..*device='cpu'"):
        make()


def test_an_initialiser_of_another_torch_that_cannot_be_recorded_is_refused() -> None:
    """One that returns at once without memory, from inside a function that has no name in its module."""

    def inner(weight: torch.Tensor) -> bool:
        return weight.is_meta

    unknown = FunctionType(inner.__code__, {"__name__": nn.init.__name__})
    with infinity.empty_init():
        assert inner(torch.empty(2))  # code of others may ask
        assert unknown(torch.empty(0, 2))  # nothing is lost
        with pytest.raises(infinity.UnsupportedModelError, match=r"inner of torch\.nn\.init .* cannot be recorded"):
            unknown(torch.empty(2))


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, np.asarray, np.from_dlpack]
)
def test_decisions_by_random_numbers_are_refused(read: Callable[[torch.Tensor], Any]) -> None:
    with infinity.empty_init():
        assert np.asarray(read(torch.ones(1, device="cpu"))) == 1
        with pytest.raises(infinity.UnsupportedModelError, match=r"asks for random numbers before"):
            read(torch.rand(1, device="cpu"))


def test_states_of_generators_that_are_not_known_yet_are_refused() -> None:
    with infinity.empty_init():
        same = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(5), torch.Generator()]
        same[2].set_state(torch.get_rng_state())  # nothing has been drawn
        for own in (*same, *same):
            torch.rand(2, generator=own)
        other = torch.Generator()
        other.set_state(same[0].get_state())
        with pytest.raises(infinity.UnsupportedModelError, match=r"the state of another one.*manual_seed"):
            torch.rand(2, generator=other)
    before = torch.get_rng_state()
    with pytest.raises(infinity.UnsupportedModelError, match=r"the state of another one"), infinity.empty_init():
        torch.rand(2, generator=same[0])
        torch.set_rng_state(same[0].get_state())
    assert torch.equal(torch.get_rng_state(), before)


class Undefined(nn.Module):
    """A parameter that nothing fills, one of which a part is filled, and one that is made of such a one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.empty(3))
        self.partly = nn.Parameter(torch.empty(6))
        nn.init.ones_(self.partly[:4])
        self.made_of = nn.Parameter(torch.empty(3) * 2)


def test_what_ordinary_construction_leaves_undefined_is_refused(offload: MakeEngine) -> None:
    with pytest.raises(infinity.UnsupportedModelError, match=r"'never', 'partly', 'made_of' is left .*init_fn"):
        offload(empty(Undefined))


def test_columns_that_nothing_fills_are_found(offload: MakeEngine) -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 6))
            nn.init.ones_(self.weight[:, :4])

    with pytest.raises(infinity.UnsupportedModelError, match=r"'weight' is left uninitialised"):
        offload(empty(Columns))


def test_a_constant_that_is_changed_afterwards_is_refused(offload: MakeEngine) -> None:
    large = torch.zeros(600, 600)

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.weight = nn.Parameter(torch.zeros(600, 600) + large)

    model = empty(Large)
    large.add_(1)
    with pytest.raises(infinity.UnsupportedModelError, match=r"\(600, 600\).*has been changed since"):
        offload(model, host={"budget": "64MiB"})
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters())  # as it was


@pytest.mark.parametrize("way", ["numpy", "data"])
def test_a_constant_that_is_changed_past_its_counter_is_refused(offload: MakeEngine, way: str) -> None:
    """One array that is filled anew for every layer would give all of them what the last one got."""

    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(600, 600, bias=False) for _ in range(2))
            array = np.empty((600, 600), np.float32)
            values = torch.from_numpy(array)
            for number, layer in enumerate(self.layers):
                if way == "numpy":
                    array[:] = number
                else:
                    values.data.fill_(number)
                with torch.no_grad():
                    layer.get_parameter("weight").copy_(values)

    with pytest.raises(infinity.UnsupportedModelError, match=r"\(600, 600\).*has been changed since"):
        offload(empty(Scratch), host={"budget": "64MiB"})


@pytest.mark.parametrize("kind", ["inference", "transposed"])
def test_large_constants_of_any_kind(offload: MakeEngine, kind: str) -> None:
    with torch.inference_mode(mode=kind == "inference"):
        large = torch.rand(600, 600)

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(600, 600) + (large.t() if kind == "transposed" else large))

    model = empty(Large)
    offload(model, host={"budget": "64MiB"})
    assert torch.equal(gathered_parameters(model)["weight"], large.t() if kind == "transposed" else large)


def test_small_constants_are_copied(offload: MakeEngine) -> None:
    small = torch.ones(5)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5) + small)
            small.add_(1)

    model = empty(Small)
    offload(model)
    assert gathered_parameters(model)["weight"].tolist() == [1.0] * 5


# Where a record ends -----------------------------------------------------------------------------------------------


def test_a_model_changed_under_another_context_is_refused(offload: MakeEngine) -> None:
    model = empty(Late)
    with infinity.empty_init():
        nn.init.zeros_(model.get_parameter("inner.weight"))
    with pytest.raises(infinity.UnsupportedModelError, match=r"'inner\.weight' was made under one .* under another"):
        offload(model)


def test_adapters_of_a_second_context(offload: MakeEngine) -> None:
    """Each context continues the order of random numbers, as constructions one after the other do."""

    def extend(model: nn.Module) -> nn.Module:
        model.add_module("extra", nn.Linear(WIDTH, 3))
        return model

    plain, after = _built(lambda: extend(Late()))
    torch.manual_seed(3)
    with infinity.empty_init():
        model: nn.Module = Late()
    with infinity.empty_init():
        extend(model)
    offload(model)
    assert different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), after)


def test_two_models_one_after_the_other(offload: MakeEngine) -> None:
    plain, after = _built(lambda: nn.ModuleList([Late(), Raw()]))
    torch.manual_seed(3)
    with infinity.empty_init():
        first = Late()
    with infinity.empty_init():
        second = Raw()
    offload(first)
    offload(second)
    assert different(first, plain[0]) == []  # type: ignore[index]
    assert different(second, plain[1]) == []  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("is_second_first", [False, True])
def test_two_models_of_one_context(offload: MakeEngine, *, is_second_first: bool) -> None:
    plain, after = _built(lambda: nn.ModuleList([Late(), Raw()]))
    with infinity.empty_init():
        torch.manual_seed(3)
        both = [Late(), Raw()]
    for number in (1, 0) if is_second_first else (0, 1):
        offload(both[number])
        assert different(both[number], plain[number]) == []  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), after)


def test_numbers_drawn_in_between_change_nothing(offload: MakeEngine) -> None:
    """Values come from the state in which the construction began; what the user has seeded or drawn since stays."""
    plain, _ = _built(Applied)
    model = empty(Applied)
    torch.manual_seed(99)
    torch.rand(5)
    before = torch.get_rng_state()
    offload(model)
    assert different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_user_continues(offload: MakeEngine) -> None:
    def make() -> nn.Module:
        module = nn.Linear(5, 5)
        nn.init.normal_(module.weight, generator=own)
        return module

    own = torch.Generator().manual_seed(5)
    plain, expected = make(), torch.rand(3, generator=own)
    own.manual_seed(5)
    with infinity.empty_init():
        model = make()
    offload(model)
    assert torch.equal(gathered_parameters(model)["weight"], plain.get_parameter("weight"))
    assert torch.equal(torch.rand(3, generator=own), expected)


@pytest.mark.parametrize("width", [WIDTH, 3])
def test_what_is_replaced_by_something_unrecorded_follows_the_rules(offload: MakeEngine, width: int) -> None:
    """So does what is gathered with it."""
    plain, _ = _built(Late)
    model = empty(Late)
    with torch.device("meta"):
        model.add_module("inner", nn.Linear(width, width))
    if width == 3:  # small enough for the unit of `scale`
        with pytest.raises(infinity.UnsupportedModelError, match=r"nothing initialises scale"):
            offload(model)
        return
    offload(model)
    got = gathered_parameters(model)
    assert torch.equal(got["scale"], plain.get_parameter("scale"))
    assert 0 < got["inner.weight"].abs().max() <= WIDTH**-0.5


def test_init_fn_counts_more_than_the_record(offload: MakeEngine) -> None:
    model = empty(Late)
    offload(model, init_fn=lambda module: [nn.init.ones_(p) for p in module.parameters(recurse=False)])
    assert all(bool((value == 1).all()) for value in gathered_parameters(model).values())


def test_only_what_files_lack_is_initialised(offload: MakeEngine, tmp_path: Any) -> None:
    """Nothing is drawn for the rest of the model."""
    plain, _ = _built(Applied)
    state = {name: value + 1 for name, value in plain.state_dict().items() if not name.startswith("embed")}
    torch.save(state, tmp_path / "model.pt")
    model = empty(Applied)
    offload(model, weights=tmp_path / "model.pt", strict=False)
    torch.manual_seed(3)
    wanted = torch.empty(29, WIDTH).normal_(0.0, 0.02)
    wanted[3].zero_()
    got = gathered_parameters(model)
    assert torch.equal(got["embed.weight"], wanted)
    assert all(torch.equal(got[name], value) for name, value in state.items())


# Memory ------------------------------------------------------------------------------------------------------------


def _staging_nbytes(model: nn.Module) -> tuple[int, int]:
    """What the plan counts for initialisation, and the largest group."""
    specs = partition(model, resident_threshold_nbytes=1024)
    kernel = kernel_for(infinity.Precision.FP32)
    groups, units = make_groups(specs, infinity.Precision.FP32, kernel, CpuDevice(1 << 30), ALONE)
    return staging_nbytes(model, units, groups), max(group.layout.numel * 4 for group in groups)


def test_initialising_at_the_end_takes_memory_for_a_block_or_two_and_not_for_the_model(offload: MakeEngine) -> None:
    """What the constructors of layers draw first is overwritten, so it opens no group."""
    few, largest = _staging_nbytes(empty(lambda: Applied(4)))
    many, _ = _staging_nbytes(empty(lambda: Applied(40)))
    assert largest <= many == few <= 3 * largest
    plain, _ = _built(lambda: Applied(40))
    model = empty(lambda: Applied(40))
    engine = offload(model, host={"budget": "64MiB"}, schedule="synchronous")
    minimum = engine.plan.placement.host_minimum_nbytes
    engine.close()
    model = empty(lambda: Applied(40))
    small = offload(model, host={"budget": minimum}, schedule="synchronous")
    assert small.metrics()["host/peak_bytes"] <= minimum < 40 * largest
    assert different(model, plain) == []


def test_a_projection_filled_in_parts_opens_no_group_before(offload: MakeEngine) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH)) for _ in range(20))
            for block in self.blocks:
                line = block.get_submodule("0")
                for part in line.get_parameter("weight").chunk(3):
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(line.get_parameter("bias"))

    nbytes, largest = _staging_nbytes(empty(Blocks))
    assert nbytes <= 2 * largest


def test_what_was_offloaded_is_forgotten(offload: MakeEngine) -> None:
    """A record goes with the tensors that it is for."""
    model = empty(Late)
    tape = weakref.ref(model.get_parameter("scale").untyped_storage())
    assert tape() is not None
    offload(model)
    del model
    gc.collect()
    assert tape() is None


def test_offloading_inside_the_context_is_refused(offload: MakeEngine) -> None:
    with infinity.empty_init():
        model = Late()
        with pytest.raises(infinity.UnsupportedModelError, match="call it after the block"):
            offload(model)
    offload(model)


def test_contexts_within_one_another_are_one(offload: MakeEngine) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, 3)
            with infinity.empty_init():
                self.inner = Late()
            nn.init.normal_(self.inner.scale)

    torch.manual_seed(3)
    plain = nn.ModuleDict({"first": nn.Linear(WIDTH, 3), "inner": Late()})
    nn.init.normal_(plain["inner"].get_parameter("scale"))
    model = empty(Outer)
    offload(model)
    assert different(model, plain) == []


def test_changes_after_the_context_are_not_lost_silently(offload: MakeEngine) -> None:
    model = empty(Late)
    nn.init.zeros_(model.get_parameter("inner.weight"))
    with pytest.raises(infinity.UnsupportedModelError, match=r"'inner\.weight' was changed after .* inside the block"):
        offload(model)


def test_what_is_replaced_by_values_after_the_context_has_these(offload: MakeEngine) -> None:
    plain, _ = _built(Late)
    model = empty(Late)
    model.register_parameter("scale", nn.Parameter(torch.arange(float(WIDTH))))
    offload(model)
    got = gathered_parameters(model)
    assert torch.equal(got["scale"], torch.arange(float(WIDTH)))
    assert torch.equal(got["inner.weight"], plain.get_parameter("inner.weight"))


def test_parameters_that_share_memory_are_refused(offload: MakeEngine) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.randn(3, WIDTH)
            self.first, self.second = nn.Parameter(values), nn.Parameter(values[1:])

    with pytest.raises(infinity.UnsupportedModelError, match=r"'second' shares memory with 'first'"):
        offload(empty(Shared))


def test_buffers_without_memory_when_a_run_is_resumed(offload: MakeEngine, tmp_path: Any) -> None:
    """Only they are initialised; no numbers are drawn for parameters whose values the swap files hold."""
    plain, _ = _built(Buffers)
    settings: dict[str, Any] = {"durability": "step", "host": {"budget": "4MiB"}}
    first = empty(Buffers)
    offload(first, **settings).close()
    second = empty(Buffers, seed=4)
    with infinity.offload(second, small_config(tmp_path, **settings), resume=True):
        assert torch.equal(gathered_parameters(second)["line.weight"], plain.get_parameter("line.weight"))
        for name in ("frequencies", "mask", "table", "norm.running_var"):
            assert torch.equal(second.get_buffer(name), plain.get_buffer(name)), name
