"""Checkpoints through torch.distributed.checkpoint, and state dicts with real tensors, both ways and bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict as torch_get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict as torch_set_state_dict

import infinity
from infinity.checkpoint.dcp_reader import InfinityReader, _Offered, _read_box
from infinity.checkpoint.dcp_writer import InfinityWriter
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.reshard import reshard_checkpoint
from infinity.state_dicts import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from tests.zoo import Frozen, Net, build, train

MakeEngine = Callable[..., infinity.Engine]
_TIGHT = {"host": {"budget": "300KiB"}}
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled|unavailable|not initialized).*")


class Buffered(Net):
    """With a persistent buffer, and the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("count", torch.arange(3))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        same(value, other[name]) if isinstance(value, dict) else torch.equal(value, other[name])
        for name, value in one.items()
    )


@pytest.fixture
def plain() -> tuple[nn.Module, torch.optim.AdamW, list[float]]:
    """Three steps of plain PyTorch; losses of two more are made by the tests."""
    model = build(Buffered)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer, train(model, optimizer, 0, 3)


def make(offload: MakeEngine, **settings: Any) -> tuple[nn.Module, infinity.Engine, infinity.AdamW]:
    model = build(Buffered, seed=1)
    engine = offload(model, **_TIGHT, **settings)
    return model, engine, infinity.AdamW(model.parameters(), lr=1e-3)


def test_a_checkpoint_is_read_into_a_plain_module(offload: MakeEngine, tmp_path: Path, plain: Any) -> None:
    """Parameters, buffers and optimizer: what comes after is what comes after in the engine."""
    model, engine, optimizer = make(offload)
    train(model, optimizer, 0, 3)
    engine.save(tmp_path / "saved")
    other, theirs, _ = plain
    model_state, optim_state = torch_get_state_dict(other, theirs)
    state = {"model": model_state, "optim": optim_state}
    partly = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=InfinityReader(tmp_path / "saved"), planner=partly)
    torch_set_state_dict(other, theirs, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert theirs.param_groups[0]["lr"] == 1e-3
    assert theirs.param_groups[0]["betas"] == (0.9, 0.999)
    assert train(other, theirs, 3, 5) == train(model, optimizer, 3, 5)
    alone = {name: torch.full_like(value, 7) for name, value in other.state_dict().items()}
    dcp.load(alone, storage_reader=InfinityReader(tmp_path / "saved"))
    engine.load(tmp_path / "saved")
    assert same(alone, get_model_state_dict(engine))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plain_module_is_written_for_an_engine(
    offload: MakeEngine, tmp_path: Path, plain: Any, precision: str
) -> None:
    other, theirs, _ = plain
    model_state, optim_state = torch_get_state_dict(other, theirs)
    writer = InfinityWriter(tmp_path / "saved", other)
    dcp.save({"model": model_state, "optim": optim_state, "epoch": 3}, storage_writer=writer)
    model, engine, optimizer = make(offload, precision=precision)
    assert engine.load(tmp_path / "saved", optimizer=optimizer) == {"epoch": 3}
    assert optimizer.param_groups[0]["lr"] == 1e-2
    found = get_state_dict(engine, optimizer)
    assert same(found[0], other.state_dict())
    assert same(found[1]["state"], optim_state["state"])
    if precision == "fp32":
        assert train(model, optimizer, 3, 5) == train(other, theirs, 3, 5)


def test_only_a_model(offload: MakeEngine, tmp_path: Path, plain: Any) -> None:
    other = plain[0].to(torch.bfloat16)
    dcp.save(other.state_dict(), storage_writer=InfinityWriter(tmp_path / "saved", other))
    _, engine, _ = make(offload, precision="bf16")
    engine.load(tmp_path / "saved")
    found = get_model_state_dict(engine)
    assert found["embed.weight"].dtype is torch.float32
    assert same(
        found,
        {name: value.float() if value.is_floating_point() else value for name, value in other.state_dict().items()},
    )
    with CheckpointReader(tmp_path / "saved") as checkpoint:
        assert checkpoint.verify() > 0
        assert not any(entry.step for entry in checkpoint.index.parameters.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dicts_there_and_back(offload: MakeEngine, precision: str) -> None:
    model, engine, optimizer = make(offload, precision=precision)
    train(model, optimizer, 0, 2)
    saved = get_state_dict(engine, optimizer)
    losses = train(model, optimizer, 2, 4)
    assert not same(saved[0], get_model_state_dict(engine))
    set_state_dict(engine, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    again = get_state_dict(engine, optimizer)
    assert same(saved[0], again[0])
    assert same(saved[1]["state"], again[1]["state"])
    assert train(model, optimizer, 2, 4) == losses
    fresh_model, fresh, fresh_optimizer = make(offload, precision=precision, chunk="32KiB")
    set_state_dict(fresh, fresh_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert train(fresh_model, fresh_optimizer, 2, 4) == losses


def test_state_dicts_are_those_of_plain_pytorch(offload: MakeEngine, plain: Any) -> None:
    other, theirs, _ = plain
    _, engine, optimizer = make(offload)
    model_state, optim_state = torch_get_state_dict(other, theirs)
    set_state_dict(engine, optimizer, model_state_dict=other.state_dict(), optim_state_dict=optim_state)
    mine = get_state_dict(engine, optimizer)
    assert list(mine[0]) == list(model_state)
    assert same(mine[0], model_state)
    assert same(mine[1]["state"], optim_state["state"])
    assert mine[1]["param_groups"][0]["params"] == optim_state["param_groups"][0]["params"]
    torch_set_state_dict(other, theirs, model_state_dict=mine[0], optim_state_dict=mine[1])


def test_frozen_parameters_keep_their_dtype(offload: MakeEngine) -> None:
    model = build(Frozen)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = offload(model, **_TIGHT)
    assert same(get_model_state_dict(engine), expected)


def test_wrong_state_dicts_are_refused(offload: MakeEngine) -> None:
    _, engine, optimizer = make(offload)
    state, optim = get_state_dict(engine, optimizer)
    for wrong, message in (
        ({**state, "more": torch.zeros(1)}, "has 'more', which the model does not have"),
        (
            {name: value for name, value in state.items() if name != "blocks.0.norm.weight"},
            "lacks 'blocks.0.norm.weight'",
        ),
        (
            {**state, "blocks.0.norm.weight": torch.zeros(3)},
            r"'blocks.0.norm.weight' has shape \(3,\) in the state dict",
        ),
    ):
        with pytest.raises(infinity.ConfigError, match=message):
            set_model_state_dict(engine, wrong)
    wrong = {"state": {}, "param_groups": [{"params": ["x"]}]}
    with pytest.raises(infinity.ConfigError, match="the optimizer holds no parameter 'x'"):
        set_state_dict(engine, optimizer, model_state_dict=state, optim_state_dict=wrong)
    assert optim["param_groups"]


def test_the_models_own_state_dict_is_never_empty(offload: MakeEngine) -> None:
    model, engine, _ = make(offload)
    with pytest.raises(infinity.NotGatheredError, match=r"infinity\.state_dicts\.get_model_state_dict\(engine\)"):
        model.state_dict()
    with infinity.gathered(model):
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    assert same(inside, get_model_state_dict(engine))


def test_damage_is_told_through_torch_too(offload: MakeEngine, tmp_path: Path) -> None:
    model, engine, _ = make(offload)
    engine.save(tmp_path / "saved")
    path = next((tmp_path / "saved").glob("group-00001*"))
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises((infinity.CheckpointError, dcp.api.CheckpointException), match="wrong checksum"):
        dcp.load(
            {name: torch.empty(p.shape) for name, p in get_model_state_dict(engine).items()},
            storage_reader=InfinityReader(tmp_path / "saved"),
        )
    assert model is not None


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [((0, 0, 0), (4, 5, 6)), ((1, 0, 0), (2, 5, 6)), ((1, 2, 3), (2, 2, 2)), ((0, 1, 0), (4, 1, 6))],
)
def test_boxes_of_tensors(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """What a rank with a part of a DTensor asks for."""
    tensor = torch.arange(120.0).view(4, 5, 6)

    def read(start: int, into: Tensor) -> None:
        into.copy_(tensor.view(-1)[start : start + into.numel()])

    one = _Offered(torch.float32, tuple(tensor.shape), read)
    wanted = tensor[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))]
    for target in (torch.empty(lengths), torch.empty(math.prod(lengths) * 2)[::2].view(lengths)):
        _read_box(one, list(offsets), list(lengths), 0, 0, target)
        assert torch.equal(target, wanted)
    scalar = torch.empty(())
    _read_box(_Offered(torch.float32, (), lambda start, into: into.fill_(3.0) and None), [], [], 0, 0, scalar)
    assert scalar == 3


def test_a_save_that_fails_leaves_the_one_before(offload: MakeEngine, tmp_path: Path, plain: Any) -> None:
    """torch does not call `finish` when a rank fails; the next save with the same writer gives up what is half made."""
    other, theirs, _ = plain
    model_state, optim_state = torch_get_state_dict(other, theirs)
    writer = InfinityWriter(tmp_path / "saved", other)
    state = {"model": model_state, "optim": optim_state}
    dcp.save({**state, "epoch": 1}, storage_writer=writer)
    unsaveable = {**state, "strange": Path("x")}
    with pytest.raises(CheckpointException):
        dcp.save(unsaveable, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save(unsaveable, storage_writer=writer)
    writer.close()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("infinity")] == ["saved"]
    _, engine, optimizer = make(offload)
    assert engine.load(tmp_path / "saved", optimizer=optimizer) == {"epoch": 1}
    lacking = {name: value for name, value in model_state.items() if name != "embed.weight" and name != "head.weight"}
    with pytest.raises(CheckpointException):  # told by `finish` itself, which gives up at once
        dcp.save({"model": lacking}, storage_writer=writer)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("infinity")] == ["saved"]
    dcp.save({**state, "epoch": 2}, storage_writer=writer)
    assert engine.load(tmp_path / "saved", optimizer=optimizer) == {"epoch": 2}


def test_tied_names_survive_resharding(offload: MakeEngine, tmp_path: Path) -> None:
    _, engine, _ = make(offload)
    engine.save(tmp_path / "saved")
    reshard_checkpoint(tmp_path / "saved", tmp_path / "again", file_nbytes=30_000)
    found = {"head.weight": torch.zeros(29, 37), "embed.weight": torch.zeros(29, 37)}
    dcp.load(found, storage_reader=InfinityReader(tmp_path / "again"))
    assert torch.equal(found["head.weight"], get_model_state_dict(engine)["embed.weight"])
    assert torch.equal(found["head.weight"], found["embed.weight"])
