"""`infinity checkpoint`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.series import candidates
from tests.cli.command import call
from tests.conftest import small_config
from tests.zoo import Net, batch, build, loss_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two steps, in bf16, with gradients that wait, and buffers."""
    folder = tmp_path_factory.mktemp("run")
    model = build(Net)
    model.register_buffer("table", torch.arange(5))
    with infinity.offload(model, small_config(folder, precision="bf16")) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, batch(2)).backward()  # type: ignore[no-untyped-call]
        engine.save(folder / "saved", optimizer=optimizer, extra={"note": 7})
    return folder / "saved"


def _copy(saved: Path, target: Path) -> Path:
    target.mkdir()
    for path in saved.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_brackets_in_a_folder_are_no_markup(saved: Path, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "run[1] [red]x[")
    code, output, error = call("checkpoint", "verify", folder)
    assert code == 0, error
    assert f"{folder} is complete" in output
    code, output, error = call("checkpoint", "export", folder, tmp_path / "out[bold]")
    assert code == 0, error
    assert f"of {folder}: " in output and str(tmp_path / "out[bold]") in output


def test_inspect(saved: Path, tmp_path: Path) -> None:
    code, output, error = call("checkpoint", "inspect", saved, "--parameters", "--json", tmp_path / "out.json")
    assert code == 0, error
    for text in ("exp_avg, exp_avg_sq", "blocks.1.up.weight", "53 × 37", "lr=0.01", "bf16"):
        assert text in output
    content = _json(tmp_path / "out.json")
    assert content["step"] == 2
    assert content["gradients"] == len(content["parameters"]) == content["tensors"]
    assert content["trained_parameters"] == sum(p.numel() for p in build(Net).parameters())
    assert content["parameters"]["head.weight"]["shape"] == [29, 37]
    assert content["bytes"] == sum(p.stat().st_size for p in saved.iterdir() if p.name != "checkpoint.json")


def test_verify_finds_nothing_wrong(saved: Path, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "copy")
    (folder / "notes.txt").write_text("mine")
    code, output, error = call("checkpoint", "verify", folder, "--json", tmp_path / "out.json")
    assert code == 0, error
    assert "every byte is what was written" in output
    content = _json(tmp_path / "out.json")
    assert content["good"] is True
    assert content["unknown_files"] == ["notes.txt"]
    assert {file["name"] for file in content["files"]} | {"checkpoint.json", "notes.txt"} == {
        path.name for path in folder.iterdir()
    }


def test_verify_finds_everything_that_is_wrong(saved: Path, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "copy")
    files = sorted(folder.glob("group-*.safetensors"))
    flipped, missing, short = files[:3]
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 4
    flipped.write_bytes(data)
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    (folder / "extra.pt").write_bytes(b"x" * (folder / "extra.pt").stat().st_size)
    code, _output, error = call("checkpoint", "verify", folder, "--json", tmp_path / "out.json")
    assert code == 1
    content = _json(tmp_path / "out.json")
    assert content["good"] is False
    for path, problem in (
        (flipped, "wrong checksum"),
        (missing, "the file is missing"),
        (short, "truncated"),
        (folder / "extra.pt", "its checksum is wrong"),
    ):
        assert any(path.name in text and problem in text for text in content["problems"]), (path.name, content)
        assert path.name in error
    assert len(content["problems"]) == 4


def test_no_checkpoint_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (("verify", "."), ("inspect", "/"), ("export", ".", "out")):
        code, _, error = call("checkpoint", *command)
        assert code == 1
        assert f"there is no checkpoint at {command[1]}" in error
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_index_is_told(saved: Path, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "copy")
    (folder / "checkpoint.json").write_text((folder / "checkpoint.json").read_text().replace('"step":2', '"step":3'))
    for command in ("verify", "inspect"):
        code, _output, error = call("checkpoint", command, folder)
        assert code == 1
        assert "its checksum is wrong" in error


def test_export(saved: Path, tmp_path: Path) -> None:
    command = ("checkpoint", "export", saved, tmp_path / "out", "--dtype", "fp32", "--shard-size", "20KB")
    code, _output, error = call(*command, "--json", tmp_path / "out.json")
    assert code == 0, error
    content = _json(tmp_path / "out.json")
    found: dict[str, torch.Tensor] = {}
    for name in content["files"]:
        found |= load_file(tmp_path / "out" / name)
    with CheckpointReader(saved) as checkpoint:
        assert found.keys() == checkpoint.index.parameters.keys() | {"table"}
        assert all(torch.equal(found[name], checkpoint.tensor(name)) for name in checkpoint.index.parameters)
    assert content["bytes"] == sum(t.numel() * t.element_size() for t in found.values())


def test_reshard_keeps_everything(saved: Path, tmp_path: Path) -> None:
    code, _output, error = call("checkpoint", "reshard", saved, tmp_path / "out", "--shard-size", "30KB")
    assert code == 0, error
    assert call("checkpoint", "verify", tmp_path / "out")[0] == 0
    with CheckpointReader(saved) as before, CheckpointReader(tmp_path / "out") as after:
        assert before.index.parameters.keys() == after.index.parameters.keys()
        assert len([n for n in after.index.files if n.startswith("group")]) > len(
            [n for n in before.index.files if n.startswith("group")]
        )
        for name, entry in before.index.parameters.items():
            other = after.entry(name)
            assert (other.shape, other.dtype, other.trains, other.step) == (
                entry.shape,
                entry.dtype,
                entry.trains,
                entry.step,
            )
            assert other.tensors.keys() == entry.tensors.keys()
            for kind in entry.tensors:
                assert torch.equal(before.tensor(name, kind), after.tensor(name, kind)), (name, kind)
        for part in ("step", "precision", "optimizer", "rng"):
            assert getattr(before.index, part) == getattr(after.index, part)
    for name in ("extra.pt", "buffers.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (saved / name).read_bytes()


def test_a_resharded_checkpoint_goes_on_with_the_same_bits(saved: Path, tmp_path: Path) -> None:
    call("checkpoint", "reshard", saved, tmp_path / "out", "--shard-size", "30KB")
    losses = []
    for number, folder in enumerate((saved, tmp_path / "out")):
        model = build(Net, seed=number)
        model.register_buffer("table", torch.zeros(5, dtype=torch.int64))
        with infinity.offload(model, small_config(tmp_path, precision="bf16")) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1.0)
            assert engine.load(folder, optimizer=optimizer) == {"note": 7}
            mine = []
            for step in range(3, 6):
                optimizer.step()
                optimizer.zero_grad()
                loss = loss_of(model, batch(step))
                loss.backward()  # type: ignore[no-untyped-call]
                mine.append(loss.item())
            losses.append(mine)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("export", "out"), ("reshard", "out")])
def test_a_checkpoint_that_is_not_there_is_bad_usage(tmp_path: Path, command: tuple[str, ...]) -> None:
    name, *target = command
    code, _, error = call("checkpoint", name, tmp_path / "nowhere", *(tmp_path / one for one in target))
    assert code == 2
    assert "nowhere: nothing is there; check the path" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "SAVED", "out", "--dtype", "int3"), "allowed are fp32, bf16, fp16"),
        (("export", "SAVED", "out", "--shard-size", "5G"), "5GiB or 5GB"),
        (("export", "SAVED", "out", "--merge"), "no adapter to merge"),
        (("export", "SAVED", "SAVED"), "not replaced"),
        (("reshard", "SAVED", "SAVED"), "give another folder"),
        (("reshard", "SAVED", "out", "--shard-size", "0"), "must be more than nothing"),
    ],
)
def test_mistakes(saved: Path, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    given = [str(saved) if a == "SAVED" else str(tmp_path / a) if a in ("out", "nowhere") else a for a in arguments]
    code, _output, error = call("checkpoint", *given)
    assert code in (1, 2)
    assert text in error
    assert not (tmp_path / "out").exists()
    assert candidates(saved) == [saved]
