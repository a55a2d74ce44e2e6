"""AdamW on the split master as one compiled pass over memory (numba)."""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

COEFFICIENTS = (
    "grad_factor",  # scale of the gradient, negative to maximise
    "decay",  # 1 - lr * weight_decay
    "lerp_weight",  # what multiplies (grad - exp_avg): see `lerp_from_grad`
    "lerp_from_grad",  # 0: exp_avg + weight * (grad - exp_avg); 1: grad + weight * (grad - exp_avg)
    "beta2",
    "grad_sq_weight",  # 1 - beta2
    "bias_correction2_sqrt",
    "eps",
    "negative_step_size",
)
"""The columns of the coefficient table, one row per piece, fp32."""

_BLOCK = 256  # elements; a block of every operand stays in the first-level cache between the two loops

UpdateFunction = Callable[..., None]


def _update(hi: Any, lo: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, bounds: Any, coefficients: Any) -> None:
    """Update the spans `bounds` (int64, rows of start and stop) with the rows of `coefficients` (fp32), in place.

    hi: uint16, lo: int16, grad, exp_avg, exp_avg_sq: fp32, all 1-D. The arithmetic is fp32 in the order of torch's
    fused kernel, every operation rounded on its own.

    Two loops over slices: one loop over five arrays needs more overlap checks than the compiler is willing to make, and
    indices that could be negative are tested one by one. Either way the loop stays scalar, at a fifth of the speed.
    """
    for row in range(bounds.shape[0]):
        grad_factor = coefficients[row, 0]
        decay = coefficients[row, 1]
        lerp_weight = coefficients[row, 2]
        lerp_from_grad = coefficients[row, 3] != 0
        beta2 = coefficients[row, 4]
        grad_sq_weight = coefficients[row, 5]
        bias_correction2_sqrt = coefficients[row, 6]
        eps = coefficients[row, 7]
        negative_step_size = coefficients[row, 8]
        last = bounds[row, 1]
        for start in range(bounds[row, 0], last, _BLOCK):
            stop = min(start + _BLOCK, last)
            g, m, v = grad[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]
            h, rest = hi[start:stop], lo[start:stop]
            for i in range(stop - start):
                gradient = g[i] * grad_factor
                before = m[i]
                base = gradient if lerp_from_grad else before
                m[i] = base + lerp_weight * (gradient - before)
                v[i] = v[i] * beta2 + grad_sq_weight * gradient * gradient
            for i in range(stop - start):
                bits = np.uint32((np.uint32(h[i]) << np.uint32(16)) + np.uint32(rest[i]))
                value = bits.view(np.float32) * decay
                value = value + negative_step_size * m[i] / (math.sqrt(v[i]) / bias_correction2_sqrt + eps)
                bits = np.float32(value).view(np.uint32)
                if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                    bits = np.uint32(0x7FC00000)  # [Note: split master] in splitmaster.py: one NaN
                h[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
                rest[i] = np.int16(bits & np.uint32(0xFFFF))


@cache
def compiled_update() -> UpdateFunction:
    """`_update` as machine code: from numba's cache on disk, else compiled (about a second) and kept there.

    Where no cache directory is writable, it is compiled for this process only and the log says so.
    """
    # Imported here: numba takes a good part of a second, and only this precision needs it.
    import numba
    from numba import types

    fp32 = types.float32[::1]
    operands = (types.uint16[::1], types.int16[::1], fp32, fp32, fp32, types.int64[:, ::1], types.float32[:, ::1])
    # error_model="numpy": divisions by zero give infinities as in torch, instead of a branch per division.
    # No fastmath: it would let the compiler fuse and reorder, so that bits depend on the machine and on the cuts.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
    signature = [types.void(*operands)]
    try:
        function: UpdateFunction = numba.njit(signature, cache=True, **options)(_update)
    except Exception as error:  # a cache that is absent, full or damaged raises all kinds; a real mistake raises again
        logger.warning(
            "the optimizer kernel cannot be cached on disk (%s) and is compiled for this process only; "
            "set NUMBA_CACHE_DIR to a writable directory to save a second per start",
            error,
        )
        function = numba.njit(signature, **options)(_update)
    return function
