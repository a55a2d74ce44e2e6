"""DTensors, and small numbers that the ranks of a device mesh reduce among each other, whatever its backend is."""

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


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is spread over ranks; asks without loading what plain tensors do not need."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local
