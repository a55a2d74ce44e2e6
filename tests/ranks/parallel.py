"""Tensor parallelism beside data parallelism: two by two ranks; each function runs in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity
from tests.parity.loops import gathered_parameters
from tests.ranks.training import make_config

STEPS = 3


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 50)
        self.down = nn.Linear(50, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Feed(), Feed(), Feed())


def parallel_model(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    plan = {}
    for number in range(3):
        plan |= {f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()}
    return parallelize_module(model_of(seed), mesh, plan)


def loss_on(model: nn.Module, step: int, part: int, parts: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs, target = (torch.randn(8, 24, generator=generator).chunk(parts)[part] for _ in range(2))
    return nn.functional.mse_loss(model(inputs), target)


def train_plain(clip: float) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    norms = []
    for step in range(STEPS):
        loss_on(model, step, 0, 1).backward()  # type: ignore[no-untyped-call]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def train_two_by_two(folder: Path, clip: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Norms, how far the parameters are from those of one process, and what a mistake is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part = mesh["dp"].get_local_rank()
    plain_norms, plain = train_plain(clip)
    model = parallel_model(mesh["tp"], seed=mesh["dp"].get_local_rank())  # the first data-parallel rank's values count
    placed = {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}
    said = ""
    try:
        infinity.offload(model, make_config(folder / "refused", {}))
    except infinity.ConfigError as error:
        said = str(error)
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == len(placed) == 12  # as it was
    norms = []
    with infinity.offload(model, make_config(folder / "swap", settings), mesh=mesh["dp"]) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
        for step in range(STEPS):
            loss_on(model, step, part, 2).backward()  # type: ignore[no-untyped-call]
            norms.append(infinity.clip_grad_norm_(list(model.parameters()), clip).item())
            optimizer.step()
            optimizer.zero_grad()
        far = {}
        for name, value in gathered_parameters(model).items():
            wanted = plain[name]
            if name in placed:
                wanted = distribute_tensor(wanted, mesh["tp"], placed[name]).to_local()
            assert value.shape == wanted.shape
            far[name] = (value - wanted).abs().max().item()
        parameters = engine.plan.parameters
    return {"norms": norms, "plain norms": plain_norms, "far": far, "said": said, "parameters": parameters}


def read_gradients_of_shards(folder: Path) -> dict[str, Any]:
    """One data-parallel rank: gradients are DTensors, and torch clips them as it does without an engine."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plain_norms, _ = train_plain(0.5)
    model = parallel_model(mesh["tp"])
    with infinity.offload(model, make_config(folder / "swap", {}), mesh=mesh["dp"]):
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for step in range(STEPS):
            loss_on(model, step, 0, 1).backward()  # type: ignore[no-untyped-call]
            with_mesh = [p for p in model.parameters() if isinstance(p.grad, DTensor)]
            assert len(with_mesh) == 12
            others = [p for p in model.parameters() if p not in set(with_mesh)]
            parts = []
            for some in (with_mesh, others):
                parts.append(torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None]))
            parts[0] = parts[0].full_tensor()  # type: ignore[attr-defined]
            norms.append(torch.stack(parts).norm().item())
            infinity.clip_grad_norm_(list(model.parameters()), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": norms, "plain norms": plain_norms}
