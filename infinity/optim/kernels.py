"""Optimizer kernels by precision."""

from infinity.config import Precision
from infinity.optim.hyper import AdamWHyper, Kernel, Piece, StateField
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from infinity.optim.kernels_fp32 import FusedAdamW

__all__ = ["AdamWHyper", "Kernel", "KernelThreads", "Piece", "StateField", "kernel_for"]


def kernel_for(precision: Precision, threads: KernelThreads | None = None) -> Kernel:
    """The AdamW kernel of a precision. `threads` stay the caller's; fp32 has torch's own and does without."""
    match precision:
        case Precision.FP32:
            return FusedAdamW()
        case Precision.BF16:
            return SplitMasterAdamW(threads)
