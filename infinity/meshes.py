"""Small numbers that the ranks of a device mesh reduce among each other, whatever the backend of the mesh is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def reduced(values: torch.Tensor, mesh: DeviceMesh, dimension: int, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """CPU values reduced over one dimension of a mesh; a call of all its ranks.

    They cross by way of the mesh's kind of device: NCCL knows no tensors on the CPU.
    """
    there = values.to(mesh.device_type, copy=True)
    dist.all_reduce(there, op, group=mesh.get_group(dimension))
    return there.cpu()
