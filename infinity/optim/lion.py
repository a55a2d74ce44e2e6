"""`infinity.Lion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import Config, OptimizerKind
from infinity.optim.base import OffloadedOptimizer, Params, refuse_betas, refuse_negative
from infinity.optim.hyper import LionHyper


class Lion(OffloadedOptimizer):
    """Lion (Chen et al., 2023) over the parameters of an offloaded model: one moment, updates of one size.

    Args:
        params: parameters of one offloaded model, or parameter groups of them; with `config`, any others.
        lr: size of an update, usually a tenth to a third of AdamW's.
        betas: weight of the average in the update, and in the next average.
        weight_decay: decoupled; usually three to ten times AdamW's.
        maximize: ascend.
        max_grad_norm: clip the total gradient norm in every step, exactly as `torch.nn.utils.clip_grad_norm_`.
        config: for parameters that are not offloaded (plain ones, or DTensors of `fully_shard`): `host` and `nvme` of
            it say where their optimizer state lies. See `close()`.

    Raises:
        ConfigError: a value out of range, a parameter that is not offloaded, or a schedule that cannot clip.
    """

    kind = OptimizerKind.LION

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        config: Config | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings, max_grad_norm, config)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse values outside of their ranges."""
        refuse_negative(settings, "lr", "weight_decay")
        refuse_betas(settings)

    def hyper_from(self, settings: Mapping[str, Any]) -> LionHyper:
        beta1, beta2 = settings["betas"]
        return LionHyper(
            lr=float(settings["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(settings["weight_decay"]),
            maximize=bool(settings["maximize"]),
        )
