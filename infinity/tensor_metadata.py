"""Which functions of a tensor need nothing but what is known without its data, as `__torch_function__` is told them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_TENSOR = torch.Tensor
_PROPERTIES = """
    shape dtype device requires_grad ndim is_leaf is_meta layout nbytes itemsize grad_fn _backward_hooks is_cuda is_cpu
    is_sparse is_quantized is_mkldnn is_nested is_xla is_mps is_xpu retains_grad names _version output_nr _base
"""
_METHODS = """
    numel size dim is_floating_point is_complex __hash__ element_size stride is_contiguous type __len__ nelement
    ndimension is_signed is_inference get_device _is_view is_pinned is_shared
"""


def _functions() -> frozenset[Any]:
    getters = {getattr(_TENSOR, n).__get__ for n in _PROPERTIES.split() if hasattr(_TENSOR, n)}
    getters.add(torch._has_compatible_shallow_copy_type)  # `model.to` asks whether it may set `.data`
    return frozenset(getters | {getattr(_TENSOR, n) for n in _METHODS.split() if hasattr(_TENSOR, n)})


_FUNCTIONS = _functions()


def asks_for_metadata(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a call is answered without data. `Tensor.type` converts where it is given a type, and tells it else."""
    return func in _FUNCTIONS and not (func is _TENSOR.type and (len(args) > 1 or bool(kwargs)))
