"""What every rank does in test_dtensors: plain modules of DTensors, saved and loaded through torch's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from infinity.checkpoint.dcp_reader import InfinityReader
from infinity.checkpoint.dcp_writer import InfinityWriter
from tests.zoo import Net, build


def _sharded(dim: int, *, blank: bool) -> dict[str, Any]:
    """The state dict of a net as DTensors; one-dimensional tensors along their only dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = build(Net).state_dict()
    whole = {name: torch.zeros_like(value) if blank else value for name, value in state.items()}
    return {name: distribute_tensor(value, mesh, [Shard(min(dim, value.dim() - 1))]) for name, value in whole.items()}


def save_and_load(folder: Path, path: Path) -> bool:
    """Write shards along the first dimension; read them along the first and the last. Whether they are the same."""
    dist.init_process_group("gloo")
    try:
        dcp.save({"model": _sharded(0, blank=False)}, storage_writer=InfinityWriter(path, build(Net)))
        dist.barrier()
        is_same = True
        for dim in (0, 1):
            found = _sharded(dim, blank=True)
            dcp.load({"model": found}, storage_reader=InfinityReader(path))
            expected = _sharded(dim, blank=False)
            is_same &= all(torch.equal(found[n].to_local(), expected[n].to_local()) for n in expected)
        return is_same
    finally:
        dist.destroy_process_group()
