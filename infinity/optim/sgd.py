"""`infinity.SGD`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import Config, OptimizerKind
from infinity.errors import ConfigError
from infinity.optim.base import OffloadedOptimizer, Params, refuse_negative
from infinity.optim.hyper import SgdHyper


class SGD(OffloadedOptimizer):
    """Gradient descent over the parameters of an offloaded model; bit for bit `torch.optim.SGD` in fp32 on the CPU.

    Without momentum it keeps no state: nothing but parameters is read and written.

    Args:
        params: parameters of one offloaded model, or parameter groups of them; with `config`, any others.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`, whose default variant (a
            loop over the parameters) it equals. Whether there is a momentum is settled here, for all groups.
        max_grad_norm: clip the total gradient norm in every step, exactly as `torch.nn.utils.clip_grad_norm_`.
        config: for parameters that are not offloaded (plain ones, or DTensors of `fully_shard`): `host` and `nvme` of
            it say where their optimizer state lies. See `close()`.

    Raises:
        ConfigError: a value out of range, a parameter that is not offloaded, or a schedule that cannot clip.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        config: Config | None = None,
    ) -> None:
        given = list(params)
        self._has_momentum = momentum != 0 or any(
            isinstance(group, dict) and group.get("momentum", 0) != 0 for group in given
        )
        settings = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(given, settings, max_grad_norm, config)  # type: ignore[arg-type]

    @property
    def kind(self) -> OptimizerKind:
        return OptimizerKind.SGD_MOMENTUM if self._has_momentum else OptimizerKind.SGD

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse values outside of their ranges."""
        refuse_negative(settings, "lr", "momentum", "weight_decay")
        if settings["nesterov"] and (settings["momentum"] <= 0 or settings["dampening"] != 0):
            raise ConfigError(
                f"nesterov needs a momentum and no dampening, got momentum={settings['momentum']} and "
                f"dampening={settings['dampening']}"
            )

    def hyper_from(self, settings: Mapping[str, Any]) -> SgdHyper:
        momentum = float(settings["momentum"])
        if momentum != 0 and not self._has_momentum:
            raise ConfigError(
                f"a parameter group has momentum={momentum} now, but infinity.SGD was built without; there is no room "
                "for its buffers. Build it with a momentum"
            )
        return SgdHyper(
            lr=float(settings["lr"]),
            momentum=momentum,
            dampening=float(settings["dampening"]),
            weight_decay=float(settings["weight_decay"]),
            nesterov=bool(settings["nesterov"]),
            maximize=bool(settings["maximize"]),
        )
