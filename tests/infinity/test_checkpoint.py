"""Saving and loading: a run that is stopped and continued gives the bits of one that was not."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.tensor_file import bytes_of
from tests.resume import CASES, Remembering, Run
from tests.zoo import Frozen, Net, OddNet, Skipping, batch, build, train

MakeEngine = Callable[..., infinity.Engine]
_TIGHT = {"host": {"budget": "300KiB"}}
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def start(offload: MakeEngine) -> Callable[..., Run]:
    """A fresh run with these settings; a keyword `make` chooses the model."""

    def make(*, make: Callable[[], nn.Module] = Remembering, **settings: Any) -> Run:
        return Run(lambda model: offload(model, **settings), make)

    return make


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as it reads."""
    with CheckpointReader(folder) as checkpoint:
        return {
            f"{kind}/{name}": checkpoint.tensor(name, kind)
            for name, entry in checkpoint.index.parameters.items()
            for kind in entry.tensors
        }


def _process(folder: Path, first: int, last: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.resume", str(folder), str(first), str(last)]
    result = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def three_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six steps in one process; three in a second one and three in a third one, which loads what the second saved."""
    folder = tmp_path_factory.mktemp("stopped")
    return [
        _process(tmp_path_factory.mktemp("whole"), 0, 6),
        _process(folder, 0, 3),
        _process(folder, 3, 6),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "schedule"), CASES)
def test_resume_in_a_new_process(three_processes: list[dict[str, Any]], precision: str, schedule: str) -> None:
    whole, before, after = (found[f"{precision}-{schedule}"] for found in three_processes)
    assert before.pop("losses") + after.pop("losses") == whole.pop("losses")
    assert after == whole
    assert before != whole


_OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "tight": _TIGHT,
    "overlapped": {**_TIGHT, "schedule": "overlapped"},
    "chunk": {"chunk": "32KiB", **_TIGHT},
    "buffered": {"nvme": {"engine": "buffered"}, **_TIGHT},
    "resident": {"resident_threshold": "64KiB"},
    "no-resident": {"resident_threshold": 0, **_TIGHT},
    "fake": {"device": {"kind": "fake", "budget": "8MiB"}},
}


@pytest.mark.parametrize("name", _OTHER_SETTINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_settings_continue_with_the_same_bits(
    start: Callable[..., Run], tmp_path: Path, precision: str, name: str
) -> None:
    other = _OTHER_SETTINGS[name]
    if name == "fake" and precision == "bf16":
        pytest.skip("a CPU with fast bf16 products computes in bf16, the fake device in fp32")
    first = start(precision=precision)
    first.train(0, 3)
    first.save(tmp_path / "saved")
    losses, parameters = first.train(3, 5), first.parameters()
    second = start(precision=precision, **other)
    second.load(tmp_path / "saved")
    second.save(tmp_path / "again")
    assert _same(_tensors(tmp_path / "saved"), _tensors(tmp_path / "again"))
    assert second.train(3, 5) == losses
    assert _same(second.parameters(), parameters)


@pytest.mark.parametrize("counts", [(1, 2), (3, 1), (2, 3)], ids=str)
def test_another_number_of_drives(start: Callable[..., Run], tmp_path: Path, counts: tuple[int, int]) -> None:
    first, second = (
        start(nvme={"paths": [tmp_path / f"drive{number}" for number in range(count)]}, **_TIGHT) for count in counts
    )
    first.train(0, 2)
    first.save(tmp_path / "saved")
    losses, parameters = first.train(2, 4), first.parameters()
    second.load(tmp_path / "saved")
    assert second.train(2, 4) == losses
    assert _same(second.parameters(), parameters)


@pytest.mark.parametrize(
    "settings", [{}, _TIGHT, {**_TIGHT, "schedule": "overlapped"}], ids=["roomy", "tight", "overlapped"]
)
def test_going_back_in_the_same_engine(start: Callable[..., Run], tmp_path: Path, settings: dict[str, Any]) -> None:
    run = start(**settings)
    run.train(0, 2)
    run.save(tmp_path / "saved")
    losses, parameters = run.train(2, 5), run.parameters()
    run.load(tmp_path / "saved")
    assert run.train(2, 5) == losses
    assert _same(run.parameters(), parameters)


@pytest.mark.parametrize("path", [("fp32", "bf16", "fp32"), ("bf16", "fp32", "bf16")])
def test_precisions_convert_without_loss(start: Callable[..., Run], tmp_path: Path, path: tuple[str, ...]) -> None:
    saved = []
    for number, precision in enumerate(path):
        run = start(precision=precision, **_TIGHT)
        if number:
            run.load(tmp_path / str(number - 1))
        else:
            run.train(0, 3)
        run.save(tmp_path / str(number))
        saved.append(_tensors(tmp_path / str(number)))
    assert _same(saved[0], saved[1])
    assert _same(saved[0], saved[2])
    assert all(t.dtype is torch.float32 for t in saved[0].values())


def test_content_is_that_of_plain_pytorch(offload: MakeEngine, tmp_path: Path) -> None:
    plain = build(Net)
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    model = build(Net)
    engine = offload(model, **_TIGHT)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for each, its in ((plain, torch_optimizer), (model, optimizer)):
        train(each, its, 0, 3)
    engine.save(tmp_path / "saved")
    wanted = {f"parameter/{name}": p.detach() for name, p in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        state = torch_optimizer.state[parameter]
        wanted |= {f"{moment}/{name}": state[moment] for moment in ("exp_avg", "exp_avg_sq")}
    assert _same(_tensors(tmp_path / "saved"), wanted)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "make", [Frozen, OddNet, Skipping, lambda: Net(tied=True)], ids=["frozen", "odd", "skipping", "tied"]
)
def test_awkward_models(offload: MakeEngine, tmp_path: Path, make: Callable[[], nn.Module], precision: str) -> None:
    first, second = build(make), build(make, seed=1)
    calls = first.calls if isinstance(first, Skipping) else 0
    engine = offload(first, precision=precision, **_TIGHT)
    optimizer = infinity.AdamW(first.parameters(), lr=1e-2)
    train(first, optimizer, 0, 3)
    engine.save(tmp_path / "saved", optimizer=optimizer)
    other = offload(second, precision=precision, **_TIGHT)
    continued = infinity.AdamW(second.parameters(), lr=1e-3)
    assert other.load(tmp_path / "saved", optimizer=continued) == {}
    if isinstance(first, Skipping) and isinstance(second, Skipping):
        second.calls = calls + 3
    assert train(first, optimizer, 3, 5) == train(second, continued, 3, 5)
    engine.save(tmp_path / "one")
    other.save(tmp_path / "other")
    assert _same(_tensors(tmp_path / "one"), _tensors(tmp_path / "other"))


class _Tables(Net):
    """With persistent buffers of every kind that safetensors files hold, one without elements and a scalar."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool)
        for dtype in dtypes:
            self.register_buffer(str(dtype).removeprefix("torch."), (sign * torch.arange(1, 6)).to(dtype))
        self.register_buffer("rotations", torch.polar(torch.ones(3), sign * torch.arange(3.0)))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(sign))


def test_buffers_of_every_dtype(offload: MakeEngine, tmp_path: Path) -> None:
    first, second = build(_Tables), build(lambda: _Tables(-1), seed=1)
    wanted = {name: buffer.clone() for name, buffer in first.named_buffers()}
    offload(first, **_TIGHT).save(tmp_path / "saved")
    offload(second, **_TIGHT).load(tmp_path / "saved")
    found = dict(second.named_buffers())
    assert found.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert found[name].dtype is buffer.dtype
        assert found[name].shape == buffer.shape
        assert bytes_of(found[name].reshape(-1)) == bytes_of(buffer.reshape(-1)), name


def test_a_model_without_memory_loads(offload: MakeEngine, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(**_TIGHT)
    run.train(0, 2)
    run.save(tmp_path / "saved")
    with infinity.empty_init():
        empty = Net()
    engine = offload(empty, **_TIGHT)
    with pytest.raises(infinity.CheckpointError, match="buffers differ in 'average'"):
        engine.load(tmp_path / "saved")
    run.model.__class__ = Net
    del run.model._buffers["average"]
    run.engine.save(tmp_path / "saved")
    engine.load(tmp_path / "saved")
    empty.eval()
    run.model.eval()
    with torch.no_grad():
        assert torch.equal(empty(batch(0)), run.model(batch(0)))


@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
@pytest.mark.parametrize("budget", ["300KiB", "500KiB"])
def test_traffic_stays_the_closed_form(start: Callable[..., Run], tmp_path: Path, schedule: str, budget: str) -> None:
    """Saving does not disturb what is kept in memory, and loading leaves what a later step finds."""
    settings = {"schedule": schedule, "host": {"budget": budget}}
    run, resumed = start(**settings), start(**settings)
    run.train(0, 2)
    run.save(tmp_path / "saved")
    run.train(2, 4)
    resumed.load(tmp_path / "saved")
    resumed.train(2, 4)
    for engine, first in ((run.engine, 0), (resumed.engine, 1)):
        for number, counted in enumerate(engine.traffic.per_step):
            expected = engine.plan.expected_traffic(number + first, 1)
            assert counted["nvme_read_bytes"] == expected.read_nbytes
            assert counted["nvme_write_bytes"] == expected.write_nbytes
        traffic = engine.traffic
        assert traffic.total["nvme_read_bytes"] >= sum(counts["nvme_read_bytes"] for counts in traffic.per_step)


def test_settings_of_parameter_groups_come_back(offload: MakeEngine, tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": [first], "lr": 0.25}, {"params": rest, "weight_decay": 0.5}]

    model = build(Net)
    engine = offload(model)
    optimizer = infinity.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.9))
    optimizer.param_groups[1]["lr"] = torch.tensor(0.125)
    engine.save(tmp_path / "saved", optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.param_groups[1]["lr"].fill_(3.0)
    engine.load(tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] == 1.0
    engine.load(tmp_path / "saved", optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[1]["lr"].item() == 0.125
    assert optimizer.param_groups[1]["weight_decay"] == 0.5


def test_extra_keeps_its_types(start: Callable[..., Run], tmp_path: Path) -> None:
    extra = {"text": "a", 3: (1, 2.5, None), "nested": {"tensor": torch.arange(3)}, "best": float("inf")}
    engine = start().engine
    engine.save(tmp_path / "saved", extra=extra)
    found = engine.load(tmp_path / "saved")
    assert torch.equal(found["nested"].pop("tensor"), extra["nested"].pop("tensor"))  # type: ignore[attr-defined]
    assert found == extra


# state_dict of the optimizer ---------------------------------------------------------------------------------------


def _plain_steps(first: int, last: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = build(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, optimizer, first, last)
    return model, optimizer


@pytest.mark.parametrize("settings", [{}, {**_TIGHT, "schedule": "overlapped"}], ids=["roomy", "tight"])
def test_state_dict_is_that_of_torch(offload: MakeEngine, settings: dict[str, Any]) -> None:
    plain, theirs = _plain_steps(0, 3)
    model = build(Net)
    engine = offload(model, **settings)
    ours = infinity.AdamW(model.parameters(), lr=1e-2)
    train(model, ours, 0, 3)
    wanted, found = theirs.state_dict(), ours.state_dict()
    assert found["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert _same(found["state"][number], state)
    assert not ours.state
    theirs.load_state_dict(found)
    assert train(plain, theirs, 3, 5) == train(model, ours, 3, 5)
    assert not engine.is_closed


@pytest.mark.parametrize("settings", [{}, {**_TIGHT, "schedule": "overlapped"}], ids=["roomy", "tight"])
def test_state_dict_of_torch_loads(offload: MakeEngine, settings: dict[str, Any]) -> None:
    plain, theirs = _plain_steps(0, 3)
    model = copy.deepcopy(plain)
    offload(model, **settings)
    ours = infinity.AdamW(model.parameters(), lr=1e-4)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-2
    assert train(plain, theirs, 3, 5) == train(model, ours, 3, 5)
    for optimizer in (theirs, ours):
        optimizer.param_groups[0]["lr"] = 1e-3
    assert train(plain, theirs, 5, 7) == train(model, ours, 5, 7)


def test_state_dict_in_bf16_survives_a_file(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(precision="bf16", **_TIGHT)
    run.train(0, 2)
    run.save(tmp_path / "before")
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    run.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    run.save(tmp_path / "after")
    assert _same(_tensors(tmp_path / "before"), _tensors(tmp_path / "after"))


def test_wrong_state_dicts_are_refused(offload: MakeEngine) -> None:
    _, theirs = _plain_steps(0, 1)
    model = build(Net)
    offload(model)
    ours = infinity.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = theirs.state_dict()
    groups = state["param_groups"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"state": {}}, "'param_groups' is missing"),
        ({**state, "param_groups": groups * 2}, "parameter groups of"),
        ({**state, "param_groups": [{**groups[0], "amsgrad": True}]}, "amsgrad"),
        ({**state, "state": {0: {"momentum_buffer": torch.zeros(3)}}}, "has no 'step'"),
        ({**state, "state": {0: {**state["state"][0], "exp_avg": torch.zeros(3)}}}, "exp_avg of 'embed.weight'"),
    ]
    for given, message in wrong:
        with pytest.raises(infinity.ConfigError, match=message):
            ours.load_state_dict(given)
    assert ours.state_dict()["state"] == {}
    assert ours.param_groups[0]["lr"] == 1e-2
