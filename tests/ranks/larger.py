"""Models larger than a rank's host budget, used in every way but the plain loop; runs in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import infinity
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.types import Op
from tests.parity.loops import gathered_parameters
from tests.ranks.branching import STEPS, Experts, loss_on
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import Case, Outcome, make_config, smallest_host, train_share
from tests.zoo import Block, Net, batch, build, loss_of

VOCAB = 8000
SETTINGS: dict[str, Any] = {"schedule": "synchronous", "device": {"kind": "cpu", "budget": "24MiB"}}
Found = dict[str, Tensor]
MakeModel = Callable[[], nn.Module]

make_large = partial(Net, blocks=2, vocab=VOCAB)


class LargeExperts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(37, 6000) for _ in range(4))


def backward(model: nn.Module, step: int, scaler: infinity.GradScaler | None = None) -> None:
    rank, size = rank_and_size()
    loss = loss_of(model, batch(step, vocab=VOCAB, shape=(4, 11)).chunk(size)[rank])
    # Large enough that the scale overflows when it has grown.
    (loss if scaler is None else scaler.scale(loss * 2.0**27)).backward()  # type: ignore[no-untyped-call]


@contextmanager
def engine_of(
    folder: Path, make: MakeModel, *, chunks: bool, precision: str = "fp32", **offload: Any
) -> Iterator[tuple[Any, nn.Module]]:
    """An engine in the smallest host budget, or in one that holds everything."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | {"precision": precision}
    begin = _empty if "weights" in offload else build
    host = smallest_host(folder, begin(make), settings, **offload) if chunks else {}
    model = begin(make)
    with infinity.offload(model, make_config(folder, settings | host), **offload) as engine:
        assert bool(engine.plan.placement.chunked) == chunks
        yield engine, model
        if chunks:
            budget = engine.plan.placement.host_budget_nbytes
            assert engine.metrics()["host/peak_bytes"] <= budget < max(g.flat_nbytes for g in engine._runtime.groups)


def _empty(make: MakeModel) -> nn.Module:
    with infinity.empty_init():
        return make()


def edit(folder: Path, *, chunks: bool) -> Found:
    """Parameters are edited in place between steps, and gradients replaced and dropped before them."""
    with engine_of(folder, make_large, chunks=chunks) as (_, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        for step in range(3):
            backward(model, step)
            torch.manual_seed(step)
            model.embed.weight.grad = None if step == 1 else torch.randn(VOCAB, 37)  # type: ignore[union-attr]
            backward(model, step + 5)
            model.head.weight.grad = torch.randn(VOCAB, 37)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            with infinity.gathered(model.embed), torch.no_grad():  # type: ignore[arg-type]
                model.embed.weight[17:4000:7].mul_(0.5)  # type: ignore[index,operator,union-attr]
        return gathered_parameters(model)


def branch(folder: Path, *, chunks: bool) -> Found:
    """Every rank takes its own route through the experts, and lends and averages what the other one uses."""
    rank, _ = rank_and_size()
    with engine_of(folder, LargeExperts, chunks=chunks) as (engine, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
        for step in range(STEPS):
            loss_on(model, rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert engine.metrics()["ranks/served"] > 0
        return gathered_parameters(model)


def save_and_load(folder: Path, *, chunks: bool) -> Found:
    """A checkpoint between two backwards, which a run in the other budget continues."""
    with engine_of(folder / "saving", make_large, chunks=chunks) as (engine, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, 1)
        engine.save(folder / "checkpoint")
    with engine_of(folder / "loading", make_large, chunks=not chunks) as (engine, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        engine.load(folder / "checkpoint")
        backward(model, 2)
        optimizer.step()
        return gathered_parameters(model)


def scale(folder: Path, *, chunks: bool) -> Found:
    """A loss scale that grows until gradients overflow: the step is skipped on all ranks, others unscale in chunks."""
    with engine_of(folder, make_large, chunks=chunks, precision="fp16") as (_, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        scaler = infinity.GradScaler(init_scale=2.0**100, growth_interval=2)
        scales = []
        for step in range(16):
            backward(model, step, scaler)
            backward(model, step + 20, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert {less < more for less, more in pairwise(scales) if less != more} == {True, False}, scales
        return gathered_parameters(model) | {"scales": torch.tensor(scales)}


def stream(folder: Path, *, chunks: bool) -> Found:
    """First values out of a file."""
    rank, _ = rank_and_size()
    file = folder / f"weights{rank}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach() for name, value in build(make_large, seed=7).named_parameters()}, file)
    with engine_of(folder, make_large, chunks=chunks, weights=file) as (_, model):
        return gathered_parameters(model)


WAYS: dict[str, Callable[..., Found]] = {
    "edit": edit,
    "branch": branch,
    "save": save_and_load,
    "scale": scale,
    "stream": stream,
}


def use_every_way(folder: Path) -> dict[str, tuple[Found, Found]]:
    """What is found with everything held, and in chunks."""
    return {
        name: (use(folder / f"{name} held", chunks=False), use(folder / f"{name} in chunks", chunks=True))
        for name, use in WAYS.items()
    }


def fail_in_a_chunk(folder: Path, key: str) -> None:
    """The drive of the second rank cannot read a chunk while the first one needs it; nobody catches anything."""
    rank, _ = rank_and_size()
    faulty: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        faulty.append(FaultyBackend(backend))
        return faulty[-1]

    with engine_of(folder / "swap", make_large, chunks=True, wrap_backend=wrap) as (_, model):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        if rank == 1:
            faulty[-1].inject(Fault.IO_ERROR, op=Op.READ, key=key, skip=1)
        for step in range(2):
            backward(model, step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()


def train_unevenly(folder: Path, stage: int) -> tuple[Outcome, Outcome]:
    """Both ranks hold everything; then the first one alone does, and the other has the smallest budget that works."""
    rank, size = rank_and_size()
    case = Case(vocab=VOCAB, blocks=2, max_norm=0.1, clip_in_optimizer=True, settings=SETTINGS | {"stage": stage})
    held = train_share(folder / "held", case, rank, size)
    least = smallest_host(folder, build(make_large), case.settings)
    uneven = replace(case, settings=case.settings | least) if rank == 1 else case
    return held, train_share(folder / "uneven", uneven, rank, size)
