"""`infinity.offload`: from a model and a config to an engine, whether there is one rank or are several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.config import Config, DeviceKind
from infinity.engine import Engine
from infinity.init import InitFn
from infinity.ranks import discover

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def offload(
    model: nn.Module,
    config: Config | None = None,
    *,
    init_fn: InitFn | None = None,
    on_progress: Callable[[str], None] | None = None,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    resume: bool = False,
) -> Engine:
    """Offload a model: its parameters, gradients and optimizer state move into the tiers, its forward stays as it is.

    In a job of several ranks (torchrun's environment, or a process group that is there already) every rank calls this
    with the same model; the ranks share the state as `config.stage` says, and start with the first rank's values.

    Args:
        model: a built model, or one built under `infinity.empty_init()`, which is then initialised unit by unit.
        config: settings; defaults to `Config()`.
        init_fn: for a model without data: called with every module that owns parameters, in module order. Default is
            their `reset_parameters()`.
        on_progress: told the name of every shard that has been initialised.
        process_group: share with its ranks, instead of with all.
        mesh: share over its dimension; of two, replicate over the first and share over the second (hybrid sharding).
        resume: with `durability="step"`, continue the run whose state lies in `nvme.paths`; see `Engine.restore`. The
            values of the model are not used.

    Raises:
        RankError: the ranks hold different models, or one of them failed.
        CheckpointError: there is nothing to resume, or it is of another model.
        ConfigError, PlacementError, UnsupportedModelError: before the model is touched.
        SwapFullError: the swap directories have too little space; nothing is left behind.

    Example:
        engine = infinity.offload(model, infinity.Config(precision="bf16"))
        optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
    """
    config = config or Config()
    uses_cuda = config.device.kind in (DeviceKind.AUTO, DeviceKind.CUDA) and torch.cuda.is_available()
    ranks = discover(process_group, mesh, uses_cuda=uses_cuda)
    sharing = ranks if ranks.size > 1 else None
    return Engine(model, config, init_fn=init_fn, on_progress=on_progress, ranks=sharing, resume=resume)
