"""Layer-wise micro-batches: a unit is gathered once and runs all slices of the batch before it is released.

[Note: the order of slices]
Forward runs the slices from the last to the first. Autograd executes the newest nodes first, so backward goes through
them from the first to the last and adds their gradients up in the order in which ordinary accumulation would meet them:
where parameters compute in fp32 and every unit is sliced, the gradients have the same bits. In other precisions they
are added in the compute dtype, where ordinary accumulation adds in fp32. Random numbers (dropout) are drawn unit by
unit, not micro-batch by micro-batch.

The unit's hooks do it, on the module's own `forward`: the pre-hook runs all slices but the first, the module itself
runs the first, and the hook behind it joins the outputs. Only units that have no other unit inside are sliced; what is
around them runs on the whole batch, and gathers nothing more often for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from infinity.errors import UnsupportedModelError
from infinity.groups import Unit, enclosing
from infinity.torch_compat import in_backward

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class MicroBatches:
    """What the slices of all units have in common: into how many, and how large the batch is.

    The batch is the first dimension of the first tensor that the model is called with in grad mode.

    Args:
        count: slices of a batch; one that is smaller has one slice for every sample.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._batch: int | None = None  # of the forward under way
        self._seen: set[tuple[int, int]] = set()  # unit and batch, for recomputations after the forward

    def install(self, model: nn.Module) -> list[RemovableHandle]:
        """Watch the forwards of the whole model."""
        return [
            model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        self._batch = tensors[0].shape[0] if tensors and torch.is_grad_enabled() else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._batch = None

    def sizes_for(self, unit: Unit, leaves: Sequence[Any]) -> list[int]:
        """The sizes of the slices of what a unit is called with; empty when there is nothing to slice."""
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
        if first is None or first.shape[0] < 2 or self._count < 2:
            return []
        batch = first.shape[0]
        is_recomputing = self._batch is None and in_backward()
        if batch != self._batch and not (is_recomputing and (unit.index, batch) in self._seen):
            return []
        self._seen.add((unit.index, batch))
        count = min(self._count, batch)
        return [batch // count + (number < batch % count) for number in range(count)]


def sliced_units(units: Sequence[Unit]) -> set[int]:
    """Indices of the units that can be sliced: those with no other streamed unit inside."""
    streamed = [unit for unit in units if not unit.resident]
    pairs = zip(streamed, enclosing(streamed), strict=True)
    around = {other.index for unit, outer in pairs for other in outer if other is not unit}
    return {unit.index for unit in streamed} - around


class UnitSlices:
    """The slices of one unit, one forward at a time. Its two methods are called by the hooks of the unit."""

    def __init__(self, unit: Unit, micro_batches: MicroBatches) -> None:
        self._unit = unit
        self._micro_batches = micro_batches
        self._sizes: list[int] = []
        self._outputs: list[Any] = []  # of the slices that have run, the last slice first
        self._n_hooks = 0

    def hooked(self) -> None:
        """All hooks that are the engine's own are on the module."""
        self._n_hooks = _count_hooks(self._unit.module)

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run all slices but the first; returns what to call the module with for that one, None when not sliced.

        Raises:
            UnsupportedModelError: the slices together would not be what the whole batch is.
        """
        self._outputs.clear()
        leaves, spec = tree_flatten((args, kwargs))
        self._sizes = self._micro_batches.sizes_for(self._unit, leaves)
        if len(self._sizes) < 2:
            return None
        self._refuse(leaves)
        slices = _split(leaves, spec, self._sizes)
        for slice_args, slice_kwargs in reversed(slices[1:]):
            self._outputs.append(self._unit.module.forward(*slice_args, **slice_kwargs))
        return slices[0]

    def end(self, output: Any) -> Any:
        """The output for the whole batch, given that of the first slice; None leaves it as it is.

        Raises:
            UnsupportedModelError: an output has no batch, so it depends on how the batch is sliced.
        """
        behind, sizes = list(reversed(self._outputs)), self._sizes
        self._outputs.clear()
        if not behind or output is None:
            return None
        flat = [tree_flatten(part) for part in (output, *behind)]
        if any(spec != flat[0][1] for _, spec in flat):
            self._raise("returns something else for every slice of the batch")
        joined = [self._join(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
        return tree_unflatten(joined, flat[0][1])

    def _join(self, leaves: tuple[Any, ...], sizes: Sequence[int]) -> Any:
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if any(not leaf.dim() or leaf.shape[0] != size for leaf, size in zip(leaves, sizes, strict=True)):
                shapes = [tuple(leaf.shape) for leaf in leaves]
                self._raise(f"returns tensors of shapes {shapes} for slices of {list(sizes)} samples")
            return torch.cat(leaves)
        first = leaves[0]
        if not all(isinstance(leaf, _PLAIN) and type(leaf) is type(first) and leaf == first for leaf in leaves):
            self._raise(f"returns a {type(first).__name__} that is another one for every slice of the batch")
        return first

    def _refuse(self, leaves: Sequence[Any]) -> None:
        module = self._unit.module
        for name, part in module.named_modules():
            if isinstance(part, _NormBase) and part.training and (part.track_running_stats or _is_batch_norm(part)):
                self._raise(f"has {type(part).__name__} {name!r} in training, which looks at the whole batch")
        if _count_hooks(module) > self._n_hooks:
            self._raise("has forward hooks of its own, which would see one slice of the batch only")
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                kind = type(leaf).__name__
                self._raise(f"is called with a {kind}, which every slice may change (a cache? then use_cache=False)")

    def _raise(self, why: str) -> None:
        raise UnsupportedModelError(
            f"module {self._unit.name!r} {why}, so it cannot run the batch in slices: use micro_batches=1 and "
            "accumulate over several backwards instead"
        )


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _count_hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def _split(leaves: Sequence[Any], spec: TreeSpec, sizes: list[int]) -> list[tuple[Any, Any]]:
    """Arguments for every slice. A tensor passed several times stays one: modules compare arguments by identity."""
    batch = sum(sizes)
    pieces = {
        id(leaf): torch.split(leaf, sizes)
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
    }
    found = []
    for number in range(len(sizes)):
        mine = [pieces[id(leaf)][number] if id(leaf) in pieces else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(mine, spec)
        found.append((args, kwargs))
    return found
