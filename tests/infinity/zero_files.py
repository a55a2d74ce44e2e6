"""Writes ZeRO checkpoints in DeepSpeed's layout from a model and optimizer of plain PyTorch.

The layout is that of version 0.19; a checkpoint that DeepSpeed itself wrote was compared with it file by file.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def _deepspeed_classes() -> Iterator[tuple[type[enum.Enum], type]]:
    """Classes that pickle under DeepSpeed's names; gone afterwards, as where it is not installed."""
    config, scaler = "deepspeed.runtime.zero.config", "deepspeed.runtime.fp16.loss_scaler"
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", config, "deepspeed.runtime.fp16", scaler]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    stage: Any = enum.IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3})
    loss_scaler = type("LossScaler", (), {})
    for made, home in ((stage, config), (loss_scaler, scaler)):
        made.__module__ = home
        setattr(sys.modules[home], made.__name__, made)
    try:
        yield stage, loss_scaler
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class ZeroWriter:
    """A run of plain PyTorch, written as DeepSpeed's stage `stage` with `ranks` ranks would have saved it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int,
        ranks: int,
        sub_group_numel: int = 3000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._stage = stage
        self._ranks = ranks
        self._dtype = dtype
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._owners = list(range(len(self._groups)))
        if stage == 3:
            self._cut_sub_groups(sub_group_numel)

    def write(self, folder: Path, **client_state: Any) -> Path:
        """Write the checkpoint `global_step3` and `latest`; the folder with `latest`."""
        tag = folder / "global_step3"
        tag.mkdir(parents=True)
        (folder / "latest").write_text("global_step3")
        prefix = "bf16_" if self._dtype is torch.bfloat16 else ""
        with _deepspeed_classes() as (stages, scaler):
            for rank in range(self._ranks):
                state = {"zero_stage": stages(self._stage), "loss_scaler": scaler(), **self._optimizer_state(rank)}
                content = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
                torch.save(content, tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                if self._stage == 3 or rank == 0:
                    name = f"zero_pp_rank_{rank}_mp_rank_00" if self._stage == 3 else "mp_rank_00"
                    torch.save({**self._model_state(rank), **client_state}, tag / f"{name}_model_states.pt")
        return folder

    def _cut_sub_groups(self, numel: int) -> None:
        """Parameters together until they have as many elements; never of two parameter groups."""
        cut: list[list[nn.Parameter]] = []
        owners = []
        for number, group in enumerate(self._groups):
            used = 0
            for parameter in group:
                if not owners or owners[-1] != number or used >= numel:
                    cut.append([])
                    owners.append(number)
                    used = 0
                cut[-1].append(parameter)
                used += parameter.numel()
        self._groups, self._owners = cut, owners

    def _value(self, parameter: nn.Parameter, kind: str) -> Tensor:
        tensor: Tensor = parameter.detach() if kind == "parameter" else self._optimizer.state[parameter][kind]
        return tensor.float().reshape(-1)

    def _flat(self, group: Sequence[nn.Parameter], kind: str, rank: int) -> Tensor:
        """What one rank has of a group."""
        if self._stage == 3:
            return torch.cat([self._share(self._value(parameter, kind), rank) for parameter in group])
        whole = torch.cat([self._value(parameter, kind) for parameter in group])
        align = 2 * self._ranks
        whole = nn.functional.pad(whole, (0, -whole.numel() % align))
        share = whole.numel() // self._ranks
        return whole[rank * share : (rank + 1) * share].clone()

    def _share(self, flat: Tensor, rank: int) -> Tensor:
        share = -(-flat.numel() // self._ranks)
        padded = nn.functional.pad(flat, (0, share * self._ranks - flat.numel()), value=float("nan"))
        return padded[rank * share : (rank + 1) * share].clone()

    def _optimizer_state(self, rank: int) -> dict[str, Any]:
        moments = ("exp_avg", "exp_avg_sq")
        states = {
            number: {"step": self._optimizer.state[group[0]]["step"]}
            | {moment: self._flat(group, moment, rank) for moment in moments}
            for number, group in enumerate(self._groups)
            if group[0] in self._optimizer.state
        }
        param_groups = [
            {**settings, "params": [n for n, owner in enumerate(self._owners) if owner == number]}
            for number, settings in enumerate(self._optimizer.param_groups)
        ]
        base = {"state": states, "param_groups": param_groups}
        masters = [self._flat(group, "parameter", rank) for group in self._groups]
        if self._stage == 3:
            return {"partition_count": self._ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        return {
            "partition_count": [self._ranks] * len(self._groups),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "param_alignment_paddings": [[0] * len(group) for group in self._groups],
        }

    def _tied(self) -> dict[str, str]:
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: self._names[p] for name, p in every if self._names[p] != name}

    def _model_state(self, rank: int) -> dict[str, Any]:
        trained = {parameter for group in self._groups for parameter in group}
        frozen = {name: p.detach() for p, name in self._names.items() if p not in trained}
        module = {
            name: t.to(self._dtype) if t.is_floating_point() else t for name, t in self._model.state_dict().items()
        }
        buffers = [name for name, _ in self._model.named_buffers()]
        fragments: Mapping[str, Tensor] | None = None
        if self._stage == 3:
            module = {name: t if name in buffers else t.new_empty(0) for name, t in module.items()}
            fragments = {name: self._share(t.reshape(-1), rank) for name, t in frozen.items()}
        return {
            "module": OrderedDict(module),
            "buffer_names": buffers,
            "param_shapes": [OrderedDict((self._names[p], p.shape) for p in group) for group in self._groups],
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()) if self._stage == 3 else None,
            "frozen_param_fragments": fragments,
            "shared_params": {} if self._stage == 3 else self._tied(),
            "lr_scheduler": None,
            "global_steps": 3,
            "skipped_steps": 0,
            "ds_config": {"bf16": {"enabled": self._dtype is torch.bfloat16}},
            "ds_version": "0.19.8",
        }
