"""Operations, activations and units of a model, from its forward on the meta device."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from infinity.errors import ConfigError, UnsupportedModelError
from infinity.models.gpt import Gpt, GptShape
from infinity.plan.model import ModelPlan, model_plan
from infinity.plan.tracing import trace

SHAPE = GptShape(layers=4, hidden=64, heads=4, seq=32)


def planned(
    source: str | GptShape, *, seq: int = 32, batch: int = 2, itemsize: int = 4, unit_classes: tuple[str, ...] = ()
) -> ModelPlan:
    return model_plan(
        source,
        seq=seq,
        batch=batch,
        activation_itemsize=itemsize,
        resident_threshold_nbytes=1024,
        unit_classes=unit_classes,
    )


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module to put factories in."""
    module = ModuleType("plan_factories")
    monkeypatch.setitem(sys.modules, "plan_factories", module)
    return module


def test_operations_of_a_transformer_are_those_of_its_matrices() -> None:
    plan = planned(SHAPE)
    tokens, h, seq = 2 * 32, 64, 32
    products = 2 * tokens * (4 * 12 * h * h + h * 256)
    attention = 4 * 2 * 2 * tokens * seq * h
    assert plan.is_traced
    assert plan.forward_flops == products + attention
    assert plan.step_flops(recompute=False) == 3 * plan.forward_flops
    assert plan.step_flops(recompute=True) == 4 * plan.forward_flops


def test_units_and_their_order_are_those_of_the_engine() -> None:
    plan = planned(SHAPE)
    assert [name for name in plan.order if name.startswith("blocks")] == [f"blocks.{n}" for n in range(4)]
    assert plan.parameters == SHAPE.parameters
    blocks = [plan.work[f"blocks.{n}"] for n in range(4)]
    assert len({work.forward_flops for work in blocks}) == 1
    assert all(work.boundary_nbytes == 2 * 32 * 64 * 4 for work in blocks)


def test_operations_are_counted_as_torch_counts_them() -> None:
    counter = FlopCounterMode(display=False)
    with counter, torch.device("meta"):
        model, inputs = Gpt(SHAPE), torch.zeros(2, 32, dtype=torch.long)
        model(inputs, inputs)
    assert planned(SHAPE).forward_flops == counter.get_total_flops()


_SHAPES = [SHAPE, GptShape(7, 96, 2, 32), GptShape(1, 64, 4, 16), GptShape(2, 256, 8, 48), GptShape(3, 32, 1, 16)]


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [*_SHAPES, GptShape(2, 16, 16, 8)])
@pytest.mark.parametrize("threshold_nbytes", [0, 1024, 1 << 14, 1 << 20])
@pytest.mark.parametrize(("seq", "batch", "itemsize"), [(16, 1, 2), (1, 3, 4), (16, 3, 4)])
def test_our_own_transformer_is_known_without_running_it(
    shape: GptShape, threshold_nbytes: int, seq: int, batch: int, itemsize: int
) -> None:
    """And does what its forward on the meta device does."""
    plan = model_plan(
        shape, seq=seq, batch=batch, activation_itemsize=itemsize, resident_threshold_nbytes=threshold_nbytes
    )
    assert plan.is_traced
    work, order = trace(plan.module, plan.specs, seq, batch, itemsize)
    assert (plan.work, plan.order) == (work, order)
    assert list(plan.work) == list(work)


@pytest.mark.parametrize("shape", _SHAPES)
def test_it_is_the_model_that_a_factory_makes(shape: GptShape, factories: ModuleType) -> None:
    factories.make = lambda: Gpt(shape)  # type: ignore[attr-defined]
    known, whole = planned(shape, seq=16), planned("plan_factories:make", seq=16, unit_classes=("Block",))
    assert (known.work, known.order, known.untraced) == (whole.work, whole.order, whole.untraced)
    named = [[(name, p.shape, p.dtype) for name, p in plan.module.named_parameters()] for plan in (known, whole)]
    assert named[0] == named[1]
    assert [(spec.name, spec.resident) for spec in known.specs] == [(spec.name, spec.resident) for spec in whole.specs]
    assert all(p.is_meta for p in known.module.parameters())


def test_saved_activations_are_what_autograd_keeps() -> None:
    plan = planned(SHAPE)
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, inputs = Gpt(SHAPE), torch.zeros(2, 32, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs, inputs)
    assert plan.activation_nbytes(recompute=False) == pytest.approx(sum(seen.values()), rel=0.1)
    assert plan.activation_nbytes(recompute=True) < plan.activation_nbytes(recompute=False)


@pytest.mark.parametrize("hidden", [32, 128])
def test_activations_count_also_where_they_are_as_large_as_the_matrix_of_attention(hidden: int) -> None:
    """With as many channels, or channels of a head, as tokens, they were taken for what fused kernels do not store."""
    tokens = 32
    shape = GptShape(layers=2, hidden=hidden, heads=4, seq=tokens)
    square, shorter = (
        planned(shape, seq=seq, batch=1).activation_nbytes(recompute=False) / seq for seq in (tokens, tokens - 1)
    )
    assert square == pytest.approx(shorter, rel=0.01)


class _Eager(nn.Module):
    """Attention by itself, which keeps its matrix for the backward."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.embedding, self.project = nn.Embedding(16, 24), nn.Linear(8, 24)
        self.is_fused = is_fused

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.embedding(tokens).view(1, 1, -1, 24).split(8, dim=-1)
        if self.is_fused:
            return self.project(nn.functional.scaled_dot_product_attention(q, k, v))
        return self.project(torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v)


def test_only_fused_attention_keeps_no_matrix(factories: ModuleType) -> None:
    kept = []
    for is_fused in (True, False):
        factories.make = partial(_Eager, is_fused=is_fused)  # type: ignore[attr-defined]
        plan = planned("plan_factories:make", seq=64, batch=1)
        assert plan.is_traced, plan.untraced
        kept.append(plan.activation_nbytes(recompute=False))
    assert kept[1] - kept[0] == pytest.approx(64 * 64 * 4, rel=0.1)  # as of one softmax; the other keeps rows of it


def test_a_forward_that_refuses_a_sequence_is_estimated(factories: ModuleType) -> None:
    """With an assertion, as many models have it; the plan failed with it."""

    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.shape[1] <= 16, "longer than its block size"
            return tokens

    factories.make = Short  # type: ignore[attr-defined]
    assert planned("plan_factories:make").untraced == "AssertionError: longer than its block size"
    assert planned("plan_factories:make", seq=16).is_traced


def test_activations_scale_with_the_size_of_their_numbers_and_the_batch() -> None:
    half, more = planned(SHAPE, itemsize=2), planned(SHAPE, batch=4)
    whole = planned(SHAPE)
    assert half.work["blocks.0"].boundary_nbytes * 2 == whole.work["blocks.0"].boundary_nbytes
    assert more.forward_flops == 2 * whole.forward_flops


def test_a_factory_gives_any_model(factories: ModuleType) -> None:
    factories.make = lambda: Gpt(SHAPE)  # type: ignore[attr-defined]
    assert planned("plan_factories:make").parameters == SHAPE.parameters


def test_a_model_that_cannot_be_followed_is_estimated(factories: ModuleType) -> None:
    factories.make = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # type: ignore[attr-defined]
    plan = planned("plan_factories:make")
    assert not plan.is_traced
    assert plan.untraced.startswith("RuntimeError: ")
    assert "\n" not in plan.untraced
    assert plan.forward_flops == 2 * 2 * 32 * plan.parameters


def test_a_configuration_of_hugging_face_gives_its_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = planned(str(tmp_path))
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert plan.parameters == 3 * layer + 2 * 100 * 64 + 64
    assert plan.is_traced
    assert sum(name.startswith("model.layers.") for name in plan.order) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", "allowed: a config.json"),
        ("no_such_module_at_all:make", "cannot be imported"),
        ("math:pi_of", "cannot be imported"),
        ("missing/config.json", "cannot be read"),
        ("plan_factories:make", "returned a int"),
        ("plan_factories:fails", "fails with ZeroDivisionError"),
        ("math:pi", "is a float; it must be a function"),
        (":make", "cannot be imported: ValueError"),
        (".nowhere:make", "cannot be imported: TypeError"),
        ("plan_factories:", "cannot be imported"),
        ("x" * 5000, "allowed: a config.json"),
        ("nul\0byte", "allowed: a config.json"),
    ],
)
def test_sources_that_give_no_model_are_refused(source: str, message: str, factories: ModuleType) -> None:
    factories.make = lambda: 5  # type: ignore[attr-defined]
    factories.fails = lambda: 1 // 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=message):
        planned(source)


def test_a_configuration_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(ConfigError, match="'no such thing' is unknown to transformers"):
        planned(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a config.json of Hugging Face"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "makes no model of this"),
        ('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 0}', "makes no model of this"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "makes no model of this"),
        ('{"model_type": "llama", "architectures": 5}', "makes no model of this"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_configurations_that_make_no_model_are_refused(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        planned(str(tmp_path))


def test_a_model_without_parameters_is_refused(factories: ModuleType) -> None:
    factories.make = nn.Identity  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match="nothing to plan"):
        planned("plan_factories:make")
