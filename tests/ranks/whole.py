"""What ranks have together, as whole tensors: exports and state dicts; runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.tiers import Tiers
from infinity.state_dicts import get_model_state_dict, get_state_dict, set_state_dict
from infinity.weights.export import ExportOptions, export_checkpoint
from storage.errors import ReadError
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Frozen, batch, build, loss_of

TIGHT = {"host": {"budget": "1MiB"}, "device": {"kind": "cpu", "budget": "2MiB"}}
_WHOLE = StateDictOptions(full_state_dict=True)
_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Some(Frozen):
    """Parts are frozen, some of them in another dtype; tied weights and a buffer. Tensors cross from rank to rank."""

    def __init__(self) -> None:
        super().__init__(96, frozen_dtype=torch.bfloat16, blocks=2)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(5))


def train(model: nn.Module, optimizer: infinity.AdamW, steps: range) -> list[float]:
    rank, size = rank_and_size()
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, shape=(12, 11)).chunk(size)[rank])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read_and_write_whole(folder: Path, cases: list[dict[str, Any]], *, hybrid: bool = False) -> list[dict[str, Any]]:
    """For every case what exports and state dicts gave beside a checkpoint of the same moment."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if hybrid else None
    found = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        model = build(Some)
        with infinity.offload(model, make_config(place / "swap", TIGHT | case), mesh=mesh) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            train(model, optimizer, range(2))
            seen = _beside_a_checkpoint(place, engine, optimizer)
            whole = get_state_dict(engine, optimizer, options=_WHOLE)
            after = train(model, optimizer, range(2, 4))
            set_state_dict(engine, optimizer, model_state_dict=whole[0], optim_state_dict=whole[1])
            seen["goes on"] = train(model, optimizer, range(2, 4)) == after
            optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            given = whole if engine.ranks.member == 0 else ({}, {})
            set_state_dict(
                engine, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=_FROM_FIRST
            )
            seen["goes on from the first"] = train(model, optimizer, range(2, 4)) == after
            seen["betas"] = optimizer.param_groups[0]["betas"]
            found.append(seen)
    return found


def read_and_write_hybrid(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return read_and_write_whole(folder, cases, hybrid=True)


def _beside_a_checkpoint(place: Path, engine: infinity.Engine, optimizer: infinity.AdamW) -> dict[str, Any]:
    """Tensors that differ from those that a checkpoint of all ranks holds."""
    engine.save(place / "saved")
    engine.export(place / "exported", shard_size="20KB")
    whole = get_state_dict(engine, optimizer)
    first = get_state_dict(engine, optimizer, options=_FIRST)
    is_first = engine.ranks.member == 0
    trains = get_model_state_dict(engine, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    seen: dict[str, Any] = {"others get nothing": is_first or first == ({}, {})}
    with CheckpointReader(place / "saved") as saved:
        expected = {name: saved.tensor(name) for name in saved.index.parameters} | {"seen": torch.arange(5)}
        expected["head.weight"] = expected["embed.weight"]
        seen["differing"] = _differing(whole[0], expected)
        moments = {
            f"{name}/{moment}": saved.tensor(name, moment)
            for name, entry in saved.index.parameters.items()
            for moment in sorted(entry.moments)
        }
        theirs = {f"{n}/{m}": t for n, state in whole[1]["state"].items() for m, t in state.items() if m != "step"}
        seen["differing moments"] = _differing(theirs, moments)
        frozen = {name for name, entry in saved.index.parameters.items() if not entry.trains}
        seen["frozen left out"] = trains.keys() == whole[0].keys() - frozen and bool(frozen)
    if is_first:
        seen["differing on the first"] = _differing(first[0], whole[0])
        export_checkpoint(place / "saved", place / "as saved", ExportOptions(shard_nbytes=20_000))
        ours, others = (
            {path.name: path.read_bytes() for path in (place / name).iterdir()} for name in ("exported", "as saved")
        )
        seen["exported alike"] = ours == others and len(ours) > 2
        seen["left beside"] = sorted(path.name for path in place.iterdir())
    return seen


def _differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    both = ours.keys() & theirs.keys()
    same = {name for name in both if ours[name].dtype is theirs[name].dtype and torch.equal(ours[name], theirs[name])}
    return sorted((ours.keys() | theirs.keys()) - same)


def fail_to_read_and_write(folder: Path) -> dict[str, str]:
    """What every rank is told when one of them cannot do its part; the engine goes on each time."""
    rank, _ = rank_and_size()
    model = build(Some)
    said: dict[str, str] = {}
    with infinity.offload(model, make_config(folder / "swap", TIGHT)) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(1))
        (folder / "there").mkdir(exist_ok=True)
        (folder / "there" / "file").touch()
        said["there"] = _said(lambda: engine.export(folder / "there"))
        said["no adapter"] = _said(lambda: engine.export(folder / "other", merge=True))
        said["other folders"] = _said(lambda: engine.export(folder / str(rank)))
        state = get_model_state_dict(engine)
        given = {**state, "more": torch.zeros(1)} if rank == 0 else {}
        said["another model"] = _said(lambda: engine.write_model_state(given, from_first=True))
        said["no options"] = _said(lambda: get_model_state_dict(engine, options=StateDictOptions()))
        with _broken(after=2 if rank == 1 else 1000):
            said["unreadable"] = _said(lambda: engine.export(folder / "unreadable"))
        said["left"] = str((folder / "unreadable").exists() or (folder / "other").exists())
        said["state"] = str(_differing(get_model_state_dict(engine), state))
        train(model, optimizer, range(1, 2))
    return said


@contextmanager
def _broken(after: int) -> Iterator[None]:
    """After so many reads of spans the drive fails."""
    read, reads = Tiers.read, [0]

    def fail(*args: Any, **more: Any) -> Any:
        reads[0] += 1
        if reads[0] > after:
            raise ReadError("the drive of rank 1 is gone")
        return read(*args, **more)

    Tiers.read = fail  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tiers.read = read  # type: ignore[method-assign]


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except (infinity.InfinityError, ReadError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
