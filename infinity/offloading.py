"""`infinity.offload`: from a model and a config to an engine, whether there is one rank or are several."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.config import Config, DeviceKind
from infinity.engine import Engine
from infinity.initialisers import InitFn
from infinity.materialise import FirstValues
from infinity.ranks import discover
from infinity.weights.match import Match, match_weights
from infinity.weights.source import open_weights
from storage.drives import WrapBackend
from storage.paths import StrPath

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)


def offload(
    model: nn.Module,
    config: Config | None = None,
    *,
    weights: StrPath | None = None,
    strict: bool = True,
    init_fn: InitFn | None = None,
    on_progress: Callable[[str], None] | None = None,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    resume: bool = False,
    wrap_backend: WrapBackend | None = None,
) -> Engine:
    """Offload a model: its parameters, gradients and optimizer state move into the tiers, its forward stays as it is.

    In a job of several ranks (torchrun's environment, or a process group that is there already) every rank calls this
    with the same model; the ranks share the state as `config.stage` says, and start with the first rank's values.

    Args:
        model: a built model, or one built under `infinity.empty_init()`, which gets, unit by unit, the values of
            ordinary construction.
        config: settings; defaults to `Config()`.
        weights: a file or folder with its values, which stream into the shards: safetensors (single or with an index),
            files of `torch.save`, or a checkpoint of infinity, of which the parameters are taken. Any dtype; rounds as
            `load_state_dict` into the model would. Not used with `resume`.
        strict: refuse weights that lack a parameter or have one that the model does not have. Else both are told in a
            warning, and what is missing is initialised, or keeps the values of the built model.
        init_fn: for a model without data: called with every module that owns parameters, in module order, in place of
            what was recorded under `empty_init`. Default for models put on `meta` otherwise is their
            `reset_parameters()`, and for models of transformers their `_init_weights`.
        on_progress: told the name of every shard that has been initialised.
        process_group: share with its ranks, instead of with all.
        mesh: share over its dimension; of two, replicate over the first and share over the second (hybrid sharding).
        resume: with `durability="step"`, continue the run whose state lies in `nvme.paths`; see `Engine.restore`. The
            values of the model are not used.
        wrap_backend: called with the backend of every drive, gives what the engine uses instead; such as
            `lambda backend: ThrottledBackend(backend, Throttle(200e6, 50e6))` to see a run on a slower drive, or a
            `FaultyBackend` in a test. See `storage.backends`.

    Raises:
        RankError: the ranks hold different models, or one of them failed.
        CheckpointError: there is nothing to resume, or it is of another model; `weights` are missing or damaged, or do
            not fit: it names every parameter that does not.
        ConfigError, PlacementError, UnsupportedModelError: before the model is touched.
        SwapFullError: the swap directories have too little space; nothing is left behind.

    Example:
        ```python
        engine = infinity.offload(model, infinity.Config(precision="bf16"))
        optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
        ```
    """
    config = config or Config()
    uses_cuda = config.device.kind in (DeviceKind.AUTO, DeviceKind.CUDA) and torch.cuda.is_available()
    ranks = discover(process_group, mesh, uses_cuda=uses_cuda)
    with ExitStack() as stack:
        match = None
        if weights is not None and not resume:
            match = match_weights(model, stack.enter_context(open_weights(weights)), strict=strict)
            _tell(match)
        return Engine(
            model,
            config,
            values=FirstValues(init_fn, match),
            on_progress=on_progress,
            ranks=ranks if ranks.size > 1 else None,
            resume=resume,
            wrap_backend=wrap_backend,
        )


def _tell(match: Match) -> None:
    """What did not fit, with strict=False."""
    for kind, names in (("missing", match.missing), ("unexpected", match.unexpected)):
        if names:
            _log.warning("%s: %s key(s): %s", match.weights.path, kind, ", ".join(map(repr, names)))
