"""AdamW on fp32 parameters: the operation `torch.optim.AdamW(fused=True)` runs, on views of a chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.optim.hyper import AdamWHyper, Piece, StateField, check_update
from infinity.torch_compat import fused_adamw_


class FusedAdamW:
    """`Kernel` for fp32; bit for bit `torch.optim.AdamW(fused=True)` on the CPU, however the chunks are cut.

    One call of the operation per hyperparameters, with one view per piece: see [Note: cuts at 64] in hyper.py.
    torch releases the GIL inside and uses its own intra-operation threads.
    """

    param_dtype = torch.float32
    fields = (StateField("exp_avg", torch.float32), StateField("exp_avg_sq", torch.float32))

    def warm_up(self) -> None:
        """Nothing to compile."""

    @torch.no_grad()
    def update(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], grad_scale: Tensor | None
    ) -> None:
        """Update `param` and `state` (fp32, 1-D) in place; `grad` is multiplied in place by `grad_scale`, if any."""
        check_update(param, grad, state, pieces, param_dtype=self.param_dtype, fields=self.fields)
        for hyper, group in _by_hyper(pieces).items():
            grads = [grad[piece.start : piece.stop] for piece in group]
            if grad_scale is not None:
                for view in grads:
                    view.mul_(grad_scale)
            params, exp_avgs, exp_avg_sqs = (
                [tensor[piece.start : piece.stop] for piece in group] for tensor in (param, *state)
            )
            steps = {step: torch.tensor(float(step), dtype=torch.float32) for step in {piece.step for piece in group}}
            fused_adamw_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                [steps[piece.step] for piece in group],
                lr=hyper.lr,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
                maximize=hyper.maximize,
            )


def _by_hyper(pieces: Sequence[Piece]) -> dict[AdamWHyper, list[Piece]]:
    groups: dict[AdamWHyper, list[Piece]] = {}
    for piece in pieces:
        if piece.stop > piece.start:
            groups.setdefault(piece.hyper, []).append(piece)
    return groups
