"""Models built without memory, and initialised shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters
from tests.zoo import Attention, Nested, Net, OddNet, batch, build, one_step

MakeEmpty = Callable[[type[nn.Module]], nn.Module]


def _empty(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    with infinity.empty_init():
        return make()


def _meta(make: type[nn.Module]) -> nn.Module:
    """Without memory, and without a record of how ordinary construction gives it values."""
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make_empty", [_empty, _meta])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("host", [{"budget": "440KiB"}, {"budget": "64MiB"}], ids=str)
def test_same_values_as_plain_construction(
    offload: MakeEngine, host: dict[str, Any], precision: str, make_empty: MakeEmpty
) -> None:
    plain = build(Net)
    model = make_empty(Net)
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    offload(model, host=host, precision=precision)
    for name, parameter in gathered_parameters(model).items():
        expected = plain.get_parameter(name).detach()
        if precision == "bf16":
            expected = expected.bfloat16().to(parameter.dtype)
        assert torch.equal(parameter, expected), name


def test_same_values_with_shared_parameters(offload: MakeEngine) -> None:
    """Tied weights keep one initialisation, the one of the last module that owns them."""

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(tied=True)

    model = _empty(Tied)
    offload(model)
    got = gathered_parameters(model)
    assert "head.weight" not in got
    assert got["embed.weight"].std() > 0


def test_init_function(offload: MakeEngine) -> None:
    seen = []

    def fill(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for number, parameter in enumerate(module.parameters(recurse=False)):
            nn.init.constant_(parameter, number + 1.0)

    model = _meta(OddNet)
    offload(model, init_fn=fill)
    assert seen == ["OddNet", "Embedding", *["Odd", "Linear"] * 3, "Linear"]
    got = gathered_parameters(model)
    assert got["blocks.1.scale"].item() == 1.0
    assert got["blocks.2.one"].item() == 3.0
    assert got["blocks.2.empty"].shape == (0, 5)


@pytest.mark.parametrize("make", [OddNet, Nested])
def test_what_nothing_initialises_is_refused(offload: MakeEngine, make: type[nn.Module]) -> None:
    with pytest.raises(infinity.UnsupportedModelError, match=r"(scale|before).*init_fn"):
        offload(_meta(make))


def test_half_built_models_are_refused(offload: MakeEngine) -> None:
    model = _meta(Net)
    block = model.get_submodule("blocks.1")
    block.register_parameter("up_bias", nn.Parameter(torch.zeros(3)))
    block.up_bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(infinity.UnsupportedModelError, match=r"up_bias.*has data"):
        offload(model)


def test_buffers_on_meta_are_refused(offload: MakeEngine) -> None:
    class WithBuffer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(5))

    with pytest.raises(infinity.UnsupportedModelError, match=r"buffer 'table'.*device='cpu'"):
        offload(_meta(WithBuffer))


def test_unbuilt_and_built_train_alike(offload: MakeEngine) -> None:
    losses = []
    for is_empty in (True, False):
        model = _empty(Net) if is_empty else build(Net)
        offload(model, schedule="overlapped")
        optimizer = infinity.AdamW(model.parameters())
        losses.append([one_step(model, optimizer, step) for step in range(3)])
    assert losses[0] == losses[1]


def test_attention_initialises_itself_as_in_plain_construction(offload: MakeEngine) -> None:
    """`nn.MultiheadAttention` draws the values of its projection first and then its own, and zeroes both biases."""
    plain = build(Attention)
    model = _meta(Attention)
    torch.manual_seed(0)
    offload(model)
    different = [n for n, value in gathered_parameters(model).items() if not torch.equal(value, plain.get_parameter(n))]
    assert not different


def test_modules_without_reset_parameters_are_named(offload: MakeEngine) -> None:
    with pytest.raises(infinity.UnsupportedModelError, match=r"blocks\.0\.scale.*init_fn"):
        offload(_meta(OddNet))


@pytest.mark.parametrize("make_empty", [_empty, _meta])
def test_memory_stays_within_the_budget(offload: MakeEngine, make_empty: MakeEmpty) -> None:
    """The whole model never exists in memory: the smallest budget is enough to initialise it."""
    with pytest.raises(infinity.PlacementError):
        offload(make_empty(Net), host={"budget": 4096}, schedule="synchronous")
    engine = offload(make_empty(Net), host={"budget": "64MiB"}, schedule="synchronous")
    minimum = engine.plan.placement.host_minimum_nbytes
    engine.close()
    model = make_empty(Net)
    small = offload(model, host={"budget": minimum}, schedule="synchronous")
    one_step(model, infinity.AdamW(model.parameters()), 0)
    assert small.metrics()["host/peak_bytes"] <= minimum


def test_progress_is_reported(offload: MakeEngine, tmp_path: Any) -> None:
    from tests.conftest import small_config

    told: list[str] = []
    with infinity.offload(_empty(Net), small_config(tmp_path), on_progress=told.append) as engine:
        assert sorted(told) == sorted(group.key for group in engine._runtime.groups)


def test_dropout_state_is_not_touched_by_training(offload: MakeEngine) -> None:
    """Gathering draws no random numbers."""
    model = build(Net)
    offload(model, host={"budget": "440KiB"})
    before = torch.get_rng_state()
    one_step(model, infinity.AdamW(model.parameters()), 0)
    with torch.no_grad():
        model(batch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_buffers_that_a_module_resets_are_initialised(offload: MakeEngine) -> None:
    """`nn.BatchNorm1d` resets its statistics with its parameters."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(37)
            self.plain_norm = nn.BatchNorm1d(37, affine=False)

    plain, model = build(Normed), _meta(Normed)
    torch.manual_seed(0)
    offload(model)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_integers_may_be_anything_but_left_alone(offload: MakeEngine) -> None:
    class Numbered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.zeros(37, dtype=torch.int64), requires_grad=False)

    def fill(module: nn.Module, *, leaves_order: bool = False) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if name != "order" or not leaves_order:
                parameter.fill_(-1)

    model = _meta(Numbered)
    offload(model, init_fn=fill)
    assert (gathered_parameters(model)["order"] == -1).all()
    with pytest.raises(infinity.UnsupportedModelError, match=r"'order' is left uninitialised by init_fn"):
        offload(_meta(Numbered), init_fn=lambda module: fill(module, leaves_order=True))
