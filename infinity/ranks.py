"""Which processes share an engine's shards: from torchrun's environment, a process group or a device mesh.

Ranks form a grid of replicas by shards. Every row holds all shards once; the ranks of a column hold the same shard.
One row is plain sharding; several rows are hybrid sharding, where a row is usually a node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from infinity.errors import ConfigError
from infinity.layout import Sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Ranks:
    """The grid of ranks that share an engine's shards, seen from one of them.

    Attributes:
        grid: global ranks, by replica and shard.
        replica, shard: this rank's place in the grid.
        global_rank: this process's number in the whole job.
    """

    grid: tuple[tuple[int, ...], ...] = ((0,),)
    replica: int = 0
    shard: int = 0
    global_rank: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks, row by row. The position in it is a rank's *member number*."""
        return tuple(rank for row in self.grid for rank in row)

    @property
    def size(self) -> int:
        """Members of the engine, over all rows."""
        return len(self.grid) * self.shards

    @property
    def shards(self) -> int:
        """Ranks of a row, each of which holds a part of everything."""
        return len(self.grid[0])

    @property
    def replicas(self) -> int:
        """Rows, each of which holds everything once."""
        return len(self.grid)

    @property
    def member(self) -> int:
        return self.replica * self.shards + self.shard

    @property
    def row(self) -> range:
        """Member numbers of the ranks that this one's shards are gathered from, itself included."""
        return range(self.replica * self.shards, (self.replica + 1) * self.shards)

    @property
    def column(self) -> range:
        """Member numbers of the ranks that hold the same shards as this one, itself included."""
        return range(self.shard, self.size, self.shards)

    def sharding(self, stage: int) -> Sharding:
        return Sharding(self.shard, self.shards, stage)


def discover(
    process_group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None, *, uses_cuda: bool = False
) -> Ranks:
    """The ranks to share with: of a mesh, of a process group, or else of the whole job.

    Args:
        process_group: shard over its ranks.
        mesh: one dimension: shard over it. Two: replicate over the first, shard over the second.
        uses_cuda: whether a process group that has to be made is for CUDA tensors too.

    Raises:
        ConfigError: both are given, this rank is in neither, or the job's ranks cannot find each other.
    """
    if process_group is not None and mesh is not None:
        raise ConfigError("process_group and mesh are both given; give the one to shard over")
    if not dist.is_available():
        return Ranks()
    if not dist.is_initialized():
        if process_group is not None or mesh is not None or _world_size(os.environ) == 1:
            return Ranks()
        _initialise(uses_cuda)
    grid = _grid(process_group, mesh)
    mine = dist.get_rank()
    places = [(i, j) for i, row in enumerate(grid) for j, rank in enumerate(row) if rank == mine]
    if not places:
        raise ConfigError(f"rank {mine} is not among the ranks to shard over: {grid}")
    replica, shard = places[0]
    return Ranks(grid, replica, shard, mine)


def _grid(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> tuple[tuple[int, ...], ...]:
    if mesh is not None:
        if mesh.mesh.dim() not in (1, 2):
            raise ConfigError(
                f"the mesh has {mesh.mesh.dim()} dimensions; give one to shard over, or two to replicate over the "
                'first and shard over the second, for example mesh["dp"]'
            )
        rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
        return tuple(tuple(int(rank) for rank in row) for row in rows)
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the process group it was given: dist.new_group gives ranks outside "
                "of the group a placeholder. Offload on its members only"
            )
        return (tuple(dist.get_process_group_ranks(process_group)),)
    size, asked = dist.get_world_size(), _world_size(os.environ)
    if size == 1 and asked > 1:
        raise ConfigError(
            f"the environment says that this job has {asked} ranks (WORLD_SIZE), but its process group has one: every "
            "rank would train a whole model by itself. Initialise the process group from the environment, or pass the "
            "group to shard over"
        )
    return (tuple(range(size)),)


def _world_size(environment: Mapping[str, str]) -> int:
    text = environment.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE={text} in the environment: it must be a number of ranks")
    return int(text)


def _initialise(uses_cuda: bool) -> None:
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this job has {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE), but {', '.join(missing)} is not set, so they "
            "cannot find each other. Start it with torchrun, or unset WORLD_SIZE to train on one"
        )
    if uses_cuda and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if uses_cuda else "gloo")
