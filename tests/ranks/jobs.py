"""What the ranks of a test run; each function is called in a process of its own, with torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import infinity
from tests.parity.loops import gathered_parameters
from tests.ranks.training import Case, Outcome, built_on, make_config, train_share
from tests.zoo import Block


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_on_grids(folder: Path, case: Case) -> list[Outcome]:
    """Four ranks: sharded over all; hybrid, two replicas of two shards; and two jobs of two ranks side by side.

    Of the last, the ranks of one mesh dimension share an engine, as in a tensor-parallel job.
    """
    rank, size = rank_and_size()
    outcomes = [train_share(folder / "all", case, rank, size)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outcomes.append(train_share(folder / "hybrid", case, rank, size, mesh=mesh))
    half = mesh["outer"]
    outcomes.append(train_share(folder / "half", case, half.get_local_rank(), 2, mesh=half))
    group = mesh["inner"].get_group()
    outcomes.append(train_share(folder / "group", case, dist.get_rank(group), 2, process_group=group))
    return outcomes


def train_hybrid(folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Four ranks, two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return [train_share(folder / f"swap{n}", case, *rank_and_size(), mesh=mesh) for n, case in enumerate(cases)]


def train_pipeline(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Two pipeline stages of two data-parallel ranks each; a stage is an offloaded model that its ranks share."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, data = mesh["stage"].get_local_rank(), mesh["data"].get_local_rank()
    model = pipeline_part(stage)
    losses: list[Tensor] = []
    with infinity.offload(model, make_config(folder / "swap", {}), mesh=mesh["data"]) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        part = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group())
        schedule = ScheduleGPipe(
            part, n_microbatches=2, loss_fn=lambda *both: pipeline_loss(*both) / 2, scale_grads=False
        )
        for step in range(2):
            inputs, target = pipeline_batch(step)
            mine = inputs.chunk(2)[data], target.chunk(2)[data]
            if stage == 0:
                schedule.step(mine[0])
            else:
                schedule.step(target=mine[1], losses=losses)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.plan.parameters == sum(p.numel() for p in model.parameters())
        return [loss.item() for loss in losses], gathered_parameters(model)


def pipeline_part(stage: int) -> nn.Module:
    """One half of a stack of blocks."""
    torch.manual_seed(stage)
    return nn.Sequential(Block(), Block())


def pipeline_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 37, generator=generator), torch.randn(8, 37, generator=generator)


def pipeline_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train_with_unequal_budgets(folder: Path, cases: Sequence[Case]) -> tuple[Outcome, str, str]:
    """Each rank trains a case of its own; with the schedule it came to, and why."""
    rank, size = rank_and_size()
    outcome = train_share(folder, cases[rank], rank, size)
    with infinity.offload(built_on(rank, cases[rank]), make_config(folder, cases[rank].settings)) as engine:
        placement = engine.plan.placement
        return outcome, placement.schedule.value, placement.schedule_reason


def train_cases(folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Several runs, one after another, started by nothing but the environment."""
    outcomes = []
    for number, case in enumerate(cases):
        outcomes.append(train_share(folder / f"swap{number}", case, *rank_and_size()))
        dist.barrier()  # every rank has closed its engine
        is_kept = case.settings.get("durability") == "step"  # to be resumed
        assert is_kept or not list((folder / f"swap{number}").rglob("*.swap"))
    return outcomes
