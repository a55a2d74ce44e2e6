"""What stands for a gradient that is not in host memory: it waits in the swap file, or other ranks have parts of it.

[Note: gradients]
A gradient leaves the device when its unit's backward is over and waits in host memory. `parameter.grad` shows it there
(so norms can be read, and `model.zero_grad()` and torch's own clipping do what they say); setting it replaces it, and
`None` takes it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from infinity.errors import NotGatheredError
from infinity.released import StandIn, first_of

if TYPE_CHECKING:
    from infinity.groups import FlatGroup

_TENSOR = torch.Tensor


class GradientKeeper(Protocol):
    """What a spilled gradient asks of whoever keeps it; enough for torch's own `clip_grad_norm_`."""

    def norm_of_spilled(self, group: FlatGroup, slot: int) -> torch.Tensor:
        """Its 2-norm."""

    def scale_spilled(self, group: FlatGroup, slot: int, factor: torch.Tensor) -> None:
        """Multiply it by `factor` when the step uses it."""


class SpilledGradient(StandIn):
    """Stands for a gradient that waits in the swap file: metadata, 2-norm and scaling; everything else refuses."""

    parameter_name: str
    kept: tuple[GradientKeeper, FlatGroup, int] | None
    why: ClassVar[str] = (
        "waits in the swap file because the gradients do not fit in the host budget. To clip, use "
        "infinity.clip_grad_norm_ or AdamW(max_grad_norm=...); to scale losses, use infinity.GradScaler; to read "
        "gradients, raise host.budget"
    )

    @staticmethod
    def __new__(cls, parameter_name: str, shape: Sequence[int], dtype: torch.dtype) -> SpilledGradient:
        self: SpilledGradient = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        self.parameter_name = parameter_name
        self.kept = None
        return self

    @classmethod
    def touched(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What torch's own clipping asks of a gradient; everything else is refused."""
        gradient = args[0] if args else None
        if isinstance(gradient, SpilledGradient) and gradient.kept is not None and not kwargs:
            keeper, group, slot = gradient.kept
            if func is torch.linalg.vector_norm and args[1:] in ((), (2,)):
                return keeper.norm_of_spilled(group, slot)
            if func is _TENSOR.mul_ and _is_scalar(args[1]):
                keeper.scale_spilled(group, slot, torch.as_tensor(args[1]))
                return gradient
        raise NotGatheredError(
            f"{getattr(func, '__name__', func)} on the gradient of {first_of(cls, args, kwargs).parameter_name!r}, "
            f"which {cls.why}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.parameter_name}, shape={tuple(self.shape)})"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


class ShardedGradient(SpilledGradient):
    """Stands for a gradient of which every rank has a part."""

    why: ClassVar[str] = (
        "is shared out among the ranks. To clip, use infinity.clip_grad_norm_ or AdamW(max_grad_norm=...); to read "
        "gradients, use stage=1"
    )
