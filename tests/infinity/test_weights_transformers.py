"""Models of transformers and PEFT: initialised from `meta` with plain construction's values, and loaded from files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.parity import hf_models
from tests.parity.loops import gathered_parameters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT

_KINDS = ("gpt2", "llama", "mistral", "qwen2", "mixtral", "bert", "t5", "vit", "whisper")
_BUDGETS = {"host": {"budget": "4MiB"}, "device": {"kind": "cpu", "budget": "64MiB"}}


def _make(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(hf_models, kind)()
    return model.eval()


def _empty(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with infinity.empty_init():
        model: nn.Module = getattr(hf_models, kind)()
    return model.eval()


def _meta(kind: str, seed: int = 0) -> nn.Module:
    """Without a record of how ordinary construction gives values; drawn from the generator as it then is."""
    with torch.device("meta"):
        model = _make(kind)
    torch.manual_seed(seed)
    return model


def _different(model: nn.Module, plain: nn.Module) -> list[str]:
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    got = gathered_parameters(model) | dict(model.named_buffers())
    assert got.keys() == wanted.keys()
    return [name for name, value in got.items() if not torch.equal(value, wanted[name])]


@pytest.mark.parametrize("make_empty", [_empty, _meta])
@pytest.mark.parametrize("kind", _KINDS)
def test_same_values_as_plain_construction(
    offload: MakeEngine, kind: str, make_empty: Callable[[str, int], nn.Module]
) -> None:
    plain = _make(kind, seed=5)
    after = torch.get_rng_state()
    model = make_empty(kind, 5)
    assert all(p.is_meta for p in model.parameters())
    offload(model, **_BUDGETS)
    if kind == "vit" and make_empty is _meta:  # its constructor calls randn for its embeddings, which nothing repeats
        _check_alike(model, plain)
        return
    assert _different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), after)


def _check_alike(model: nn.Module, plain: nn.Module) -> None:
    for name, value in gathered_parameters(model).items():
        wanted = plain.get_parameter(name)
        assert value.isfinite().all(), name
        if wanted.numel() > 100:
            assert torch.allclose(value.std(), wanted.std(), rtol=0.3), name


@pytest.mark.parametrize("kind", _KINDS)
def test_loads_what_transformers_saves(offload: MakeEngine, tmp_path: Path, kind: str) -> None:
    """Sharded, in the format that the library writes, experts one by one where it does so."""
    saved = _make(kind, seed=5)
    saved.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists()
    model = _empty(kind)
    offload(model, weights=tmp_path / "saved", **_BUDGETS)
    assert _different(model, type(saved).from_pretrained(tmp_path / "saved")) == []


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(hf_models.token_batch(0)).logits
    return logits


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("part", ["base in head", "head in base"])
def test_prefix_of_the_base_model(offload: MakeEngine, tmp_path: Path, kind: str, part: str) -> None:
    whole = _make(kind, seed=5)
    base = whole.base_model
    saved, wanted = (base, whole) if part == "base in head" else (whole, base)
    saved.save_pretrained(tmp_path / "saved")
    with infinity.empty_init():
        model = type(wanted)(wanted.config).eval()
    offload(model, weights=tmp_path / "saved", strict=False, **_BUDGETS)
    got = gathered_parameters(model)
    shared = [name for name in got if not name.startswith("lm_head")]
    assert shared
    assert all(torch.equal(got[name], wanted.get_parameter(name)) for name in shared)


def test_a_head_that_files_lack_is_initialised_alone(offload: MakeEngine, tmp_path: Path) -> None:
    """As from_pretrained does; the random numbers of construction are not drawn for the rest of the model."""
    whole = _make("llama", seed=5)
    whole.base_model.save_pretrained(tmp_path / "saved")
    model = _empty("llama", 9)
    engine = offload(model, weights=tmp_path / "saved", strict=False, **_BUDGETS)
    assert engine.loaded_weights is not None
    assert engine.loaded_weights.missing_keys == ("lm_head.weight",)
    torch.manual_seed(9)
    wanted = torch.empty(hf_models.VOCAB, 32).normal_(0, 0.02)
    assert torch.equal(gathered_parameters(model)["lm_head.weight"], wanted)


def test_former_names(offload: MakeEngine, tmp_path: Path) -> None:
    """BERT's files once said gamma and beta."""
    saved = _make("bert", seed=5)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in saved.state_dict().items()
    }
    assert any("gamma" in name for name in state)
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = _empty("bert")
    offload(model, weights=tmp_path, **_BUDGETS)
    assert _different(model, saved) == []


def test_experts_that_are_missing_are_refused(tmp_path: Path) -> None:
    _make("mixtral").save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "saved" / "model.safetensors"
    state = load_file(path)
    name = next(n for n in state if ".experts.2." in n)
    del state[name]
    save_file(state, path)
    with pytest.raises(infinity.CheckpointError, match=r"experts.*not supported|size mismatch"):
        infinity.offload(_empty("mixtral"), weights=path)


# PEFT ---------------------------------------------------------------------------------------------------------------


def _adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def test_base_of_a_peft_model_loads_and_adapters_start_as_new(offload: MakeEngine, tmp_path: Path) -> None:
    saved = _make("llama", seed=5)
    saved.save_pretrained(tmp_path / "saved")
    with infinity.empty_init():
        model = _adapted(_make("llama"))
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(7)
    offload(model, weights=tmp_path / "saved", **_BUDGETS)
    got = gathered_parameters(model)
    for name, value in got.items():
        if "lora_A" in name:
            assert 0 < value.abs().max() <= 1 / 32**0.5 + 1e-6, name
        elif "lora_B" in name:
            assert not value.any(), name
        else:
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert torch.equal(value, saved.get_parameter(plain)), name
    assert torch.equal(_logits(model.eval()), _logits(saved))


@pytest.mark.parametrize("kind", ["tokens", "oft", "two"])
def test_base_of_other_peft_models_loads(offload: MakeEngine, tmp_path: Path, kind: str) -> None:
    """Whatever the parts of an adapter are called, and however often a module is wrapped."""
    saved = _make("llama", seed=5)
    saved.save_pretrained(tmp_path / "saved")
    targets = ["q_proj", "down_proj"]
    model: Any
    if kind == "oft":
        model = peft.get_peft_model(_make("llama"), peft.OFTConfig(r=0, oft_block_size=8, target_modules=targets))
    else:
        tokens = {"embed_tokens": [1, 3]} if kind == "tokens" else None
        config = peft.LoraConfig(r=4, target_modules=targets, trainable_token_indices=tokens, modules_to_save=["norm"])
        model = peft.get_peft_model(_make("llama"), config)
    if kind == "two":
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    offload(model, weights=tmp_path / "saved", **_BUDGETS)
    got = gathered_parameters(model)
    found = {n: v for n, v in got.items() if n.endswith((".base_layer.weight", "original_module.weight"))}
    assert len(found) >= 6
    for name, value in found.items():
        plain = re.sub(r"\.(base_layer|original_module|token_adapter)\b", "", name.removeprefix("base_model.model."))
        assert torch.equal(value, saved.get_parameter(plain)), name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("init", [True, "gaussian"], ids=str)
@pytest.mark.parametrize("contexts", [1, 2])
def test_adapters_start_with_plain_construction_s_values(
    offload: MakeEngine, kind: str, init: bool | str, contexts: int
) -> None:
    """Built under one context, or the adapters under a second one."""
    targets = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}[kind]
    is_conv = kind == "gpt2"
    config = peft.LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=init, fan_in_fan_out=is_conv
    )
    plain = peft.get_peft_model(_make(kind, seed=5), config)
    after = torch.get_rng_state()
    if contexts == 1:
        torch.manual_seed(5)
        with infinity.empty_init():
            model = peft.get_peft_model(getattr(hf_models, kind)(), config)
    else:
        base = _empty(kind, 5)
        with infinity.empty_init():
            model = peft.get_peft_model(base, config)
    offload(model, **_BUDGETS)
    assert _different(model, plain) == []
    assert torch.equal(torch.get_rng_state(), after)


def test_adapters_train_like_plain_peft(offload: MakeEngine, tmp_path: Path) -> None:
    _make("llama", seed=5).save_pretrained(tmp_path / "saved")
    losses = []
    plain = _adapted(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved"))
    with infinity.empty_init():
        model = _adapted(_make("llama"))
    offload(model, weights=tmp_path / "saved", init_fn=_constant, **_BUDGETS)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            nn.init.constant_(parameter, 0.01)
    makers: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.AdamW, infinity.AdamW)
    for each, make in zip((plain, model), makers, strict=True):
        trained = [p for p in each.parameters() if p.requires_grad]
        optimizer = make(trained, lr=1e-2, **({"fused": True} if make is torch.optim.AdamW else {}))
        mine = []
        for step in range(3):
            ids = hf_models.token_batch(step)
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == losses[1]


def _constant(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.01)


# What nothing initialises -------------------------------------------------------------------------------------------


def test_a_parameter_that_init_weights_leaves_out_is_named(offload: MakeEngine) -> None:
    class WithScale(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: transformers.LlamaConfig) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.empty(3))

    with infinity.empty_init():
        model = WithScale(_make("llama").config)
    with pytest.raises(infinity.UnsupportedModelError, match=r"'scale' is left uninitialised.*init_fn"):
        offload(model, **_BUDGETS)


def test_a_parameter_that_init_fn_leaves_out_is_named(offload: MakeEngine) -> None:
    def forgetful(module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            _constant(module)

    with pytest.raises(infinity.UnsupportedModelError, match=r"w[pt]e\.weight' is left uninitialised by init_fn"):
        offload(_empty("gpt2"), init_fn=forgetful, **_BUDGETS)
