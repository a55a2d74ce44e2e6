"""Tensor parallelism: parameters that are DTensors, of which this rank's local shards are offloaded.

The ranks that share an engine hold the same local shards (data parallelism); the ranks of a DTensor's mesh hold other
ones and have engines of their own. So an offloaded parameter is the local shard, a plain tensor, and whatever stores,
moves or updates it knows of nothing else.

[Note: a DTensor while its module runs]
`parallelize_module` makes modules compute with DTensors. Just before such a module runs, the gathered local shard is
given the form of a DTensor again, a view without a copy whose gradient autograd brings back to the local shard; behind
it the module holds the offloaded parameter again.

[Note: norms over a mesh]
A parameter's gradient norm is over all of it: squares of sharded parameters are added over the mesh, in fp64, those of
replicated ones count once. Every rank of the mesh asks for the same norms in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.config import Config, Precision
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.meshes import is_dtensor, local_of, reduced
from infinity.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, slots=True)
class Spread:
    """How a parameter is spread over a mesh."""

    name: str
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's part as a DTensor; shares its memory, and its gradient goes back to it."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    @property
    def sharded_dimensions(self) -> list[int]:
        """Dimensions of the mesh over which ranks hold different elements."""
        return [number for number, placement in enumerate(self.placements) if not placement.is_replicate()]


class _AsWhole:
    """Hooks of one module: its own parameters are DTensors while it runs."""

    def __init__(self, module: nn.Module, spreads: dict[str, Spread]) -> None:
        self._module = module
        self._spreads = spreads
        self._held: list[dict[str, nn.Parameter | None]] = []  # a module may run inside itself

    def install(self) -> list[RemovableHandle]:
        """Register the hooks; the handles remove them."""
        return [
            self._module.register_forward_pre_hook(self._show),
            self._module.register_forward_hook(self._take_back, always_call=True),
        ]

    def _show(self, *_: object) -> None:
        there = self._module._parameters
        self._held.append({name: there[name] for name in self._spreads})
        for name, spread in self._spreads.items():
            local = there[name]
            if local is not None:
                there[name] = spread.whole(local)  # type: ignore[assignment]

    def _take_back(self, *_: object) -> None:
        if self._held:
            self._module._parameters.update(self._held.pop())


class TensorParallel:
    """The DTensor parameters of a model. `localise` puts their local shards in their places, `restore` undoes it."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._spreads: dict[str, Spread] = {}
        self._handles: list[RemovableHandle] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and is_dtensor(parameter):
                    name = names[id(parameter)]
                    self._owners.append((module, attribute, parameter))
                    self._spreads[name] = _spread_of(name, parameter)
        self._names = names

    def __bool__(self) -> bool:
        return bool(self._spreads)

    def check(self, config: Config, ranks: Ranks | None) -> None:
        """Refuse what cannot work with these parameters.

        Raises:
            ConfigError: ranks would share an engine although they hold different parts of a parameter, or would not
                see each other's overflows.
        """
        if self and config.precision is Precision.FP16:
            raise ConfigError(
                "precision='fp16' with tensor-parallel parameters: an overflow would be seen on one rank of their mesh "
                "only; use 'bf16' or 'fp32'"
            )
        if ranks is None:
            return
        for spread in self._spreads.values():
            others = {int(rank) for rank in spread.mesh.mesh.flatten().tolist()} - {ranks.global_rank}
            shared = sorted(others.intersection(ranks.members))
            if shared:
                raise ConfigError(
                    f"parameter {spread.name!r} is spread over rank {ranks.global_rank} and ranks {shared}, which "
                    "cannot share an engine too. Give infinity.offload the data-parallel dimension of the device mesh, "
                    'for example mesh=mesh["dp"]'
                )

    def localise(self) -> None:
        """Put the local shards in the places of the DTensors."""
        locals_of: dict[int, nn.Parameter] = {}
        by_module: dict[int, tuple[nn.Module, dict[str, Spread]]] = {}
        for module, attribute, parameter in self._owners:
            local = locals_of.get(id(parameter))
            if local is None:
                values = local_of(parameter.detach())
                local = locals_of[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[attribute] = local
            spread = self._spreads[self._names[id(parameter)]]
            by_module.setdefault(id(module), (module, {}))[1][attribute] = spread
        for module, spreads in by_module.values():
            self._handles += _AsWhole(module, spreads).install()

    def restore(self) -> None:
        """The model is as it was before `localise`."""
        self.remove_hooks()
        for module, attribute, parameter in self._owners:
            module._parameters[attribute] = parameter

    def remove_hooks(self) -> None:
        """Modules compute with what they hold from now on. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget_originals(self) -> None:
        """The model is offloaded; the memory of the DTensors is not needed any more."""
        self._owners.clear()

    # Gradients -------------------------------------------------------------------------------------------------

    def spread_of(self, name: str) -> Spread | None:
        """How the parameter of this name is spread; None for one that every rank of the mesh has whole."""
        return self._spreads.get(name)

    def norms(self, names: Iterable[str], norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Norms of whole parameters from those of their local shards; a call of all ranks of the meshes."""
        found = list(norms)
        by_group: dict[Any, tuple[DeviceMesh, int, list[int]]] = {}
        for number, name in enumerate(names):
            spread = self._spreads.get(name)
            for dimension in spread.sharded_dimensions if spread is not None else ():
                place = spread.mesh.get_group(dimension)  # type: ignore[union-attr]
                by_group.setdefault(place, (spread.mesh, dimension, []))[2].append(number)  # type: ignore[union-attr]
        for mesh, dimension, numbers in by_group.values():
            squares = torch.stack([found[number].cpu().double().square() for number in numbers])
            squares = reduced(squares, mesh, dimension, dist.ReduceOp.SUM)
            for number, square in zip(numbers, squares.unbind(), strict=True):
                found[number] = square.sqrt().to(norms[number])
        return found


def _spread_of(name: str, parameter: Any) -> Spread:
    if any(placement.is_partial() for placement in parameter.placements):
        raise UnsupportedModelError(
            f"parameter {name!r} is a DTensor of partial sums; redistribute it to Shard or Replicate first"
        )
    if parameter.is_meta:
        raise UnsupportedModelError(
            f"parameter {name!r} is a DTensor on the meta device; initialise the model before it is offloaded"
        )
    if parameter.grad is not None:
        raise UnsupportedModelError(
            f"parameter {name!r} has a gradient already, which would be lost. Use it, or call model.zero_grad(), "
            "before infinity.offload"
        )
    return Spread(name, parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())
