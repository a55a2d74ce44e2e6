"""Weights from files stream into the shards: the same values as `load_state_dict`, every byte read and written once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import infinity
from infinity.weights.source import open_weights
from infinity.weights.torch_file import flat_part
from tests.conftest import MakeEngine, small_config
from tests.parity.loops import gathered_parameters
from tests.zoo import Attention, Frozen, Net, OddNet, batch, build, loss_of

_TIGHT = {"host": {"budget": "440KiB"}}
_ROOMY = {"host": {"budget": "64MiB"}}
Write = Callable[[dict[str, Tensor], Path], Path]


def _single(state: dict[str, Tensor], folder: Path) -> Path:
    save_file({name: t.clone() for name, t in state.items()}, folder / "model.safetensors")
    return folder


def _indexed(state: dict[str, Tensor], folder: Path) -> Path:
    """Three files whose names tell nothing of the order."""
    names = list(state)
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({n: state[n].clone() for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _torch(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def _wrapped(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": t for name, t in state.items()}}, folder / "w.ckpt")
    return folder / "w.ckpt"


_FORMATS: dict[str, Write] = {"single": _single, "indexed": _indexed, "torch": _torch, "wrapped": _wrapped}


def _empty(make: Callable[[], nn.Module]) -> nn.Module:
    with infinity.empty_init():
        return make()


def _state(make: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    state = build(make, seed=3).state_dict()
    return {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in state.items()}


def _check_same(model: nn.Module, plain: nn.Module, precision: str = "fp32") -> None:
    for name, parameter in gathered_parameters(model).items():
        expected = plain.get_parameter(name).detach()
        if precision == "bf16" and expected.is_floating_point():
            expected = expected.bfloat16().to(parameter.dtype)
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("is_built", [False, True], ids=["meta", "built"])
@pytest.mark.parametrize("host", [_TIGHT, _ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("write", _FORMATS)
def test_values_are_those_of_the_file(
    offload: MakeEngine, tmp_path: Path, write: str, precision: str, host: dict[str, Any], is_built: bool
) -> None:
    path = _FORMATS[write](_state(Net), tmp_path)
    model = build(Net) if is_built else _empty(Net)
    offload(model, weights=path, precision=precision, **host)
    _check_same(model, build(Net, seed=3), precision)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("host", [_TIGHT, _ROOMY], ids=["tight", "roomy"])
def test_other_dtypes_round_as_torch_does(
    offload: MakeEngine, tmp_path: Path, stored: torch.dtype, precision: str, host: dict[str, Any]
) -> None:
    state = _state(Net, stored)
    plain = build(Net)
    plain.load_state_dict(state)
    oracle, model = plain, _empty(Net)
    offload(oracle, precision=precision, **host)
    offload(model, weights=_single(state, tmp_path), precision=precision, **host)
    wanted, got = gathered_parameters(oracle), gathered_parameters(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_model_of_narrower_dtype_rounds_first(offload: MakeEngine, tmp_path: Path) -> None:
    """fp32 in the file, bf16 in the model, fp16 in the shard: rounded twice, as load_state_dict and offload do it."""
    state = {name: t * 1.001 for name, t in _state(Net).items()}
    plain = build(Net).bfloat16()
    plain.load_state_dict(state)
    model = build(Net).bfloat16()
    for each, settings in ((plain, {}), (model, {"weights": _single(state, tmp_path)})):
        offload(each, precision="fp16", **_TIGHT, **settings)
    wanted, got = gathered_parameters(plain), gathered_parameters(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("write", ["single", "torch"])
@pytest.mark.parametrize("make", [OddNet, Frozen, Attention], ids=lambda make: make.__name__)
def test_awkward_models(offload: MakeEngine, tmp_path: Path, make: Callable[[], nn.Module], write: str) -> None:
    """Empty tensors, scalars, integers, frozen parameters, modules without reset_parameters()."""
    model = _empty(make)
    offload(model, weights=_FORMATS[write](_state(make), tmp_path), **_TIGHT)
    _check_same(model, build(make, seed=3))


def test_every_byte_is_read_once_and_written_once(offload: MakeEngine, tmp_path: Path) -> None:
    state = _state(Net, torch.bfloat16)
    engine = offload(_empty(Net), weights=_indexed(state, tmp_path), host={"budget": "300KiB"})
    runtime = engine._runtime
    assert engine.loaded_weights is not None
    assert engine.loaded_weights.read_nbytes == sum(t.numel() * t.element_size() for t in state.values())
    assert runtime.store is not None
    stored = [g for g in runtime.groups if runtime.copies[g.index].is_stored]
    assert stored
    written = [r for r in runtime.store.stats.snapshot() if r.tag.kind == "param"]
    assert sum(r.moved_nbytes for r in written) == sum(g.shard_nbytes for g in stored)
    assert sum(r.payload_nbytes for r in written) == sum(g.shard_payload_nbytes for g in stored)


def test_memory_is_a_piece_and_not_a_tensor(offload: MakeEngine, tmp_path: Path) -> None:
    """The smallest budget of a model with one large matrix is less than the matrix."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3000, 2000, bias=False)
            self.second = nn.Linear(2000, 4)
            self.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    path = _single(_state(Large), tmp_path)
    engine = offload(_empty(Large), weights=path, host={"budget": "64MiB"}, device={"kind": "cpu", "budget": "64MiB"})
    during = [engine.plan.placement]
    assert during[0].host_minimum_nbytes < 3000 * 2000 * 4 * 1.2
    holders = engine._runtime.pool.peak_nbytes
    assert holders <= engine.plan.placement.host_budget_nbytes


def test_trains_like_plain_pytorch(offload: MakeEngine, tmp_path: Path) -> None:
    path = _single(_state(Net), tmp_path)
    plain, model = build(Net, seed=3), _empty(Net)
    offload(model, weights=path, **_TIGHT)
    losses = []
    for each, optimizer in (
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)),
        (model, infinity.AdamW(model.parameters(), lr=1e-2)),
    ):
        mine = []
        for step in range(3):
            loss = loss_of(each, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == losses[1]


# Names --------------------------------------------------------------------------------------------------------------


def test_missing_unexpected_and_wrong_shapes_are_all_named(tmp_path: Path) -> None:
    state = _state(Net)
    state["stranger"] = torch.zeros(2)
    del state["blocks.1.up.bias"]
    state["head.weight"] = torch.zeros(3, 37)
    path = _single(state, tmp_path)
    model = _empty(Net)
    with pytest.raises(infinity.CheckpointError) as caught:
        infinity.offload(model, infinity.Config(nvme={"paths": [tmp_path]}), weights=path)
    text = str(caught.value)
    assert "Missing key(s): 'blocks.1.up.bias'." in text
    assert "Unexpected key(s): 'stranger'." in text
    assert "size mismatch for head.weight: it has shape (3, 37) in the file, the shape in the model is (29, 37)" in text
    assert all(p.is_meta for p in model.parameters())  # refused before anything was touched


def test_wrong_shapes_are_refused_without_strict_too(tmp_path: Path) -> None:
    state = {**_state(Net), "head.weight": torch.zeros(3, 37)}
    with pytest.raises(infinity.CheckpointError, match=r"size mismatch for head\.weight"):
        infinity.offload(_empty(Net), weights=_single(state, tmp_path), strict=False)


@pytest.mark.parametrize("host", [_TIGHT, _ROOMY], ids=["tight", "roomy"])
def test_not_strict_keeps_a_built_model_and_tells(
    offload: MakeEngine, tmp_path: Path, host: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = _state(Net)
    del state["blocks.1.up.bias"], state["head.weight"]
    state["stranger"] = torch.zeros(2)
    plain, model = build(Net), build(Net)
    result = plain.load_state_dict(state, strict=False)
    offload(model, weights=_single(state, tmp_path), strict=False, **host)
    _check_same(model, plain)
    assert f"missing key(s): {', '.join(map(repr, result.missing_keys))}" in caplog.text
    assert "unexpected key(s): 'stranger'" in caplog.text


def test_not_strict_initialises_what_is_missing(offload: MakeEngine, tmp_path: Path) -> None:
    state = _state(Net)
    del state["blocks.1.up.bias"], state["head.weight"]
    model = _empty(Net)
    offload(model, weights=_single(state, tmp_path), strict=False, **_TIGHT)
    got = gathered_parameters(model)
    for name, value in got.items():
        if name in state:
            assert torch.equal(value, state[name]), name
        else:
            assert 0 < value.abs().max() <= 1 / 37**0.5, name


class _Pretrained(Net):
    """Initialises itself as models of transformers do, and leaves its linear layers as they were constructed."""

    base_model_prefix = ""
    config = None

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | nn.Embedding):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)


def test_what_init_weights_leaves_is_as_constructed(offload: MakeEngine, tmp_path: Path) -> None:
    plain = build(_Pretrained)
    torch.manual_seed(0)
    with torch.device("meta"):  # so that nothing of the construction is recorded
        model = _Pretrained()
    torch.manual_seed(0)
    offload(model, **_TIGHT)
    got = gathered_parameters(model)
    assert torch.equal(got["embed.weight"], torch.ones(29, 37))
    assert all(torch.equal(got[n], p) for n, p in plain.named_parameters() if "embed" not in n)


def test_missing_layers_get_numbers_of_their_own(offload: MakeEngine, tmp_path: Path) -> None:
    state = {n: t for n, t in _state(_Pretrained).items() if ".up.weight" not in n}
    model = _empty(_Pretrained)
    offload(model, weights=_single(state, tmp_path), strict=False, **_TIGHT)
    got = gathered_parameters(model)
    assert not torch.equal(got["blocks.0.up.weight"], got["blocks.1.up.weight"])
    assert all(torch.equal(got[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_parameters_are_found_under_either_name(offload: MakeEngine, tmp_path: Path, name: str) -> None:
    state = _state(lambda: Net(tied=True))
    wanted = state["embed.weight"]
    assert torch.equal(state["head.weight"], wanted)
    del state[{"embed.weight": "head.weight", "head.weight": "embed.weight"}[name]]
    model = _empty(lambda: Net(tied=True))
    offload(model, weights=_single(state, tmp_path), **_TIGHT)
    assert torch.equal(gathered_parameters(model)["embed.weight"], wanted)


def test_tied_parameters_with_both_names_take_the_last(offload: MakeEngine, tmp_path: Path) -> None:
    """As load_state_dict, which copies one after the other."""
    state = _state(lambda: Net(tied=True))
    state["head.weight"] = state["head.weight"] + 1
    plain, model = build(lambda: Net(tied=True)), _empty(lambda: Net(tied=True))
    plain.load_state_dict(state)
    offload(model, weights=_single(state, tmp_path), **_TIGHT)
    _check_same(model, plain)


class _WithBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(5))
        self.norm = nn.BatchNorm1d(37)


@pytest.mark.parametrize("is_built", [False, True], ids=["meta", "built"])
def test_buffers_are_loaded(offload: MakeEngine, tmp_path: Path, is_built: bool) -> None:
    state = _state(_WithBuffers)
    state["table"] += 7
    state["norm.running_mean"] += 0.5
    model = build(_WithBuffers) if is_built else _empty(_WithBuffers)
    offload(model, weights=_torch(state, tmp_path), **_TIGHT)
    assert torch.equal(model.get_buffer("table"), state["table"])
    assert torch.equal(model.get_buffer("norm.running_mean"), state["norm.running_mean"])
    assert model.get_buffer("norm.num_batches_tracked").item() == 0


def test_parameters_of_a_checkpoint_of_infinity(offload: MakeEngine, tmp_path: Path) -> None:
    first = build(_WithBuffers, seed=3)
    engine = offload(first, precision="bf16", **_TIGHT)
    engine.save(tmp_path / "saved")
    model = _empty(_WithBuffers)
    offload(model, weights=tmp_path / "saved", **_TIGHT)
    wanted, got = gathered_parameters(first), gathered_parameters(model)
    assert all(torch.equal(got[name], value.float()) for name, value in wanted.items())


def test_the_newest_of_a_series_of_checkpoints(offload: MakeEngine, tmp_path: Path) -> None:
    for seed in (3, 4):
        offload(build(Net, seed=seed), **_TIGHT).save(tmp_path / "run" / f"step{seed}", keep=2)
    model = _empty(Net)
    offload(model, weights=tmp_path / "run", **_TIGHT)
    _check_same(model, build(Net, seed=4))


@pytest.mark.parametrize("host", [_TIGHT, _ROOMY], ids=["tight", "roomy"])
def test_with_durable_steps(offload: MakeEngine, tmp_path: Path, host: dict[str, Any]) -> None:
    """What is in host memory for good lies in the swap files too: a process killed in its first step goes on."""
    path = _single(_state(Net), tmp_path)
    model = _empty(Net)
    engine = offload(model, weights=path, durability="step", **host)
    _check_same(model, build(Net, seed=3))
    engine.close()
    again = _empty(Net)
    config = small_config(tmp_path, durability="step", **host)
    with infinity.offload(again, config, weights=path, resume=True) as resumed:
        _check_same(again, build(Net, seed=3))
        assert resumed.loaded_weights is None


# Files --------------------------------------------------------------------------------------------------------------


def test_tensors_that_are_not_contiguous(offload: MakeEngine, tmp_path: Path) -> None:
    state = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in _state(Net).items()}
    assert not state["head.weight"].is_contiguous()
    model = _empty(Net)
    offload(model, weights=_torch(state, tmp_path), **_TIGHT)
    _check_same(model, build(Net, seed=3))


def test_a_model_whose_memory_is_transposed(offload: MakeEngine, tmp_path: Path) -> None:
    state = _state(Net)
    del state["blocks.0.up.bias"]  # so that its group is filled in the model's own memory
    model = build(Net)
    weight = model.get_parameter("blocks.0.up.weight")
    weight.data = weight.data.t().contiguous().t()
    offload(model, weights=_single(state, tmp_path), strict=False, **_TIGHT)
    assert torch.equal(gathered_parameters(model)["blocks.0.up.weight"], state["blocks.0.up.weight"])


def _damage(how: str, folder: Path) -> Path:
    path = folder / "model.safetensors"
    _single(_state(Net), folder)
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "nothing":
        path.unlink()
    elif how == "no index":
        (folder / "model.safetensors.index.json").write_text("[]")
        path.unlink()
    elif how == "an index that cannot be read":
        (folder / "model.safetensors.index.json").mkdir()
        path.unlink()
    elif how == "a file is missing":
        _indexed(_state(Net), folder)
        path.unlink()
        (folder / "model-1.safetensors").unlink()
    elif how == "not where the index says":
        _indexed(_state(Net), folder)
        path.unlink()
        save_file({"other": torch.zeros(1)}, folder / "model-1.safetensors")
    elif how == "twice":
        save_file(_state(Net), folder / "a.safetensors")
        path.rename(folder / "b.safetensors")
    elif how == "code":
        torch.save({"weight": torch.zeros(1), "path": Path("x")}, folder / "weights.pt")
        return folder / "weights.pt"
    elif how == "old":
        torch.save(_state(Net), folder / "weights.pt", _use_new_zipfile_serialization=False)
        return folder / "weights.pt"
    elif how == "no state":
        torch.save({"epoch": 3, "loss": 1.0}, folder / "weights.pt")
        return folder / "weights.pt"
    elif how == "zip":
        _torch(_state(Net), folder)
        (folder / "weights.pt").write_bytes((folder / "weights.pt").read_bytes()[:100])
        return folder / "weights.pt"
    elif how == "an index without end":
        (folder / "model.safetensors.index.json").write_text("[" * 100_000)
        path.unlink()
    elif how in ("sparse", "meta"):
        odd = torch.ones(2, 2).to_sparse() if how == "sparse" else torch.ones(2, 2, device="meta")
        torch.save({**_state(Net), "head.weight": odd}, folder / "weights.pt")
        return folder / "weights.pt"
    elif how == "complex":
        torch.save({**_state(Net), "head.weight": torch.ones(29, 37, dtype=torch.complex128)}, folder / "weights.pt")
        return folder / "weights.pt"
    elif how == "text":
        (folder / "weights.txt").write_text("")
        return folder / "weights.txt"
    return folder


_DAMAGES = {
    "truncated": r"model\.safetensors is damaged",
    "nothing": r"no weights in .*pytorch_model\.bin",
    "no index": r"index\.json is damaged: it is not an index",
    "an index that cannot be read": r"cannot read .*index\.json: Is a directory",
    "a file is missing": r"model-1\.safetensors is damaged: the file is missing",
    "not where the index says": r"model-1\.safetensors is damaged: it does not hold '",
    "twice": r"'\S+' is in several files",
    "code": r"holds more than tensors",
    "old": r"before version 1\.6",
    "no state": r"holds no state dict but 'epoch', 'loss'",
    "zip": r"weights\.pt is damaged",
    "an index without end": r"index\.json is damaged: it is not an index",
    "sparse": r"weights\.pt: 'head\.weight' is torch\.sparse_coo; save plain tensors",
    "meta": r"weights\.pt: 'head\.weight' is on the meta device, without values",
    "complex": r"dtype mismatch for head\.weight: it is torch\.complex128 in the file, and torch\.float32",
    "text": r"no file with weights.*\.safetensors",
}


@pytest.mark.parametrize("how", _DAMAGES)
def test_what_is_no_file_with_weights_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(infinity.CheckpointError, match=_DAMAGES[how]):
        infinity.offload(_empty(Net), weights=_damage(how, tmp_path))


def test_a_damaged_file_of_torch_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    """Every error is one of ours: a damaged pickle makes the unpickler fail in many ways."""
    torch.save({"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}, tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        (tmp_path / "d.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            with open_weights(tmp_path / "d.pt") as weights:
                for name, stored in weights.tensors.items():
                    weights.read(name, 0, torch.empty(stored.numel, dtype=stored.dtype))
        except infinity.CheckpointError as error:
            refused += 1
            assert "d.pt" in str(error)
    assert refused > len(whole) // 30


def test_a_lazy_model_is_refused_by_name(tmp_path: Path) -> None:
    path = _single({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path)
    with pytest.raises(infinity.UnsupportedModelError, match="'weight' is lazy"):
        infinity.offload(nn.LazyLinear(2), small_config(tmp_path), weights=path)


def test_rows_of_a_transposed_tensor_are_read_without_the_others(tmp_path: Path) -> None:
    """Also where a dimension of one is before them; what is read is the same as in one piece."""
    for number, shape in enumerate([(1, 40, 30), (4, 10, 30), (1, 1, 1200)]):
        tensor = torch.arange(1200.0).view(shape).transpose(-1, -2)
        torch.save({"weight": tensor}, tmp_path / f"{number}.pt")
        with open_weights(tmp_path / f"{number}.pt") as weights:
            for start, numel in [(0, 1200), (7, 5), (295, 10), (1199, 1), (13, 900)]:
                into = torch.empty(numel)
                weights.read("weight", start, into)
                assert torch.equal(into, tensor.reshape(-1)[start : start + numel])
        row = tensor[0, 0].numel()
        copied = flat_part(tensor, 7, 5).untyped_storage()
        assert copied.nbytes() <= 4 * (5 + 2 * row) or copied.data_ptr() == tensor.untyped_storage().data_ptr()


def test_a_path_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(infinity.CheckpointError, match="nothing is there"):
        open_weights(tmp_path / "nowhere")


def test_other_ways_to_give_weights_are_told_of_the_one_there_is(tmp_path: Path) -> None:
    """A file that is no checkpoint; values for a model that has no memory; tied parameters that torch untied."""
    values = build(Net).state_dict()
    torch.save(values, tmp_path / "x.pt")
    with infinity.offload(build(Net), small_config(tmp_path)) as engine:
        told = r"infinity\.offload\(\.\.\., weights=PATH\); `infinity checkpoint import`"
        with pytest.raises(infinity.CheckpointError, match=told):
            engine.load(tmp_path / "x.pt")
    with infinity.empty_init():
        model = Net()
    with warnings.catch_warnings(action="ignore"):  # torch tells of the copy that does nothing
        model.load_state_dict(values)
    with pytest.raises(infinity.UnsupportedModelError, match=r"weights=FILE\), in place of model\.load_state_dict"):
        infinity.offload(model, small_config(tmp_path))
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    tied.load_state_dict(tied.state_dict(), assign=True)
    with pytest.raises(infinity.UnsupportedModelError, match=r"assign=True\) untied them.*weights=FILE"):
        infinity.offload(tied, small_config(tmp_path))
