"""The one place that touches torch interfaces without a stability promise, for torch >= 2.6."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """AdamW without amsgrad, in place, as `torch.optim.AdamW(fused=True)` calls it; `steps` are 0-dim fp32, from 1."""
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        amsgrad=False,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        grad_scale=None,
        found_inf=None,
    )


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Adam without amsgrad, in place, as `torch.optim.Adam(fused=True)` calls it; `steps` are 0-dim fp32, from 1."""
    torch._fused_adam_(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        amsgrad=False,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        grad_scale=None,
        found_inf=None,
    )


@contextmanager
def preserve_version_counter(*tensors: Tensor) -> Iterator[None]:
    """Writes to `tensors` inside the block do not count as modifications for autograd."""
    with ExitStack() as stack:
        for tensor in tensors:  # one by one: not every version takes several
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor))
        yield


def next_sequence_nr() -> int:
    """The number that autograd will give the next node of this thread; those made before have smaller ones."""
    return int(torch._C._autograd._get_sequence_nr())


def node_sequence_nr(node: Node) -> int:
    """The number that autograd has given a node."""
    return int(node._sequence_nr())


def increment_version(tensor: Tensor) -> None:
    """Count a change of `tensor` that autograd did not see: graphs that saved it are refused from now on."""
    with torch.inference_mode(False):
        torch.autograd.graph.increment_version(tensor)


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX or the Arm extension)."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is not None:
        known = capabilities()
        return any(bool(known.get(name, False)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(probe()) for probe in probes if probe is not None)
