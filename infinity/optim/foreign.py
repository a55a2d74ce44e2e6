"""Optimizers of torch or others that hold offloaded parameters: they are told apart when they step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from infinity.errors import ConfigError
from infinity.released import Access, ref_of

_OURS = ("Adam", "AdamW", "Lion", "SGD")
_WHOLE_MATRICES = ("Adafactor", "Muon", "LBFGS", "Shampoo", "SOAP")


def refuse_foreign_optimizers(access: Access, is_attached: Callable[[torch.optim.Optimizer], bool]) -> RemovableHandle:
    """From now on the step of any other optimizer over these parameters is refused; the handle ends that.

    Without it such an optimizer would find no gradient in an offloaded parameter and do nothing, or fail in the middle
    of its arithmetic.

    Args:
        access: whose parameters.
        is_attached: whether an optimizer is the one that the engine works with.
    """

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_attached(optimizer):
            return
        for settings in optimizer.param_groups:
            for parameter in settings["params"]:
                ref = ref_of(parameter)
                if ref is not None and ref.access is access:
                    raise ConfigError(
                        f"{type(optimizer).__name__} cannot update parameter {ref.name!r}, which is offloaded: its "
                        f"values and state lie in the tiers. {_way_out(type(optimizer).__name__)}"
                    )

    return register_optimizer_step_pre_hook(check)


def _way_out(kind: str) -> str:
    if kind in _OURS:
        return f"Build infinity.{kind}(model.parameters()) after infinity.offload and step that"
    why = "Its update needs whole matrices, which are never there at once. " if kind in _WHOLE_MATRICES else ""
    return f"{why}Build infinity.AdamW(model.parameters()), or Adam, Lion or SGD, after infinity.offload and step that"
