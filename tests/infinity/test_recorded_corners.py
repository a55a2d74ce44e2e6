"""Constructors that do unusual things under `infinity.empty_init()`: ordinary values, or a refusal that says why."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters

WIDTH = 24


class Skipped(nn.Module):
    """A layer that draws nothing when it is made, because it is made on the meta device and gets memory then."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: nn.Module = nn.utils.skip_init(nn.Linear, WIDTH, 3)
        nn.init.normal_(self.skipped.get_parameter("weight"))
        nn.init.ones_(self.skipped.get_parameter("bias"))
        self.rest = nn.Linear(WIDTH, 3)
        shape_only = nn.Linear(WIDTH, 3, device="meta")
        nn.init.trunc_normal_(shape_only.weight)
        self.tail = nn.Linear(*shape_only.weight.shape)


class Lazy(nn.Module):
    """A layer of which a forward in the constructor tells the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 5)
        self.lazy = nn.LazyLinear(3)
        self.lazy(self.line(torch.zeros(1, WIDTH)))


class Tried(nn.Module):
    """A forward in the constructor changes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
        outputs = self.body(torch.rand(2, 3, 6, 6))
        self.head = nn.Linear(outputs.shape[1], 2)
        self.register_buffer("outputs", outputs.detach())


class Legacy(nn.Module):
    """A parameter with memory that an initialiser makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 3)
        self.identity = nn.Parameter(torch.Tensor(4, 4))
        nn.init.eye_(self.identity)


def _empty(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with infinity.empty_init():
        return make()


class Onto(nn.Module):
    """Operations whose result goes where one of their arguments is."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        with torch.no_grad():
            weight, bias = self.line.weight, self.line.bias
            torch.mul(weight, 0.5, out=weight)
            torch.add(bias, bias, out=bias)
            self.norm.weight.copy_(self.norm.weight)


class SameSeed(nn.Module):
    """Goes back to a state after a seed that was set twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first = nn.Parameter(torch.rand(5))
        state = torch.get_rng_state()
        torch.manual_seed(13)
        self.second = nn.Parameter(torch.randn(50))
        torch.set_rng_state(state)
        self.third = nn.Parameter(torch.rand(5))


class SameState(nn.Module):
    """A generator of its own begins where the default one does."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator()
        own.set_state(torch.get_rng_state())
        self.first = nn.Parameter(torch.rand(5, generator=own))
        self.second = nn.Parameter(torch.rand(3))
        self.third = nn.Parameter(torch.rand(5, generator=own))


class Sampled(nn.Module):
    """First values from `torch.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        normal = torch.distributions.Normal(torch.zeros(5), torch.full((5,), 0.02))
        self.weight = nn.Parameter(normal.sample((7,)))
        self.bias = nn.Parameter(torch.distributions.Uniform(-1.0, 1.0).sample((5,)))
        self.gate = nn.Parameter(torch.distributions.MultivariateNormal(torch.zeros(3), torch.eye(3)).sample())


@pytest.fixture
def validating(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether `torch.distributions` checks arguments; it no longer does once something was compiled in the process."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(request.param)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("validating", [True, False], indirect=True)
@pytest.mark.usefixtures("validating")
def test_distributions_are_recorded_whatever_ran_before(offload: MakeEngine) -> None:
    test_same_values_as_ordinary_construction(offload, Sampled)
    with infinity.empty_init(), pytest.raises(infinity.UnsupportedModelError, match="needs the values"):
        bool(torch.distributions.Normal(0.0, 1.0).sample() > 0)


@pytest.mark.parametrize("make", [Skipped, Lazy, Tried, Legacy, SameSeed, SameState, Onto])
def test_same_values_as_ordinary_construction(offload: MakeEngine, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    plain = make()
    after = torch.get_rng_state()
    model = _empty(make)
    offload(model)
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    got = gathered_parameters(model) | dict(model.named_buffers())
    assert got.keys() == wanted.keys()
    assert [name for name, value in got.items() if not torch.equal(value, wanted[name])] == []
    assert torch.equal(torch.get_rng_state(), after)


def test_values_that_are_asked_for_by_ways_without_operations_are_refused() -> None:
    with infinity.empty_init(), pytest.raises(infinity.UnsupportedModelError, match=r"needs the values.*device='cpu'"):
        torch.arange(3.0).numpy()
    with infinity.empty_init(), pytest.raises(infinity.UnsupportedModelError, match=r"needs the values"):
        nn.utils.parametrizations.orthogonal(nn.Linear(7, 7))


def test_a_lazy_layer_without_shape_is_refused_by_name(offload: MakeEngine) -> None:
    with pytest.raises(infinity.UnsupportedModelError, match=r"'0\.weight' is lazy"):
        offload(_empty(lambda: nn.Sequential(nn.LazyLinear(3))))


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, lambda model: model.half().float()], ids=["once", "twice"])
def test_a_conversion_after_the_block_is_refused(offload: MakeEngine, convert: Callable[[nn.Module], object]) -> None:
    """Modules initialised it silently, with other values."""
    model = _empty(lambda: nn.Sequential(nn.Linear(WIDTH, 3)))
    convert(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'0\.weight' was given other memory.*inside the block"):
        offload(model, precision="bf16")


def test_a_conversion_inside_the_block(offload: MakeEngine) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(WIDTH, 3).bfloat16()
    model = _empty(lambda: nn.Linear(WIDTH, 3).bfloat16())
    offload(model, precision="bf16")
    assert torch.equal(gathered_parameters(model)["weight"], plain.weight)


def test_converted_parameters_may_come_from_files(offload: MakeEngine, tmp_path: Any) -> None:
    plain = nn.Linear(WIDTH, 3)
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    model = _empty(lambda: nn.Linear(WIDTH, 3)).bfloat16()
    offload(model, precision="bf16", weights=tmp_path / "model.pt")
    assert torch.equal(gathered_parameters(model)["weight"], plain.weight.bfloat16())


def test_a_copy_after_the_block_is_told(offload: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(_empty(lambda: nn.Linear(WIDTH, 3)))
    offload(model)
    assert "2 parameters have no memory and no record of their construction (weight, ...)" in caplog.text


def test_an_error_in_a_constructor_leaves_everything_as_it_was() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="too late"), infinity.empty_init():
        nn.LazyLinear(3), nn.Linear(3, 3)
        raise ValueError("too late")
    assert torch.equal(torch.get_rng_state(), before)
    assert not nn.Linear(3, 3).weight.is_meta
    with infinity.empty_init():
        assert nn.Linear(3, 3).weight.is_meta


_OWN = torch.Generator()


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _OWN.manual_seed(0)
        self.own = nn.Parameter(torch.randn(9, generator=_OWN))
        self.more = nn.Parameter(torch.randn(9, generator=_OWN))
        self.before = nn.Linear(WIDTH, 3)
        torch.manual_seed(3)
        self.after = nn.Linear(WIDTH, 3)


def test_a_second_recording_that_seeds_as_the_first_one_does(offload: MakeEngine) -> None:
    """A seed that had been set before the first recording was taken for the state in which the second one began."""
    torch.manual_seed(3)
    plain = [Seeded(), Seeded()]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    models: list[nn.Module] = []
    for _ in plain:
        with infinity.empty_init():
            models.append(Seeded())
    for model, wanted in zip(models, plain, strict=True):
        offload(model)
        got = gathered_parameters(model)
        assert [name for name, value in wanted.named_parameters() if not torch.equal(got[name], value)] == []
    assert torch.equal(torch.get_rng_state(), after)


def test_modules_of_another_thread_are_refused() -> None:
    refused = pytest.raises(infinity.UnsupportedModelError, match=r"another thread made parameter 'weight' of a Linear")
    with refused, infinity.empty_init():
        nn.Linear(3, 3)
        thread = Thread(target=lambda: nn.Linear(3, 3))
        thread.start()
        thread.join()
    assert not nn.Linear(3, 3).weight.is_meta
