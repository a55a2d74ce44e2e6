"""The part of a parameter that this rank updates: all of a plain tensor, the local shard of a DTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from infinity.config import Precision
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.meshes import is_dtensor, local_of, reduced

_PRECISIONS = {
    torch.float32: Precision.FP32,
    torch.bfloat16: Precision.BF16,
    torch.float16: Precision.FP16,
}


@dataclass(frozen=True, slots=True, eq=False)
class LocalParameter:
    """A parameter of the user's, who holds its values and its gradient.

    Attributes:
        trains: whether it had `requires_grad` when the optimizer was built; only then is there room for its state.
    """

    name: str
    parameter: torch.Tensor
    trains: bool

    @property
    def precision(self) -> Precision:
        """In which its values are kept.

        Raises:
            UnsupportedModelError: no kernel updates this dtype.
        """
        found = _PRECISIONS.get(self.parameter.dtype)
        if found is None:
            raise UnsupportedModelError(
                f"parameter {self.name} is {self.parameter.dtype}; the optimizers of infinity update "
                f"{', '.join(map(str, _PRECISIONS))}"
            )
        return found

    def values(self) -> torch.Tensor:
        """The tensor to change, which shares the parameter's memory."""
        return local_of(self.parameter.detach())

    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the gradient; None when there is none.

        Raises:
            UnsupportedModelError: it is sparse.
            ConfigError: the parameter was frozen when the optimizer was built.
        """
        grad = self.parameter.grad
        if grad is None:
            return None
        if grad.is_sparse:
            raise UnsupportedModelError(f"the gradient of parameter {self.name} is sparse; make it dense")
        if not self.trains:
            raise ConfigError(
                f"parameter {self.name} has a gradient, but was frozen when the optimizer was built, so there is no "
                "room for its state. Build the optimizer after requires_grad_(True)"
            )
        if is_dtensor(grad) and is_dtensor(self.parameter) and grad.placements != self.parameter.placements:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self.parameter.placements)  # type: ignore[attr-defined]
        return local_of(grad.detach())

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """State of this rank's part as state of the parameter: a DTensor where the parameter is one."""
        if not is_dtensor(self.parameter):
            return local
        from torch.distributed.tensor import DTensor

        like: Any = self.parameter
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def unwrap(self, state: torch.Tensor) -> torch.Tensor:
        """The other way round.

        Raises:
            ConfigError: it is sharded differently from the parameter.
        """
        if not is_dtensor(self.parameter):
            if is_dtensor(state):
                raise ConfigError(f"the state of parameter {self.name} is a DTensor, the parameter is not")
            return state
        like: Any = self.parameter
        there: Any = state
        if not is_dtensor(state):
            raise ConfigError(
                f"the state of parameter {self.name} is a plain tensor of shape {tuple(state.shape)}, but the "
                "parameter is a DTensor; load it with torch.distributed.checkpoint.state_dict, which shards it"
            )
        if (there.device_mesh, there.placements, there.shape) != (like.device_mesh, like.placements, like.shape):
            raise ConfigError(
                f"the state of parameter {self.name} is {tuple(there.shape)} with {there.placements} on "
                f"{there.device_mesh}, the parameter {tuple(like.shape)} with {like.placements} on {like.device_mesh}; "
                "load it with torch.distributed.checkpoint.state_dict, which shards it anew"
            )
        return local_of(state)


def local_parameters(param_groups: Sequence[Mapping[str, Any]]) -> list[LocalParameter]:
    """All parameters of an optimizer, in the order of its groups.

    Raises:
        UnsupportedModelError: one that has no values here, or of which every rank holds a part of a sum.
    """
    found = []
    for number, settings in enumerate(param_groups):
        names = settings.get("param_names") or ()
        for place, parameter in enumerate(settings["params"]):
            name = names[place] if place < len(names) else f"{place} of group {number}"
            _refuse(name, parameter)
            found.append(LocalParameter(name, parameter, parameter.requires_grad))
    return found


def _refuse(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_meta:
        raise UnsupportedModelError(
            f"parameter {name} is on the meta device; initialise the model (to_empty, reset_parameters) before the "
            "optimizer is built"
        )
    if is_dtensor(parameter) and any(placement.is_partial() for placement in parameter.placements):  # type: ignore[attr-defined]
        raise UnsupportedModelError(
            f"parameter {name} is a DTensor of partial sums; redistribute it to Shard or Replicate"
        )
    if not local_of(parameter.detach()).is_contiguous():
        raise UnsupportedModelError(
            f"parameter {name} is not contiguous in memory (a transposed view, or another memory format); make it so: "
            "parameter.data = parameter.data.contiguous()"
        )


def any_rank_has(flag: bool, parameters: Sequence[LocalParameter]) -> bool:
    """Whether `flag` is set on any rank of the meshes that the parameters are spread over; a call of all of them."""
    meshes = {id(m): m for p in parameters if (m := getattr(p.parameter, "device_mesh", None)) is not None}
    found = torch.tensor(float(flag))
    for mesh in meshes.values():
        for dimension in range(mesh.ndim):
            found = reduced(found, mesh, dimension, dist.ReduceOp.MAX)
    return bool(found)
