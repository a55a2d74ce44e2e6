"""Ranks that do not all do the same: other experts, other numbers of forwards, mistakes, failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.agreement import AllRanks
from infinity.checkpoint.requests import Holdings, requests
from infinity.collectives import Collectives
from infinity.lockstep import Want
from infinity.torch_compat import job_store
from tests.parity.loops import gathered_parameters
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Block, Net, batch, build, loss_of

STEPS = 3


class Experts(nn.Module):
    """A net whose middle is chosen anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 37)
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(37, 29)

    def forward(self, ids: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.embed(ids)
        for number in route:
            x = self.experts[number](x)
        out: Tensor = self.head(x)
        return out


def route_of(rank: int, step: int) -> tuple[int, ...]:
    """Other experts, in another order, and not as many on every rank; nobody ever takes the last one."""
    return [((0, 1, 2), (2,)), ((1, 0), (0, 1)), ((), (1, 2, 0))][step][rank]


def loss_on(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = batch(10 * step + rank)
    return nn.functional.cross_entropy(model(ids, route_of(rank, step)).flatten(0, 1), ids.flatten())


def train_experts_plain(*, clips: bool) -> dict[str, Tensor]:
    model = build(Experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        (sum(loss_on(model, rank, step) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_experts(folder: Path, schedule: str) -> tuple[dict[str, Tensor], int]:
    """Every rank takes its own route; the first one evaluates, and looks at parameters, on its own."""
    rank, _ = rank_and_size()
    model = build(Experts)
    budget = "900KiB" if schedule == "overlapped" else "400KiB"  # what other ranks do not update yet waits in memory
    settings = {"host": {"budget": budget}, "schedule": schedule}
    with infinity.offload(model, make_config(folder / "swap", settings)) as engine:
        clip = None if schedule == "overlapped" else 1.0
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=clip)
        for step in range(STEPS):
            loss_on(model, rank, step).backward()  # type: ignore[no-untyped-call]
            if rank == 0:
                with torch.no_grad():
                    model(batch(99), (3, 3))
                with infinity.gathered(model.experts[3]):
                    assert model.experts[3].up.weight.isfinite().all()
            optimizer.step()
            optimizer.zero_grad()
        lockstep = engine._runtime.lockstep
        assert lockstep is not None
        return gathered_parameters(model), lockstep.served


def train_scaled(folder: Path) -> list[tuple[dict[str, Tensor], float, int]]:
    """Only the second rank overflows, in the second of three steps; with gradients in memory, and spilled."""
    rank, size = rank_and_size()
    found = []
    for number, budget in enumerate(("64MiB", "400KiB")):
        model = build(Net)
        with infinity.offload(model, make_config(folder / f"swap{number}", {"host": {"budget": budget}})):
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
            scaler = infinity.GradScaler(init_scale=2.0**10)
            for step in range(STEPS):
                loss = loss_of(model, batch(step, shape=(4, 11)).chunk(size)[rank])
                if rank == 1 and step == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append((gathered_parameters(model), scaler.get_scale(), scaler.skipped_steps))
    return found


def train_without_the_second_step() -> dict[str, Tensor]:
    model = build(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in (0, 2):
        loss_of(model, batch(step, shape=(4, 11))).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except infinity.InfinityError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make_mistakes(folder: Path) -> dict[str, str]:
    """What a rank is told that does something else than the others, or asks for what ranks cannot do."""
    rank, _ = rank_and_size()
    late = {"schedule": "overlapped", "stage": 2}
    said = {
        "another model": _said(
            lambda: infinity.offload(Net(blocks=2, hidden=53 + rank), make_config(folder / "a", {}))
        ),
        "overlapped": _said(lambda: infinity.offload(Net(), make_config(folder / "a", late))),
    }
    model = build(Net)
    with infinity.offload(model, make_config(folder / "b", {})) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, batch(rank)).backward()  # type: ignore[no-untyped-call]
        gradient = model.head.weight.grad
        said["gradient"] = _said(lambda: gradient + 1)
        said["save"] = _said(lambda: engine.save(folder / f"checkpoint{rank}"))
        (folder / "file").touch()
        said["unsaved"] = _said(lambda: engine.save(folder / "file"))
        said["nothing there"] = _said(lambda: engine.load(folder / "nothing"))
        clip = [lambda: infinity.clip_grad_norm_(model.parameters(), 1.0), optimizer.step]
        said["clip"] = _said(clip[rank])
        optimizer.zero_grad()
        loss_of(model, batch(rank)).backward()  # type: ignore[no-untyped-call]
        if rank == 1:
            optimizer.zero_grad()
        said["zero_grad"] = _said(optimizer.step)
    with infinity.offload(build(Net), make_config(folder / "c", {})) as engine:  # goes on as if nothing had been
        said["again"] = str(engine.plan.parameters)
        engine._runtime.model.extra = torch.nn.Linear(50, 50)
        said["adopt"] = _said(engine.adopt)
    return said


def fail_in_offload(folder: Path) -> list[str]:
    """What both ranks are told when one of them cannot offload: for want of memory, or of first values."""
    rank, _ = rank_and_size()
    small = {"host": {"budget": "16KiB" if rank == 1 else "64MiB"}}
    said = [_said(lambda: infinity.offload(build(Net), make_config(folder / "a", small)))]
    with infinity.empty_init():
        model = Net()
    try:
        infinity.offload(model, make_config(folder / "b", {}), init_fn=_no_values if rank == 0 else None)
    except (infinity.InfinityError, ValueError) as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def exchange_when_the_other_has_left(folder: Path) -> str:
    """What the first rank is told by an exchange that has failed before it looks."""
    rank, _ = rank_and_size()
    with infinity.offload(build(Net), make_config(folder / "swap", {})) as engine:
        lockstep = engine._runtime.lockstep
        assert lockstep is not None
        if rank == 1:
            return ""
        collectives, channel = lockstep.collectives, lockstep.collectives._channel
        start = channel.all_gather

        def failed(output: Tensor, mine: Tensor) -> Any:
            work = start(output, mine)
            while not work.is_completed():
                time.sleep(0.01)
            return work

        while collectives._who_left() is None:
            time.sleep(0.01)
        channel.all_gather = failed  # type: ignore[method-assign]
        return _said(lambda: collectives.exchange(torch.ones(4)))


def _no_values(module: nn.Module) -> None:
    raise ValueError("nobody knows the first values")


def fail(folder: Path, where: str) -> None:
    """The second rank fails while the first one needs it; nobody catches anything."""
    rank, _ = rank_and_size()
    model = build(Net)
    infinity.offload(model, make_config(folder / "swap", {}))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    if rank == 1:
        if where == "forward":
            model.blocks[2].register_forward_hook(_explode)  # type: ignore[union-attr]
        elif where == "killed":
            os._exit(9)
        else:
            raise ValueError("the data loader is empty")
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _explode(*_: object) -> None:
    raise ValueError("a module of rank 1 exploded")


def receive_from_a_rank_that_keeps_silent(folder: Path) -> str:
    """What the first rank is told when the second one lives and sends nothing."""
    rank, _ = rank_and_size()
    with infinity.offload(build(Net), make_config(folder / "swap", {})) as engine:
        lockstep = engine._runtime.lockstep
        assert lockstep is not None
        lockstep.exchange(torch.ones(1))  # both are here: they have a second to meet again
        impatient, store = Collectives(lockstep.collectives.ranks, torch.device("cpu"), 1.0), job_store("silence")
        try:
            if rank == 1:
                store.wait(["told"], timedelta(seconds=60))
                return ""
            said = _said(lambda: impatient.receive(torch.empty(4), 1))
            store.set("told", "1")
            return said
        finally:
            impatient.close()


def be_somewhere_else(folder: Path) -> list[str]:
    """What both are told when one has failed, as nobody knows, and gone on to something else; then they go on."""
    rank, _ = rank_and_size()
    with infinity.offload(build(Net), make_config(folder / "swap", {"rank_timeout_s": 20.0})) as engine:
        lockstep = engine._runtime.lockstep
        assert lockstep is not None
        ranks = AllRanks(lockstep)

        def ask() -> None:
            with requests(ranks, "asking", Holdings(lambda *_: (), lambda *_: torch.empty(0), lambda *_: None)):
                return

        places: list[Callable[[], object]] = [lambda: ranks.texts("fine"), ask, lambda: lockstep.meet(Want.STEP)]
        pairs = [(0, 1), (2, 0), (1, 2)]
        said = [_said(places[pair[rank]]) for pair in pairs]
        lockstep.meet(Want.STEP)
        return [*said, ranks.texts("still here")[1 - rank]]
