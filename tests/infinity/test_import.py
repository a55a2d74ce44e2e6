"""Checkpoints of DeepSpeed and of torch.save: what is taken over goes on with the bits of the run that saved it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.format import read_index
from infinity.checkpoint.reader import CheckpointReader
from infinity.weights.importing import import_checkpoint
from tests.cli.command import call
from tests.conftest import MakeEngine
from tests.infinity.zero_files import ZeroWriter
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, build, train

_GONE = object()
_TIGHT = {"host": {"budget": "440KiB"}}
Split = Callable[[nn.Module], list[dict[str, Any]]]


class _Mixed(Net):
    """With a frozen part, a buffer, a parameter of one element, and tied ends."""

    def __init__(self) -> None:
        super().__init__(blocks=3, tied=True)
        self.register_buffer("table", torch.arange(5))
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids) * self.scale
        return out


def _one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def _decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _plain(make: Callable[[], nn.Module] = _Mixed, split: Split = _one_group) -> tuple[nn.Module, torch.optim.AdamW]:
    """Three steps of plain PyTorch."""
    model = build(make)
    optimizer = torch.optim.AdamW(split(model), lr=1e-2, fused=True)
    train(model, optimizer, 0, 3)
    return model, optimizer


def _go_on(
    offload: MakeEngine, folder: Path, make: Callable[[], nn.Module] = _Mixed, split: Split = _one_group
) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = build(make, seed=1)
    engine = offload(model, **_TIGHT)
    optimizer = infinity.AdamW(split(model), lr=0.5)
    return model, optimizer, engine.load(folder, optimizer=optimizer)


# DeepSpeed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "split"), [(1, _decay_groups), (2, _one_group), (3, _decay_groups)])
def test_a_zero_run_goes_on_with_the_same_bits(
    offload: MakeEngine, tmp_path: Path, stage: int, ranks: int, split: Split
) -> None:
    plain, optimizer = _plain(split=split)
    ZeroWriter(plain, optimizer, stage=stage, ranks=ranks).write(tmp_path / "zero", note=7)
    imported = import_checkpoint(tmp_path / "zero", tmp_path / "run")
    assert imported.kind.startswith(f"ZeRO stage {stage} of {ranks} rank")
    assert imported.step == 3
    assert read_index(tmp_path / "run").aliases == ({"head.weight": "embed.weight"} if stage < 3 else {})
    model, ours, extra = _go_on(offload, tmp_path / "run", split=split)
    assert extra == {"global_step": 3, "client_state": {"note": 7}}
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert torch.equal(model.get_buffer("table"), torch.arange(5))
    assert train(model, ours, 3, 6) == train(plain, optimizer, 3, 6)
    got = gathered_parameters(model)
    assert all(torch.equal(got[name], p) for name, p in plain.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_of_a_bf16_run(offload: MakeEngine, tmp_path: Path, stage: int) -> None:
    """The masters are fp32, the frozen parameters bf16 where DeepSpeed keeps them so."""
    plain, optimizer = _plain()
    ZeroWriter(plain, optimizer, stage=stage, ranks=2, dtype=torch.bfloat16).write(tmp_path / "zero")
    import_checkpoint(tmp_path / "zero" / "global_step3", tmp_path / "run")
    with CheckpointReader(tmp_path / "run") as checkpoint:
        assert checkpoint.index.precision == "bf16"
        checkpoint.verify()
        for name, parameter in plain.named_parameters():
            found = checkpoint.tensor(name)
            if parameter.requires_grad:
                assert torch.equal(found, parameter), name
                assert torch.equal(checkpoint.tensor(name, "exp_avg_sq"), optimizer.state[parameter]["exp_avg_sq"])
            else:
                assert torch.equal(found.bfloat16(), parameter.bfloat16()), name
    model = build(_Mixed, seed=1)
    offload(model, precision="bf16", **_TIGHT).load(tmp_path / "run")


def test_a_run_without_a_step_has_no_moments(tmp_path: Path) -> None:
    model = build(_Mixed)
    optimizer = torch.optim.AdamW(_one_group(model))
    ZeroWriter(model, optimizer, stage=2, ranks=2).write(tmp_path / "zero")
    assert import_checkpoint(tmp_path / "zero", tmp_path / "run").step == 0
    with CheckpointReader(tmp_path / "run") as checkpoint:
        assert not any(entry.moments for entry in checkpoint.index.parameters.values())


def _break(how: str, folder: Path) -> None:
    files = sorted((folder / "global_step3").glob("*_optim_states.pt"))
    if how == "missing":
        files[1].unlink()
    elif how == "truncated":
        files[1].write_bytes(files[1].read_bytes()[:200])
    elif how == "tensor parallel":
        (files[0].parent / "mp_rank_01_model_states.pt").write_bytes(b"")
    elif how == "experts":
        (files[0].parent / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")
    elif how == "no zero":
        torch.save({"optimizer_state_dict": {"state": {}}}, files[0])
    elif how == "no model":
        for path in (folder / "global_step3").glob("*_model_states.pt"):
            path.unlink()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("missing", "saved by 2 ranks, but has files of 1"),
        ("truncated", "is damaged"),
        ("tensor parallel", "tensor parallelism"),
        ("experts", "experts"),
        ("no zero", "no state of ZeRO's optimizer"),
        ("no model", "no ZeRO checkpoint of DeepSpeed"),
    ],
)
def test_what_cannot_be_taken_over_is_told(tmp_path: Path, how: str, text: str) -> None:
    plain, optimizer = _plain()
    ZeroWriter(plain, optimizer, stage=2, ranks=2).write(tmp_path / "zero")
    _break(how, tmp_path / "zero")
    with pytest.raises(infinity.CheckpointError, match=text):
        import_checkpoint(tmp_path / "zero", tmp_path / "run")
    assert not (tmp_path / "run").exists()


_STRANGE: tuple[Any, ...] = (None, 5, -1, "text", [], {}, [5], [[5]], {"x": None}, {0: {"step": float("nan")}}, _GONE)


def _strange(content: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """The same with another value in one place, or without it."""
    name, *inner = path
    if inner:
        return {**content, name: _strange(content[name], inner, value)}
    rest = {key: kept for key, kept in content.items() if key != name}
    return rest if value is _GONE else {**rest, name: value}


class _StrangeWriter(ZeroWriter):
    part, path, value = "", [""], None

    def _optimizer_state(self, rank: int) -> dict[str, Any]:
        state = super()._optimizer_state(rank)
        return _strange(state, self.path, self.value) if self.part == "optimizer" else state

    def _model_state(self, rank: int) -> dict[str, Any]:
        state = super()._model_state(rank)
        return _strange(state, self.path, self.value) if self.part == "model" else state


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_files_with_anything_in_them_are_refused_with_a_reason(tmp_path: Path, stage: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    writer = _StrangeWriter(model, optimizer, stage=stage, ranks=2)
    base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    places = [("model", [key]) for key in writer._model_state(0)]
    places += [("optimizer", [key]) for key in writer._optimizer_state(0)]
    places += [("optimizer", [base, key]) for key in ("state", "param_groups")]
    refused = 0
    for number, (place, value) in enumerate(itertools.product(places, _STRANGE)):
        (writer.part, writer.path), writer.value = place, value
        writer.write(tmp_path / f"zero{number}")
        try:
            import_checkpoint(tmp_path / f"zero{number}", tmp_path / "run")
        except infinity.CheckpointError as error:
            refused += 1
            assert str(error)
    assert refused > 60


def test_a_name_of_the_latest_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(infinity.CheckpointError, match="latest is damaged: it does not name a folder"):
        import_checkpoint(tmp_path, tmp_path / "run")


def test_nothing_of_a_file_runs(tmp_path: Path) -> None:
    plain, optimizer = _plain()
    ZeroWriter(plain, optimizer, stage=1, ranks=1).write(tmp_path / "zero")
    path = tmp_path / "zero" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"zero_stage": 1, "path": Path("x")}}, path)
    with pytest.raises(infinity.CheckpointError, match=r"holds objects of pathlib"):
        import_checkpoint(tmp_path / "zero", tmp_path / "run")


# torch.save ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["one", "two"])
@pytest.mark.parametrize("split", [_one_group, _decay_groups])
def test_a_plain_run_goes_on_with_the_same_bits(offload: MakeEngine, tmp_path: Path, files: str, split: Split) -> None:
    make = lambda: Net(tied=True)  # noqa: E731
    plain, optimizer = _plain(make, split)
    names = {id(p): name for name, p in plain.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    arguments: dict[str, Any] = {"names": ordered if split is _decay_groups else None}
    if files == "one":
        torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}, tmp_path / "run.pt")
    else:
        torch.save(plain.state_dict(), tmp_path / "run.pt")
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        arguments["optimizer"] = tmp_path / "optimizer.pt"
    imported = import_checkpoint(tmp_path / "run.pt", tmp_path / "run", **arguments)
    assert imported.step == 3
    assert imported.aliases == read_index(tmp_path / "run").aliases == {"head.weight": "embed.weight"}
    model, ours, _ = _go_on(offload, tmp_path / "run", make, split)
    assert train(model, ours, 3, 6) == train(plain, optimizer, 3, 6)


def test_names_that_the_optimizer_saved_are_used(tmp_path: Path) -> None:
    plain, optimizer = _plain(Net, _decay_groups)
    saved = optimizer.state_dict()
    names = {id(p): name for name, p in plain.named_parameters()}
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        kept["param_names"] = [names[id(p)] for p in group["params"]]
    torch.save({"model": plain.state_dict(), "optimizer": saved}, tmp_path / "run.pt")
    import_checkpoint(tmp_path / "run.pt", tmp_path / "run")
    with CheckpointReader(tmp_path / "run") as checkpoint:
        for name, parameter in plain.named_parameters():
            assert torch.equal(checkpoint.tensor(name, "exp_avg"), optimizer.state[parameter]["exp_avg"]), name


def test_groups_without_names_are_not_guessed(tmp_path: Path) -> None:
    plain, optimizer = _plain(Net, _decay_groups)
    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(infinity.CheckpointError, match=r"in 2 groups, without names.*--names"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "run")


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    plain, optimizer = _plain(Net)
    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    names = [name for name, _ in plain.named_parameters()]
    with pytest.raises(infinity.CheckpointError, match=r"exp_avg of 'blocks\.3\.down\.bias' is \(29, 37\), and"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "run", names=[names[0], names[-1], *names[1:-1]][::-1])
    with pytest.raises(infinity.CheckpointError, match="does not have 'other'"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "run", names=[*names[:-1], "other"])


def test_a_name_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    """Of two states one would be lost."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b")})
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(infinity.CheckpointError, match=r"more than once 'a\.weight'"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "run", names=["a.weight", "a.weight"])


def test_a_tied_parameter_may_have_any_of_its_names(tmp_path: Path) -> None:
    plain, optimizer = _plain(lambda: Net(tied=True))
    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    names = [{"embed.weight": "head.weight"}.get(name, name) for name, _ in plain.named_parameters()]
    assert import_checkpoint(tmp_path / "run.pt", tmp_path / "run", names=names).aliases
    with CheckpointReader(tmp_path / "run") as checkpoint:
        wanted = optimizer.state[plain.get_parameter("embed.weight")]["exp_avg"]
        assert torch.equal(checkpoint.tensor("embed.weight", "exp_avg"), wanted)


def test_optimizer_files_with_anything_in_them_are_refused_with_a_reason(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state, group = content["optimizer"]["state"], content["optimizer"]["param_groups"][0]
    places: list[tuple[str, Callable[[Any], Any]]] = [
        ("state", lambda value: value),
        ("state", lambda value: {0: value, 1: state[1]}),
        *(("state", lambda value, key=key: {0: _strange(state[0], [key], value), 1: state[1]}) for key in state[0]),
        ("param_groups", lambda value: value),
        ("param_groups", lambda value: [value]),
        *(("param_groups", lambda v, key=key: [_strange(group, [key], v)]) for key in ("params", "betas", "lr")),
    ]
    refused = 0
    for (key, make), value in itertools.product(places, (*_STRANGE, torch.ones(3), [torch.ones(2)])):
        if value is _GONE and make.__defaults__ is None:
            continue
        torch.save({**content, "optimizer": {**content["optimizer"], key: make(value)}}, tmp_path / "run.pt")
        try:
            import_checkpoint(tmp_path / "run.pt", tmp_path / "run")
        except infinity.CheckpointError as error:
            refused += 1
            assert str(error)
    assert refused > 60


def test_betas_that_are_tensors_are_numbers_afterwards(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "run.pt")
    import_checkpoint(tmp_path / "run.pt", tmp_path / "run")
    (entry,) = read_index(tmp_path / "run").optimizer or ()
    assert (entry.settings["lr"], entry.settings["betas"]) == (0.5, [0.5, 0.75])


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_of_two_dtypes_has_the_precision_of_most_elements(tmp_path: Path, order: int) -> None:
    """Norms in fp32 beside bf16 weights."""
    state = {"weight": torch.ones(8, 8, dtype=torch.bfloat16), "norm": torch.ones(8), "scale": torch.ones(2).half()}
    torch.save(dict(list(state.items())[::order]), tmp_path / "run.pt")
    import_checkpoint(tmp_path / "run.pt", tmp_path / "run")
    assert read_index(tmp_path / "run").precision == "bf16"


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    model = build(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0, 1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(infinity.CheckpointError, match="only states of AdamW and Adam"):
        import_checkpoint(tmp_path / "run.pt", tmp_path / "run")


def test_a_model_alone(offload: MakeEngine, tmp_path: Path) -> None:
    plain, _ = _plain(Net)
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    assert import_checkpoint(tmp_path / "model.pt", tmp_path / "run").step == 0
    model = build(Net, seed=1)
    offload(model, **_TIGHT).load(tmp_path / "run")
    got = gathered_parameters(model)
    assert all(torch.equal(got[name], p) for name, p in plain.named_parameters())


# Command line -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    plain, optimizer = _plain(Net, _decay_groups)
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    names = {id(p): name for name, p in plain.named_parameters()}
    lines = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    (tmp_path / "names.txt").write_text("\n".join(lines) + "\n")
    given = (tmp_path / "model.pt", tmp_path / "run", "--optimizer", tmp_path / "optimizer.pt")
    code, _, error = call("checkpoint", "import", *given)
    assert code == 1
    assert "--names" in error
    code, output, error = call("checkpoint", "import", *given, "--names", tmp_path / "names.txt")
    assert code == 0, error
    assert "step 3" in output
    assert call("checkpoint", "verify", tmp_path / "run")[0] == 0


def test_the_command_takes_over_deepspeed(tmp_path: Path) -> None:
    plain, optimizer = _plain()
    ZeroWriter(plain, optimizer, stage=3, ranks=2).write(tmp_path / "zero")
    code, output, error = call("checkpoint", "import", tmp_path / "zero", tmp_path / "run")
    assert code == 0, error
    assert "ZeRO stage 3 of 2 ranks" in output
    assert "not taken over" in output


def test_weights_of_deepspeed_are_imported_first(tmp_path: Path) -> None:
    plain, optimizer = _plain()
    ZeroWriter(plain, optimizer, stage=2, ranks=1).write(tmp_path / "zero")
    with pytest.raises(infinity.CheckpointError, match="infinity checkpoint import"):
        infinity.offload(build(_Mixed), weights=tmp_path / "zero")
