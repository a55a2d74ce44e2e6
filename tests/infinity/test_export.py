"""Export: what transformers and PEFT load gives the logits of the trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import infinity
from infinity.weights.export import Exported, ExportOptions, export_checkpoint
from tests.conftest import MakeEngine
from tests.full_disk import full_disk
from tests.parity import hf_models
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, batch, build, loss_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT

_BUDGETS = {"host": {"budget": "4MiB"}, "device": {"kind": "cpu", "budget": "64MiB"}}
_TIGHT = {"host": {"budget": "440KiB"}}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _trained(offload: MakeEngine, model: nn.Module, folder: Path, **settings: Any) -> dict[str, Tensor]:
    """Train a step and save; the parameters that the model computes with."""
    engine = offload(model, **{**_BUDGETS, **settings})
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        loss = loss_of(model, batch(step)) if isinstance(model, Net) else hf_models.hf_loss(
            model, hf_models.token_batch(step)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    engine.save(folder, optimizer=optimizer)
    model.eval()
    return gathered_parameters(model)


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**hf_models.inputs_of(model, hf_models.token_batch(9))).logits
    return logits


@pytest.mark.parametrize(
    ("kind", "shard_nbytes"),
    [("gpt2", 20_000), ("llama", None), ("qwen2", None), ("mixtral", 20_000), ("bert", None), ("t5", 20_000)],
)
def test_transformers_loads_it(offload: MakeEngine, tmp_path: Path, kind: str, shard_nbytes: int | None) -> None:
    torch.manual_seed(0)
    model = getattr(hf_models, kind)()
    _trained(offload, model, tmp_path / "saved")
    exported = export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_nbytes=shard_nbytes))
    assert (len(exported.written.files) > 1) == (shard_nbytes is not None)
    assert exported.kind == "model"
    assert "config.json" in exported.beside
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(_logits(loaded.eval()), _logits(model))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
def test_dtypes(offload: MakeEngine, tmp_path: Path, precision: str, dtype: str | None) -> None:
    """By default what the model computed with, exactly; else the fp32 master, converted as torch does it."""
    model = build(Net)
    computed = _trained(offload, model, tmp_path / "saved", precision=precision, **_TIGHT)
    export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(dtype=dtype and _DTYPES[dtype]))
    export_checkpoint(tmp_path / "saved", tmp_path / "master", ExportOptions(dtype=torch.float32))
    got, master = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "master"))
    wanted_dtype = _DTYPES[dtype or precision]
    assert {t.dtype for t in got.values()} == {wanted_dtype}
    for name, value in got.items():
        if wanted_dtype is _DTYPES[precision]:
            assert torch.equal(value.to(computed[name].dtype), computed[name]), name
        else:
            assert torch.equal(value, master[name].to(wanted_dtype)), name


def test_shards_are_cut_by_size_and_indexed(offload: MakeEngine, tmp_path: Path) -> None:
    model = build(Net)
    computed = _trained(offload, model, tmp_path / "saved", **_TIGHT)
    written = export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_nbytes=20_000)).written
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.nbytes == sum(t.numel() * 4 for t in computed.values())
    assert sorted({*index["weight_map"].values()}) == sorted(written.files)
    found: dict[str, Tensor] = {}
    for name in written.files:
        assert (tmp_path / "out" / name).stat().st_size < 20_000 + 4_000
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
        found |= load_file(tmp_path / "out" / name)
    assert found.keys() == computed.keys()
    assert all(torch.equal(found[name], computed[name]) for name in found)


def test_what_is_exported_loads_again_with_buffers(offload: MakeEngine, tmp_path: Path) -> None:
    class Buffered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(5))

    model = build(Buffered)
    model.get_buffer("table").add_(3)
    computed = _trained(offload, model, tmp_path / "saved", **_TIGHT)
    export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(shard_nbytes=20_000))
    with infinity.empty_init():
        again = Buffered()
    offload(again, weights=tmp_path / "out", **_TIGHT)
    got = gathered_parameters(again)
    assert all(torch.equal(got[name], computed[name]) for name in computed)
    assert torch.equal(again.get_buffer("table"), model.get_buffer("table"))


def test_configuration_is_copied_from_a_folder(offload: MakeEngine, tmp_path: Path) -> None:
    model = hf_models.llama()
    model.config.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors.index.json").write_text("{}")
    computed = _trained(offload, model, tmp_path / "saved", precision="bf16")
    exported = export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(config=tmp_path / "base"))
    assert sorted(exported.beside) == ["config.json", "tokenizer.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in loaded.named_parameters():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value.to(computed[name].dtype), computed[name]), name


# From the engine ----------------------------------------------------------------------------------------------------


def test_the_engine_exports(offload: MakeEngine, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf_models.llama()
    engine = offload(model, **_BUDGETS)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    hf_models.hf_loss(model, hf_models.token_batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    engine.export(tmp_path / "folder" / "out", shard_size="20KB")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["out"]
    loaded = type(model).from_pretrained(tmp_path / "folder" / "out").eval()
    assert torch.equal(_logits(loaded), _logits(model.eval()))
    with pytest.raises(infinity.ConfigError, match=r"shard_size: .*5GiB or 5GB"):
        engine.export(tmp_path / "folder" / "other", shard_size="5G")
    with pytest.raises(infinity.ConfigError, match="no adapter to merge"):
        engine.export(tmp_path / "folder" / "other", merge=True)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["out"]


# Adapters -----------------------------------------------------------------------------------------------------------


def _adapted(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    modules = {"llama": ["q_proj", "down_proj", "embed_tokens"], "gpt2": ["c_attn", "c_proj"]}.get(kind)
    chosen = {"r": 4, "lora_alpha": 16, "target_modules": modules, "task_type": "CAUSAL_LM", **settings}
    if kind == "gpt2":
        chosen["fan_in_fan_out"] = True
    adapted: nn.Module = peft.get_peft_model(getattr(hf_models, kind)(), peft.LoraConfig(**chosen))
    return adapted


def _plain_base(kind: str) -> nn.Module:
    torch.manual_seed(0)
    base: nn.Module = getattr(hf_models, kind)()
    return base


_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "rslora": ("llama", {"use_rslora": True, "alpha_pattern": {"down_proj": 3}, "rank_pattern": {"q_proj": 2}}),
    "head": ("llama", {"modules_to_save": ["lm_head"]}),
    "all biases": ("gpt2", {"bias": "all"}),
    "biases of layers": ("gpt2", {"bias": "lora_only"}),
}
_NOT_MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True, "target_modules": ["q_proj"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3, 5]}}),
    "lora_bias": ("gpt2", {"lora_bias": True}),
}


@pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape")  # PEFT takes a bias of lora_B for a matrix
@pytest.mark.parametrize("kind", _KINDS | _NOT_MERGED)
def test_peft_loads_an_adapter(offload: MakeEngine, tmp_path: Path, kind: str) -> None:
    base, settings = (_KINDS | _NOT_MERGED)[kind]
    model = _adapted(base, **settings)
    _trained(offload, model, tmp_path / "saved")
    exported = export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions())
    assert exported.kind == "adapter"
    assert exported.written.files == ("adapter_model.safetensors",)
    expected = peft.get_peft_model_state_dict(_adapted(base, **settings), save_embedding_layers=False)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="pt") as file:
        assert set(file.keys()) == expected.keys()
    loaded = peft.PeftModel.from_pretrained(_plain_base(base), tmp_path / "out").eval()
    assert torch.equal(_logits(loaded), _logits(model))


@pytest.mark.parametrize("kind", _KINDS)
def test_merged_weights_are_those_of_peft(offload: MakeEngine, tmp_path: Path, kind: str) -> None:
    base, settings = _KINDS[kind]
    model = _adapted(base, **settings)
    _trained(offload, model, tmp_path / "saved")
    exported = export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(merge=True, shard_nbytes=30_000))
    assert exported.kind == "merged model"
    export_checkpoint(tmp_path / "saved", tmp_path / "adapter", ExportOptions())
    wanted = peft.PeftModel.from_pretrained(_plain_base(base), tmp_path / "adapter").merge_and_unload().eval()
    got, report = type(wanted).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, value in got.named_parameters():
        assert torch.allclose(value, wanted.get_parameter(name), atol=1e-6), name
    assert torch.allclose(_logits(got.eval()), _logits(model), atol=1e-5)


def test_chunks_of_a_merged_weight_need_not_be_rows(
    offload: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trained(offload, _adapted("gpt2"), tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "whole", ExportOptions(merge=True))
    monkeypatch.setattr("infinity.weights.outgoing.CHUNK_NUMEL", 77)
    export_checkpoint(tmp_path / "saved", tmp_path / "cut", ExportOptions(merge=True))
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.allclose(whole[name], cut[name], atol=1e-7) for name in whole)


# Refused ------------------------------------------------------------------------------------------------------------


def _export(offload: MakeEngine, folder: Path, model: nn.Module, options: ExportOptions) -> Exported:
    _trained(offload, model, folder / "saved")
    return export_checkpoint(folder / "saved", folder / "out", options)


_TIED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "neither": {"target_modules": ["q_proj"]},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("kind", _TIED)
def test_tied_weights_of_which_an_adapter_changes_one_are_merged_apart(
    offload: MakeEngine, tmp_path: Path, kind: str
) -> None:
    """What is merged computes what was trained, of an engine and of a checkpoint; PEFT's own merge would not."""
    model = _adapted("qwen2", **_TIED[kind])
    engine = offload(model, **_BUDGETS)
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    for step in range(2):
        hf_models.hf_loss(model, hf_models.token_batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    wanted = _logits(model.eval())
    engine.save(tmp_path / "saved")
    engine.export(tmp_path / "live", merge=True, shard_size=None)
    export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(merge=True))
    assert load_file(tmp_path / "live" / "model.safetensors").keys() == (
        load_file(tmp_path / "out" / "model.safetensors").keys()
    )
    for name in ("live", "out"):
        got, report = type(model.get_base_model()).from_pretrained(tmp_path / name, output_loading_info=True)  # type: ignore[operator]
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert got.config.tie_word_embeddings == (kind == "neither")
        assert torch.allclose(_logits(got.eval()), wanted, atol=1e-4)


_REFUSED = {
    "dora": "lora_magnitude_vector",
    "tokens": "trainable_tokens_delta",
    "lora_bias": r"lora_B\.default\.bias",
    "parameters": r"lora_A\.default\.weight",
    "alora": "alora_invocation_tokens",
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_kinds_of_adapters_that_cannot_be_merged_are_named(offload: MakeEngine, tmp_path: Path, kind: str) -> None:
    """None is left out in silence."""
    others = {
        "parameters": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
        "alora": ("llama", {"target_modules": ["q_proj"], "alora_invocation_tokens": [1]}),
    }
    base, settings = (_NOT_MERGED | others)[kind]
    model = _adapted(base, **settings)
    offload(model, **_BUDGETS).save(tmp_path / "saved")
    with pytest.raises(infinity.CheckpointError, match=rf"{_REFUSED[kind]}.*cannot be merged here"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(merge=True))
    assert not (tmp_path / "out").exists()


def test_a_relative_of_lora_is_not_taken_for_it(offload: MakeEngine, tmp_path: Path) -> None:
    """Its factors have other names, so that an export would be empty of them."""
    torch.manual_seed(0)
    settings = peft.AdaLoraConfig(init_r=4, total_step=10, tinit=1, tfinal=1, target_modules=["q_proj"])
    offload(peft.get_peft_model(hf_models.llama(), settings), **_BUDGETS).save(tmp_path / "saved")
    for merge in (False, True):
        with pytest.raises(infinity.CheckpointError, match="no LoRA adapter 'default'"):
            export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions(merge=merge))
    assert not (tmp_path / "out").exists()


class _Wrapper(nn.Module):
    """Names its parameters as PEFT does, and is none of its models."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Net()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.base_model.model(ids)  # type: ignore[operator, union-attr]
        return out


def test_names_alone_make_no_adapter(offload: MakeEngine, tmp_path: Path) -> None:
    model = build(_Wrapper)
    offload(model, **_BUDGETS).export(tmp_path / "out", shard_size=None)
    computed = gathered_parameters(model)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == computed.keys()
    assert all(torch.equal(found[name], computed[name]) for name in found)


class _Classifier(nn.Module):
    """With a module that has buffers, to be trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def test_buffers_of_modules_that_train_whole_are_the_adapters(offload: MakeEngine, tmp_path: Path) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = peft.get_peft_model(
            _Classifier(), peft.LoraConfig(r=2, target_modules=["first"], modules_to_save=["norm"])
        )
        return made

    model = adapted()
    engine = offload(model, **_BUDGETS)
    model(torch.randn(5, 6))  # moves the statistics
    engine.export(tmp_path / "adapter")
    engine.export(tmp_path / "merged", merge=True, shard_size=None)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == peft.get_peft_model_state_dict(adapted()).keys()
    mean = model.get_buffer("base_model.model.norm.modules_to_save.default.running_mean")
    assert mean.abs().sum() > 0
    assert torch.equal(found["base_model.model.norm.running_mean"], mean)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == _Classifier().state_dict().keys()
    assert torch.equal(merged["norm.running_mean"], mean)


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize(("text", "told"), [("[1]", "holds list"), ("{", "is not JSON"), ("[" * 100_000, "not JSON")])
def test_settings_that_are_none_are_told(
    offload: MakeEngine, tmp_path: Path, file: str, text: str, told: str
) -> None:
    model = _adapted("llama") if file == "adapter_config.json" else hf_models.llama()
    engine = offload(model, **_BUDGETS)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / file).write_text(text)
    with pytest.raises(infinity.CheckpointError, match=rf"{file}.*{told}"):
        engine.export(tmp_path / "out", config=tmp_path / "given")
    assert not (tmp_path / "out").exists()


def test_merging_what_has_no_adapter_is_refused(offload: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="no adapter to merge"):
        _export(offload, tmp_path, hf_models.llama(), ExportOptions(merge=True))


def test_an_adapter_that_is_not_there_is_refused(offload: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(infinity.CheckpointError, match=r"adapter_config\.other\.json is missing"):
        _export(offload, tmp_path, _adapted("llama"), ExportOptions(adapter="other"))


def test_a_folder_that_is_there_is_not_replaced(offload: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(infinity.CheckpointError, match="not replaced"):
        _export(offload, tmp_path, build(Net), ExportOptions())
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_an_export_takes_the_place_of_an_earlier_one(offload: MakeEngine, tmp_path: Path) -> None:
    """Also one of other files; what somebody put beside it stays, and a run that goes on keeps its last export."""
    torch.manual_seed(0)
    model, out = hf_models.llama(), tmp_path / "out"
    engine = offload(model, **_BUDGETS)
    engine.export(out, shard_size="20KB")
    before = {path.name for path in out.iterdir()}
    (out / "tokenizer.json").write_text("mine")
    with infinity.gathered(model), torch.no_grad():
        model.lm_head.weight.mul_(2)
    engine.export(out, shard_size=None)
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "generation_config.json"} | {
        "tokenizer.json"
    }
    assert len(before) > 5
    assert (out / "tokenizer.json").read_text() == "mine"
    loaded = type(model).from_pretrained(out).eval()
    assert torch.equal(_logits(loaded), _logits(model.eval()))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_stands_beside_an_export_and_would_be_lost_is_named(offload: MakeEngine, tmp_path: Path) -> None:
    engine, out = offload(build(Net), **_BUDGETS), tmp_path / "out"
    engine.export(out)
    (out / "runs").mkdir()
    with pytest.raises(infinity.CheckpointError, match=r"beside it runs, which would be lost"):
        engine.export(out)
    (out / "runs").rmdir()
    (out / "model.safetensors.index.json").write_text("of another model")
    with pytest.raises(infinity.CheckpointError, match=r"beside it model.safetensors.index.json"):
        engine.export(out, shard_size="20KB")
    assert (out / "model.safetensors.index.json").read_text() == "of another model"


def _damage(checkpoint: Path) -> None:
    """Flip a bit in the largest file of shards."""
    path = max(checkpoint.glob("group-*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[6000] ^= 1
    path.write_bytes(data)


def test_a_failed_export_leaves_the_earlier_one(offload: MakeEngine, tmp_path: Path) -> None:
    _export(offload, tmp_path, build(Net), ExportOptions())
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    _damage(tmp_path / "saved")
    with pytest.raises(infinity.CheckpointError, match="wrong checksum"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_full_disk_leaves_the_earlier_export(offload: MakeEngine, tmp_path: Path) -> None:
    engine, out = offload(build(Net), **_BUDGETS), tmp_path / "made" / "out"
    engine.export(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for shard_size in (None, "20KB"):
        with (
            full_disk(10_000),
            pytest.raises(infinity.CheckpointError, match=r"/out could not be written: File too large; the one that"),
        ):
            engine.export(out, shard_size=shard_size)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]


def test_damage_is_found_and_nothing_left(offload: MakeEngine, tmp_path: Path) -> None:
    _trained(offload, build(Net), tmp_path / "saved", **_TIGHT)
    _damage(tmp_path / "saved")
    with pytest.raises(infinity.CheckpointError, match="wrong checksum"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()
