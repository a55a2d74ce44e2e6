"""Optimizer kernels by precision and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infinity.config import OptimizerKind, Precision, StateFormat, refuse_state_format
from infinity.optim.forms import SeparateMaster, SplitMaster, WholeMaster
from infinity.optim.hyper import AdamWHyper, Kernel, Piece, StateField
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from infinity.optim.rules import AdamRule, AdamWRule, LionRule, MomentumRule, Rule, SgdRule

__all__ = ["AdamWHyper", "Kernel", "KernelThreads", "Piece", "StateField", "kernel_for"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One optimizer.

    Attributes:
        called: in messages.
        rule: makes its rule.
        counts_steps: whether torch's optimizer keeps a step count per parameter.
        bf16: a kernel of its own for bf16, where there is one.
    """

    called: str
    rule: Callable[[], Rule]
    counts_steps: bool = False
    bf16: Callable[[KernelThreads | None, StateFormat], Kernel] | None = None


ALGORITHMS: Mapping[OptimizerKind, Algorithm] = {
    OptimizerKind.ADAMW: Algorithm("an AdamW", AdamWRule, counts_steps=True, bf16=SplitMasterAdamW),
    OptimizerKind.ADAM: Algorithm("an Adam", AdamRule, counts_steps=True),
    OptimizerKind.SGD: Algorithm("an SGD without momentum", SgdRule),
    OptimizerKind.SGD_MOMENTUM: Algorithm("an SGD with momentum", MomentumRule),
    OptimizerKind.LION: Algorithm("a Lion", LionRule),
}


def kernel_for(
    precision: Precision,
    threads: KernelThreads | None = None,
    optimizer: OptimizerKind = OptimizerKind.ADAMW,
    state_format: StateFormat = StateFormat.FP32,
) -> Kernel:
    """The kernel of a precision and an optimizer. `threads` stay the caller's; torch's own operations do without.

    Raises:
        ConfigError: no kernel keeps the moments of this precision and optimizer in `state_format`.
    """
    refuse_state_format(state_format, precision, optimizer)
    algorithm = ALGORITHMS[optimizer]
    match precision:
        case Precision.FP32:
            return WholeMaster(algorithm.rule())
        case Precision.BF16:
            if algorithm.bf16 is not None:
                return algorithm.bf16(threads, state_format)
            return SplitMaster(algorithm.rule())
        case Precision.FP16:
            return SeparateMaster(algorithm.rule())
