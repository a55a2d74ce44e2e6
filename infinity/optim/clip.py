"""Gradient clipping by global norm, in the parts an engine needs that never holds all gradients at once.

Together they are `torch.nn.utils.clip_grad_norm_` (norm type 2, non-finite norms not refused), bit for bit:
`parameter_norm` of each gradient, `total_norm` of those, and every gradient is multiplied by `clip_coefficient`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def parameter_norm(grad: Tensor) -> Tensor:
    """Euclidean norm of one parameter's gradient, 0-dim. A contiguous flat view gives the bits of the shaped tensor.

    The gradient must be whole: norms of parts do not add up to the same bits. The calling thread and the number of
    torch's threads do not matter; the tests pin that.
    """
    norm: Tensor = torch.linalg.vector_norm(grad, 2.0)
    return norm


@torch.no_grad()
def total_norm(per_parameter_norms: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients from their norms, in parameter order, on the first one's device; 0 when there are none."""
    if not per_parameter_norms:
        return torch.tensor(0.0)
    device = per_parameter_norms[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(device) for each in per_parameter_norms]), 2.0)
    return norm


@torch.no_grad()
def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """What every gradient is multiplied by: max_norm / (total_norm + 1e-6), at most 1. NaN stays NaN, as in torch."""
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
