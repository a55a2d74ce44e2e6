"""An fp32 value in two 16-bit halves: the bf16 nearest to it, and a signed rest that completes it.

[Note: split master] With the fp32 value's bits as a 32-bit integer, `hi = (bits + 0x8000) >> 16` and
`bits = (hi << 16) + lo` with `lo` a signed 16-bit integer. `hi` is the nearest bf16, ties away from zero, so it serves
as the stored parameter; both halves are the master, without loss, no bit stored twice. A value half
a unit or more beyond the largest bf16 has `hi` = infinity and is still complete. NaNs become one quiet NaN (0x7FC0, 0):
the rounding carry would turn others into zero or infinity.
"""

import torch
from torch import Tensor

_QUIET_NAN_BITS = 0x7FC00000


@torch.no_grad()
def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(hi bf16, lo int16) of an fp32 tensor of any shape; TypeError for another dtype."""
    if master.dtype != torch.float32:
        raise TypeError(f"split_master needs torch.float32, got {master.dtype}")
    bits = master.contiguous().view(torch.int32)
    bits = bits.masked_fill(master.isnan(), _QUIET_NAN_BITS)
    lo = bits.to(torch.int16)  # keeps the low 16 bits
    hi = bits.add_(0x8000).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return hi, lo


@torch.no_grad()
def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 tensor whose halves are `hi` (bf16) and `lo` (int16), of the same shape; TypeError for other dtypes."""
    if hi.dtype != torch.bfloat16 or lo.dtype != torch.int16:
        raise TypeError(f"join_master needs torch.bfloat16 and torch.int16, got {hi.dtype} and {lo.dtype}")
    bits = hi.contiguous().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(lo).view(torch.float32)
