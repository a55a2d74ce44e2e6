"""What the units of any model compute, from a forward on the meta device, which computes nothing and takes no memory.

Operations are counted by torch's own formulas (`torch.utils.flop_counter`). Activations are the tensors that autograd
saves, parameters aside. The meta device has no fused attention and saves the matrix of [sequence, sequence] that fused
kernels never store, so what `scaled_dot_product_attention` saves is counted as those kernels have it.

Importing this is cheap; using it loads torch's compiler, which takes longer than all the rest of a small plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from infinity.models.gpt import Gpt
from infinity.plan.unit_work import LOGSUMEXP_NBYTES, UnitWork
from infinity.units import RESIDENT_NAME, UnitSpec


class _Meter(TorchFunctionMode):
    """Charges operations and saved tensors to the unit that runs."""

    def __init__(self, specs: Sequence[UnitSpec], itemsize: int) -> None:
        super().__init__()
        self._itemsize = itemsize
        self._running = [RESIDENT_NAME]
        self._is_in_attention = False
        self._seen: set[int] = set()
        self._kept: list[torch.Tensor] = []  # ids of storages stay unique while these live
        self._parameters = {id(entry.parameter) for spec in specs for entry in spec.own}
        self.flops: dict[str, float] = {RESIDENT_NAME: 0.0}
        self.saved: dict[str, int] = {RESIDENT_NAME: 0}
        self.boundary: dict[str, int] = {}
        self.order: list[str] = []
        self.counter = FlopCounterMode(display=False)
        self._counted = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self._is_in_attention = True
        try:
            output = func(*args, **kwargs)
        finally:
            self._is_in_attention = False
        if output.requires_grad:
            for tensor in (*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs), output):
                self.pack(tensor)
            rows = output.numel() // max(output.shape[-1], 1)
            self._save(rows * LOGSUMEXP_NBYTES)
        return output

    def _charge(self) -> None:
        total = float(self.counter.get_total_flops())
        name = self._running[-1]
        self.flops[name] = self.flops.get(name, 0.0) + total - self._counted
        self._counted = total

    def enter(self, name: str) -> None:
        """A unit begins."""
        self._charge()
        self._running.append(name)
        self.order.append(name)

    def leave(self, output: Any) -> None:
        """The unit that runs ends."""
        self._charge()
        name = self._running.pop()
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.boundary[name] = self.boundary.get(name, 0) + sum(map(self._nbytes, tensors))

    def finish(self) -> None:
        """The forward has ended."""
        self._charge()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        storage = tensor.untyped_storage()._cdata
        base = tensor._base if tensor._base is not None else tensor
        is_activation = id(tensor) not in self._parameters and id(base) not in self._parameters
        if is_activation and storage not in self._seen and not self._is_in_attention:
            self._seen.add(storage)
            self._kept.append(tensor)
            self._save(self._nbytes(base))
        return tensor

    def _save(self, nbytes: int) -> None:
        name = self._running[-1]
        self.saved[name] = self.saved.get(name, 0) + nbytes

    def _nbytes(self, tensor: torch.Tensor) -> int:
        """On the meta device everything computes in fp32; what a run computes in is known to the planner."""
        return tensor.numel() * (self._itemsize if tensor.dtype.is_floating_point else tensor.itemsize)


def trace(
    module: nn.Module, specs: Sequence[UnitSpec], seq: int, batch: int, itemsize: int
) -> tuple[dict[str, UnitWork], tuple[str, ...]]:
    """The work of every unit, and their names in the order of their forwards.

    Args:
        itemsize: bytes of one number in an activation.
    """
    meter = _Meter(specs, itemsize)
    handles = []
    for spec in specs:
        if not spec.resident:
            handles += [
                spec.module.register_forward_pre_hook(lambda _, __, name=spec.name: meter.enter(name)),
                spec.module.register_forward_hook(lambda _, __, output: meter.leave(output)),
            ]
    inputs = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    try:
        with meter, meter.counter, torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            _forward(module, inputs)
        meter.finish()
    finally:
        for handle in handles:
            handle.remove()
    names = dict.fromkeys((*(spec.name for spec in specs), RESIDENT_NAME))
    work = {
        name: UnitWork(meter.flops.get(name, 0.0), meter.saved.get(name, 0), meter.boundary.get(name, 0))
        for name in names
    }
    return work, tuple(dict.fromkeys(meter.order))


def _forward(module: nn.Module, inputs: torch.Tensor) -> None:
    """One forward with a loss. Models of Hugging Face take labels by name, those of this package by place."""
    if hasattr(module, "config") and hasattr(module, "main_input_name"):
        batch, seq = inputs.shape
        # A mask of four dimensions is taken as it is; making one looks at values, of which there are none here.
        mask = torch.ones(batch, 1, seq, seq, dtype=torch.bool, device="meta")
        module(input_ids=inputs, labels=inputs, attention_mask=mask, use_cache=False)
    elif isinstance(module, Gpt):
        module(inputs, inputs)
    else:
        module(inputs)
