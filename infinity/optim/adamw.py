"""`infinity.AdamW` and `infinity.Adam`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import Config, OptimizerKind
from infinity.optim.base import OffloadedOptimizer, Params, refuse_betas, refuse_negative
from infinity.optim.hyper import AdamWHyper


class _AdamLike(OffloadedOptimizer):
    """What the two share. The weight decay is AdamW's."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        config: Config | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings, max_grad_norm, config)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse values outside of their ranges."""
        refuse_negative(settings, "lr", "eps", "weight_decay")
        refuse_betas(settings)

    def hyper_from(self, settings: Mapping[str, Any]) -> AdamWHyper:
        beta1, beta2 = settings["betas"]
        return AdamWHyper(
            lr=float(settings["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(settings["eps"]),
            weight_decay=float(settings["weight_decay"]),
            maximize=bool(settings["maximize"]),
        )


class AdamW(_AdamLike):
    """AdamW over the parameters of an offloaded model; bit for bit `torch.optim.AdamW(fused=True)` in fp32.

    Args:
        params: parameters of one offloaded model, or parameter groups of them; with `config`, any others.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`.
        max_grad_norm: clip the total gradient norm in every step, exactly as `torch.nn.utils.clip_grad_norm_`.
        config: for parameters that are not offloaded (plain ones, or DTensors of `fully_shard`): `host` and `nvme` of
            it say where their optimizer state lies. See `close()`.

    Raises:
        ConfigError: a value out of range, a parameter that is not offloaded, or a schedule that cannot clip.
    """

    kind = OptimizerKind.ADAMW


class Adam(_AdamLike):
    """Adam over the parameters of an offloaded model; bit for bit `torch.optim.Adam(fused=True)` in fp32.

    Args:
        params: parameters of one offloaded model, or parameter groups of them; with `config`, any others.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.Adam`; the weight decay is a part of the gradient.
        max_grad_norm: clip the total gradient norm in every step, exactly as `torch.nn.utils.clip_grad_norm_`.
        config: for parameters that are not offloaded (plain ones, or DTensors of `fully_shard`): `host` and `nvme` of
            it say where their optimizer state lies. See `close()`.

    Raises:
        ConfigError: a value out of range, a parameter that is not offloaded, or a schedule that cannot clip.
    """

    kind = OptimizerKind.ADAM

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        config: Config | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, max_grad_norm=max_grad_norm, config=config
        )
