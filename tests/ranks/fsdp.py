"""FSDP2 with its optimizer state in the tiers, beside FSDP2 with torch's optimizer; in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import infinity
from tests.ranks.jobs import rank_and_size
from tests.zoo import Net, batch, build, loss_of

STEPS = 3


def sharded(seed: int = 0) -> nn.Module:
    model = build(Net, seed=seed)
    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh)


def config(folder: Path) -> infinity.Config:
    """Small enough for the state of half a model to be swapped. Budgets are per machine."""
    budget = 160 * 1024 * rank_and_size()[1]
    return infinity.Config(host={"budget": budget}, chunk="32KiB", nvme={"paths": [folder], "threads": 1})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[tuple[float, float]]:
    rank, size = rank_and_size()
    seen = []
    for step in steps:
        loss = loss_of(model, batch(step, shape=(4, 11)).chunk(size)[rank])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.full_tensor().item()))  # type: ignore[attr-defined]
    return seen


def differing(ours: nn.Module, theirs: nn.Module) -> list[str]:
    there = dict(theirs.named_parameters())
    return [n for n, p in ours.named_parameters() if not torch.equal(_local(p), _local(there[n]))]


def differing_state(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Parameters whose moments differ, in bits or in how they are sharded."""
    assert ours["state"].keys() == theirs["state"].keys()
    found = []
    for name, state in theirs["state"].items():
        for what, value in state.items():
            mine = ours["state"][name][what]
            same_kind = type(mine) is type(value) and getattr(mine, "placements", 0) == getattr(value, "placements", 0)
            if not same_kind or not torch.equal(_local(mine), _local(value)):
                found.append(f"{what} of {name}")
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_beside_torch(folder: Path) -> dict[str, Any]:
    """One line is another one; everything else, losses and norms included, has the same bits."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model, plain = sharded(), sharded()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, config=config(folder / "swap"))
    same_losses = train(model, optimizer, range(STEPS)) == train(plain, reference, range(STEPS))
    assert optimizer.state_tier is not None
    found: dict[str, Any] = {
        "same losses and norms": same_losses,
        "differing": differing(model, plain) + differing_state(optimizer.state_dict(), reference.state_dict()),
        "metrics": optimizer.state_tier.metrics(),
        "state": sum(8 * _local(p).numel() for p in model.parameters()),
    }
    # torch's own way to collect and to set the state, of which a fresh optimizer has none
    saved = get_optimizer_state_dict(model, optimizer)
    found["differing saved"] = differing_state(saved, get_optimizer_state_dict(plain, reference))
    found["steps taken by looking"] = differing_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()
    rank, size = rank_and_size()
    own = folder / "swap" / f"rank{rank}" if size > 1 else folder / "swap"
    found["left"] = [str(path) for path in own.rglob("*.swap")]
    optimizer = infinity.AdamW(model.parameters(), lr=0.5, config=config(folder / "again"))
    set_optimizer_state_dict(model, optimizer, saved)
    same_losses = train(model, optimizer, range(STEPS, 5)) == train(plain, reference, range(STEPS, 5))
    found["same again"] = same_losses and not differing(model, plain)
    optimizer.close()
    return found
