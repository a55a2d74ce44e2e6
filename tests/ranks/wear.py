"""What the ranks of the wear tests run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.plan.ledger import WearLedger
from infinity.wear import WearWatch
from storage.devices import identify_device
from tests.ranks.training import make_config
from tests.zoo import Block


def train_until_worn(folder: Path) -> int:
    """Steps until this rank is told to stop, of five. Only the drive of rank 1 has been written to before."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_STATE_HOME"] = str(folder / f"state{rank}")  # as on nodes of their own
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    if rank == 1:
        WearLedger().add(identify_device(swap), 10**12)
    nvme = {"paths": [swap], "wear_budget": "1TB", "wear_action": "stop"}
    settings = {"nvme": nvme, "durability": "step", "schedule": "synchronous"}  # so that even this little is written
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    with infinity.offload(model, make_config(swap, settings)) as engine, WearWatch(engine) as wear:
        optimizer = infinity.AdamW(model.parameters())
        for step in range(5):
            model(torch.ones(2, 37)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if wear.step_ended():
                return step + 1
    return 0
