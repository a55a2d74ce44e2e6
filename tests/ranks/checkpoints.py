"""Saving on some number of ranks and loading on another; each function runs in processes of its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import infinity
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.reader import CheckpointReader
from tests.parity.loops import gathered_parameters
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Net, batch, build, loss_of

TIGHT = {"host": {"budget": "400KiB"}, "device": {"kind": "cpu", "budget": "2MiB"}}


def backward(model: torch.nn.Module, step: int) -> float:
    rank, size = rank_and_size()
    loss = loss_of(model, batch(step, shape=(12, 11)).chunk(size)[rank])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def state_of(model: torch.nn.Module, optimizer: infinity.AdamW) -> dict[str, Tensor]:
    """Parameters, and moments by index."""
    found = gathered_parameters(model)
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{name}": value for name, value in state.items()}
    return found


def train_and_save(folder: Path, checkpoint: Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, one more backward, a checkpoint; then the state as it was saved, and the losses that follow."""
    model = build(Net)
    with infinity.offload(model, make_config(folder / "swap", TIGHT | settings)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        saved = state_of(model, optimizer)
        backward(model, 2)
        engine.save(checkpoint, scheduler=scheduler, extra={"step": 2})
        return saved, go_on(model, optimizer)


def save_behind(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints behind training: as of the moment they were asked for, or of none of the ranks."""
    rank, _ = rank_and_size()
    model = build(Net)
    seen: dict[str, Any] = {}
    with infinity.offload(model, make_config(folder / "swap", TIGHT | settings)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        saver = engine._runtime.saver
        backward(model, 0)
        optimizer.step()
        engine.save(folder / "now", extra={"step": 2})
        held_up = threading.Event()
        if rank == 1:  # where the thread that writes has something else to do
            saver._thread.submit(held_up.wait, 60)
        engine.save(folder / "behind", extra={"step": 2}, keep=1, wait=False)
        optimizer.zero_grad()
        for step in (1, 2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        seen["trained before"] = not (folder / "behind").exists()
        held_up.set()
        engine.wait_saved()
        seen["saved"] = (folder / "behind").exists()
        seen["differing"] = _differing_files(folder / "now", folder / "behind")
        write = PartFileWriter.finish
        if rank == 1:
            PartFileWriter.finish = _fail  # type: ignore[method-assign]
        engine.save(folder / "lost", keep=1, wait=False)
        backward(model, 3)
        seen["said"] = _said(engine.wait_saved)
        seen["said at once"] = _said(lambda: engine.save(folder / "lost"))
        PartFileWriter.finish = write  # type: ignore[method-assign]
        optimizer.step()  # here the ranks meet
        seen["left"] = sorted(path.name for path in folder.iterdir() if "lost" in path.name)
        seen["latest"] = (folder / "latest").read_text()
        engine.save(folder / "lost", wait=False)  # and is complete when the engine closes
    seen["in the end"] = (folder / "lost").is_dir()
    return seen


def _fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except infinity.CheckpointError as error:
        return str(error)
    return "nothing"


def _differing_files(one: Path, other: Path) -> list[str]:
    names = {path.name for folder in (one, other) for path in folder.glob("*.safetensors")}
    return sorted(name for name in names if (one / name).read_bytes() != (other / name).read_bytes())


def go_on(model: torch.nn.Module, optimizer: infinity.AdamW) -> list[float]:
    """The step of the gradients that wait, and two more."""
    losses = []
    for step in (3, 4):
        optimizer.step()
        optimizer.zero_grad()
        losses.append(backward(model, step))
    return losses


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as it reads; with the gradients that waited."""
    with CheckpointReader(folder) as checkpoint:
        return {
            f"{kind}/{name}": checkpoint.tensor(name, kind)
            for name, entry in checkpoint.index.parameters.items()
            for kind in entry.tensors
        }


def load_each(folder: Path, checkpoints: list[Path], settings: dict[str, Any]) -> list[Any]:
    """The state that every checkpoint gives, and the losses with which it goes on; saved again it is in `again...`."""
    found = []
    for number, checkpoint in enumerate(checkpoints):
        model = build(Net, seed=5)
        with infinity.offload(model, make_config(folder / f"swap{number}", TIGHT | settings)) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=0.5, max_grad_norm=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            assert engine.load(checkpoint, optimizer=optimizer, scheduler=scheduler) == {"step": 2}
            assert optimizer.param_groups[0]["lr"] == 0.0025
            engine.save(folder / f"again{number}")
            loaded = state_of(model, optimizer)
            moments = optimizer.state_dict()
            optimizer.load_state_dict(moments)
            assert all(torch.equal(value, loaded[name]) for name, value in state_of(model, optimizer).items())
            found.append((loaded, go_on(model, optimizer)))
    return found


def save_what_one_rank_refuses(folder: Path) -> dict[str, Any]:
    """Inside a `gathered()` block in which one rank has edited what this schedule does not take in there."""
    rank, _ = rank_and_size()
    model = build(Net)
    config = make_config(folder / "swap", TIGHT | {"schedule": "overlapped", "rank_timeout_s": 20.0})
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        with infinity.gathered(model.get_submodule("head")), torch.no_grad():
            if rank == 1:
                model.get_parameter("head.weight").add_(1.0)
            said = ""
            try:
                engine.save(folder / "saved")
            except (infinity.CheckpointError, infinity.IterationError) as error:
                said = str(error)
        losses = []
        for step in range(2):  # the edit is taken in at the end of the block, and the run goes on
            losses.append(backward(model, step))
            optimizer.step()
            optimizer.zero_grad()
        engine.save(folder / "saved")
        return {"said": said, "losses": losses, "saved": (folder / "saved").exists()}
