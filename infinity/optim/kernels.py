"""Optimizer kernels by precision and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infinity.config import OptimizerKind, Precision, StateFormat, refuse_state_format
from infinity.optim.forms import SeparateMaster, SplitMaster, WholeMaster
from infinity.optim.hyper import AdamWHyper, Kernel, Piece, StateField
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels_bf16 import SeparateMasterAdamW, SplitMasterAdamW
from infinity.optim.rules import AdamRule, AdamWRule, LionRule, MomentumRule, Rule, SgdRule

__all__ = ["AdamWHyper", "Kernel", "KernelThreads", "Piece", "StateField", "kernel_for"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One optimizer.

    Attributes:
        called: in messages.
        rule: makes its rule.
        counts_steps: whether torch's optimizer keeps a step count per parameter.
        one_pass: kernels of its own, by precision.
    """

    called: str
    rule: Callable[[], Rule]
    counts_steps: bool = False
    one_pass: Mapping[Precision, Callable[[KernelThreads | None, StateFormat], Kernel]] = field(default_factory=dict)


_ADAMW = {Precision.BF16: SplitMasterAdamW, Precision.FP16: SeparateMasterAdamW}
ALGORITHMS: Mapping[OptimizerKind, Algorithm] = {
    OptimizerKind.ADAMW: Algorithm("an AdamW", AdamWRule, counts_steps=True, one_pass=_ADAMW),
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
    one_pass = algorithm.one_pass.get(precision)
    # In fp16 with fp32 moments the bits are those of torch's own optimizer on an fp32 master.
    if one_pass is not None and (precision is Precision.BF16 or state_format is not StateFormat.FP32):
        return one_pass(threads, state_format)
    match precision:
        case Precision.FP32:
            return WholeMaster(algorithm.rule())
        case Precision.BF16:
            return SplitMaster(algorithm.rule())
        case Precision.FP16:
            return SeparateMaster(algorithm.rule())
