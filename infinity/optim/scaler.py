"""`infinity.GradScaler`: a dynamic loss scale for fp16, with steps that are skipped exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar, overload

import torch

from infinity.errors import ConfigError, IterationError
from infinity.optim.base import OffloadedOptimizer

_T = TypeVar("_T", bound=torch.Tensor)
_SETTINGS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class _Stage(Enum):
    """What has happened to an optimizer's gradients since the last `update`."""

    UNSCALED = "unscaled"
    STEPPED = "stepped"


class GradScaler:
    """Takes the place of `torch.amp.GradScaler`, whose arithmetic it follows, where gradients lie in the tiers.

    Overflows are found while gradients arrive, so that asking costs no pass over them. A skipped step changes nothing:
    neither parameters nor state nor step counts, and it reads and writes no state. `torch.amp.GradScaler` works too as
    long as all gradients are in host memory.

    Args:
        init_scale: what losses are multiplied by at first.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without overflow.
        backoff_factor: multiplies the scale after an overflow.
        growth_interval: in steps.
        enabled: False lets everything through unchanged.

    Raises:
        ConfigError: a scale or factor that is not a power of two; multiplying by others would round.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        enabled: bool = True,
    ) -> None:
        _check_power("init_scale", init_scale)
        _check_power("growth_factor", growth_factor)
        _check_power("backoff_factor", backoff_factor)
        if growth_factor <= 1 or backoff_factor >= 1 or growth_interval < 1:
            raise ConfigError(
                f"growth_factor={growth_factor}, backoff_factor={backoff_factor}, growth_interval={growth_interval}: "
                "the first must be greater than 1, the second less than 1, the third at least 1"
            )
        self._scale = float(init_scale)
        self._growth_factor = float(growth_factor)
        self._backoff_factor = float(backoff_factor)
        self._growth_interval = growth_interval
        self._growth_tracker = 0
        self._enabled = enabled
        self._stages: dict[int, _Stage] = {}  # by id of the optimizer
        self._overflows: dict[int, bool] = {}
        self.skipped_steps = 0

    @overload
    def scale(self, outputs: _T) -> _T: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]: ...
    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> Any:
        """The loss or losses, multiplied by the scale."""
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale if self._enabled else outputs
        return [self.scale(output) for output in outputs]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, so that they can be clipped or looked at before `step`.

        Raises:
            IterationError: it has been done since the last `update`, or the gradients have been applied already.
        """
        if not self._enabled:
            return
        ours = _ours(optimizer)
        if id(ours) in self._stages:
            raise IterationError(
                f"unscale_ after the gradients have been {self._stages[id(ours)].value} since the last update(); call "
                "it once per step, before step()"
            )
        self._overflows[id(ours)] = ours.unscale_gradients(1.0 / self._scale)
        self._stages[id(ours)] = _Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer, unless a gradient is infinite or NaN: then nothing changes.

        Raises:
            IterationError: it has been called since the last `update`.
        """
        if not self._enabled:
            optimizer.step()
            return
        if self._stages.get(id(optimizer)) is _Stage.STEPPED:
            raise IterationError("GradScaler.step twice without update() in between")
        if id(optimizer) not in self._stages:
            self.unscale_(optimizer)
        self._stages[id(optimizer)] = _Stage.STEPPED
        if self._overflows[id(optimizer)]:
            self.skipped_steps += 1
        else:
            optimizer.step()

    def update(self, new_scale: float | None = None) -> None:
        """Adapt the scale to the steps since the last call, or set it.

        Raises:
            ConfigError: `new_scale` is not a power of two.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            _check_power("new_scale", new_scale)
            self._scale = float(new_scale)
        elif any(self._overflows.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        elif self._overflows:
            self._grow()
        self._stages.clear()
        self._overflows.clear()

    def _grow(self) -> None:
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            self._growth_tracker = 0
            grown = self._scale * self._growth_factor
            if grown <= torch.finfo(torch.float32).max:
                self._scale = grown

    def get_scale(self) -> float:
        """What losses are multiplied by now; 1 when not enabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Whether it scales at all."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """As that of `torch.amp.GradScaler`, which can load it."""
        return {name: getattr(self, "_" + name.removeprefix("_")) for name in _SETTINGS} if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of `torch.amp.GradScaler` gave.

        Raises:
            ConfigError: something is missing, or not a power of two.
        """
        if not self._enabled:
            return
        missing = [name for name in _SETTINGS if name not in state_dict]
        if missing:
            raise ConfigError(f"this is not the state of a GradScaler: {missing[0]!r} is missing")
        for name in _SETTINGS[:3]:
            _check_power(name, state_dict[name])
        for name in _SETTINGS:
            setattr(self, "_" + name.removeprefix("_"), state_dict[name])


def _check_power(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5):
        raise ConfigError(f"{name} is {value}; it must be a power of two, so that scaling and unscaling lose nothing")


def _ours(optimizer: torch.optim.Optimizer) -> OffloadedOptimizer:
    if not isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError(
            f"infinity.GradScaler was given a {type(optimizer).__name__}; it scales the gradients of optimizers of "
            "infinity. For others use torch.amp.GradScaler"
        )
    return optimizer
