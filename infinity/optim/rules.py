"""The arithmetic of each optimizer on fp32 values: what it keeps per parameter, and how one update goes.

[Note: same bits however cut] A rule works element by element, on views that start at multiples of 64 elements (see
[Note: cuts at 64] in hyper.py), so that its bits do not depend on how parameters are cut into chunks. AdamW and Adam
are torch's fused kernels, as `torch.optim.AdamW(fused=True)` and `torch.optim.Adam(fused=True)` call them. SGD is the
loop of `torch.optim.SGD(foreach=False, fused=False)`, which is what it does on the CPU by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from infinity.optim.hyper import AdamWHyper, Hyper, LionHyper, SgdHyper
from infinity.torch_compat import fused_adam_, fused_adamw_

_H = TypeVar("_H", bound=Hyper)


@dataclass(frozen=True, slots=True)
class Operands:
    """Equally many 1-D fp32 views of each kind, one per piece: `moments[k][i]` is moment k of piece i.

    `steps[i]` is the 1-based number of the update of piece i's parameter.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    moments: Sequence[Sequence[Tensor]]
    steps: Sequence[int]


class Rule(Protocol):
    """The update of one optimizer. Without state of its own."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What it keeps per parameter, all fp32 and zero at first, named as in the state of torch's optimizer."""

    def update(self, operands: Operands, hyper: Hyper) -> None:
        """Update parameters and moments in place; the gradients may be changed."""


class AdamWRule:
    """Decoupled weight decay (Loshchilov and Hutter, 2019), as torch's fused kernel computes it."""

    moments = ("exp_avg", "exp_avg_sq")

    def update(self, operands: Operands, hyper: Hyper) -> None:
        _adam(fused_adamw_, operands, _as(AdamWHyper, hyper))


class AdamRule:
    """Weight decay as a part of the gradient (Kingma and Ba, 2015), as torch's fused kernel computes it."""

    moments = ("exp_avg", "exp_avg_sq")

    def update(self, operands: Operands, hyper: Hyper) -> None:
        _adam(fused_adam_, operands, _as(AdamWHyper, hyper))


class SgdRule:
    """Gradient descent without momentum: nothing is kept."""

    moments: tuple[str, ...] = ()

    def update(self, operands: Operands, hyper: Hyper) -> None:
        given = _as(SgdHyper, hyper)
        if given.momentum != 0:
            raise ValueError("this rule keeps no momentum")
        for param, grad in zip(operands.params, operands.grads, strict=True):
            param.add_(_decayed(param, grad, given), alpha=-given.lr)


class MomentumRule:
    """Gradient descent with momentum (Sutskever et al., 2013, in torch's form); the first buffer is the gradient."""

    moments = ("momentum_buffer",)

    def update(self, operands: Operands, hyper: Hyper) -> None:
        given = _as(SgdHyper, hyper)
        (buffers,) = operands.moments
        for param, given_grad, buffer, step in zip(
            operands.params, operands.grads, buffers, operands.steps, strict=True
        ):
            grad = _decayed(param, given_grad, given)
            if given.momentum != 0:
                if step == 1:
                    buffer.copy_(grad)
                else:
                    buffer.mul_(given.momentum).add_(grad, alpha=1 - given.dampening)
                grad = grad.add(buffer, alpha=given.momentum) if given.nesterov else buffer
            param.add_(grad, alpha=-given.lr)


class LionRule:
    """The sign of an interpolated momentum (Chen et al., 2023, algorithm 2), with decoupled weight decay."""

    moments = ("exp_avg",)

    def update(self, operands: Operands, hyper: Hyper) -> None:
        given = _as(LionHyper, hyper)
        (averages,) = operands.moments
        for param, grad, average in zip(operands.params, operands.grads, averages, strict=True):
            if given.maximize:
                grad.neg_()
            param.mul_(1 - given.lr * given.weight_decay)
            param.add_(average.mul(given.beta1).add_(grad, alpha=1 - given.beta1).sign_(), alpha=-given.lr)
            average.mul_(given.beta2).add_(grad, alpha=1 - given.beta2)


def _as(kind: type[_H], hyper: Hyper) -> _H:
    if not isinstance(hyper, kind):
        raise TypeError(f"{kind.__name__} is needed, got {type(hyper).__name__}")
    return hyper


def _decayed(param: Tensor, grad: Tensor, hyper: SgdHyper) -> Tensor:
    signed = -grad if hyper.maximize else grad
    return signed.add(param, alpha=hyper.weight_decay) if hyper.weight_decay != 0 else signed


def _adam(fused: Callable[..., None], operands: Operands, hyper: AdamWHyper) -> None:
    steps = {step: torch.tensor(float(step), dtype=torch.float32) for step in set(operands.steps)}
    exp_avgs, exp_avg_sqs = operands.moments
    fused(
        operands.params,
        operands.grads,
        exp_avgs,
        exp_avg_sqs,
        [steps[step] for step in operands.steps],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        maximize=hyper.maximize,
    )
