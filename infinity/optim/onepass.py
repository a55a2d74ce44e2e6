"""AdamW on an fp32 master as one compiled pass over memory (numba), with moments in fp32, bf16 or 8-bit codes.

The master is split in two halves, of which the high one is the parameter in bf16; or it lies beside one in fp16.

Importing this module imports numba, a good part of a second: import it where a kernel is needed.

[Note: loops over slices]
The loops run over blocks that stay in the first-level cache, in functions of two or three arrays each. One loop over
all operands needs more overlap checks than the compiler is willing to make, and indices that could be negative are
tested one by one. Either way the loop stays scalar, at a fifth of the speed.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

logger = logging.getLogger(__name__)

UpdateFunction = Callable[..., None]

_BLOCK = 256  # elements
_SCALED = 64  # elements of a block with a scale of its own; divides `_BLOCK`
# [Note: 8-bit codes] in moments.py: the bits of c, and c itself, for exp_avg and exp_avg_sq.
_SHIFT = np.uint32(19)
_FIRST_M = np.uint32(0x3F800000 - (127 << 19))
_FIRST_V = np.uint32(0x3F800000 - (255 << 19))
_C_M = np.float32(2.0**-8 * 17 / 16)
_C_V = np.float32(2.0**-16 * 17 / 16)
_LEAST_SCALE = np.float32(2.0**-126)
_ABS, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
# Magnitudes in fp32: the smallest normal fp16, and the power of two behind the largest; what moves the exponent there.
_HALF_NORMAL, _HALF_END, _HALF_SHIFT = np.uint32(0x38800000), np.uint32(0x47800000), np.uint32(0xC8000000)
_HALF_STEP, _HALF_STEP_BITS = np.float32(0.5), np.uint32(0x3F000000)  # its last bit is the smallest fp16
_ONE = np.float32(1)

# error_model="numpy": divisions by zero give infinities as in torch, instead of a branch per division.
# No fastmath: it would let the compiler fuse and reorder, so that bits depend on the machine and on the cuts.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}
_compiled: Callable[[UpdateFunction], UpdateFunction] = numba.njit(inline="always", **_OPTIONS)


@_compiled
def _advance_moments(grad: Any, m: Any, v: Any, row: Any) -> None:
    """Both moments of a block take the gradient in; `row` is of the coefficient table."""
    grad_factor, lerp_weight, beta2, grad_sq_weight = row[0], row[2], row[4], row[5]
    lerp_from_grad = row[3] != 0
    for i in range(grad.size):
        gradient = grad[i] * grad_factor
        before = m[i]
        base = gradient if lerp_from_grad else before
        m[i] = base + lerp_weight * (gradient - before)
        v[i] = v[i] * beta2 + grad_sq_weight * gradient * gradient


def _update_split(param: Any, rest: Any, m: Any, v: Any, row: Any) -> None:
    """The split master of a block, in halves `param` and `rest`, decays and takes its step."""
    decay, bias_correction2_sqrt, eps, negative_step_size = row[1], row[6], row[7], row[8]
    for i in range(param.size):
        bits = np.uint32((np.uint32(param[i]) << np.uint32(16)) + np.uint32(rest[i]))
        value = np.uint32(bits).view(np.float32) * decay
        value = value + negative_step_size * m[i] / (math.sqrt(v[i]) / bias_correction2_sqrt + eps)
        bits = np.float32(value).view(np.uint32)
        if (bits & _ABS) > _INFINITY:
            bits = np.uint32(0x7FC00000)  # [Note: split master] in splitmaster.py: one NaN
        param[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
        rest[i] = np.int16(bits & np.uint32(0xFFFF))


def _update_separate(param: Any, rest: Any, m: Any, v: Any, row: Any) -> None:
    """The master of a block, `rest`, decays and takes its step; `param` is it rounded to fp16, ties to even.

    Below the normal numbers of fp16 an addition rounds: its sum has the smallest fp16 as its last bit.
    """
    decay, bias_correction2_sqrt, eps, negative_step_size = row[1], row[6], row[7], row[8]
    for i in range(param.size):
        value = rest[i] * decay
        value = value + negative_step_size * m[i] / (math.sqrt(v[i]) / bias_correction2_sqrt + eps)
        rest[i] = value
        bits = np.float32(value).view(np.uint32)
        size = np.uint32(bits & _ABS)
        tie = np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        half = np.uint32(np.uint32(size + _HALF_SHIFT + tie) >> np.uint32(13))
        small = np.uint32(np.float32(size.view(np.float32) + _HALF_STEP).view(np.uint32) - _HALF_STEP_BITS)
        half = half if size >= _HALF_NORMAL else small
        half = half if size < _HALF_END else np.uint32(0x7C00)
        half = half if size <= _INFINITY else np.uint32(0x7E00)
        param[i] = np.uint16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


def _apply_update(param: Any, rest: Any, m: Any, v: Any, row: Any) -> None:
    """The master of a block, in whichever form it is stored, decays and takes its step."""
    raise TypeError("numba chooses the update while it compiles; Python code cannot call this")


@overload(_apply_update, inline="always")
def _choose_update(param: Any, rest: Any, m: Any, v: Any, row: Any) -> Callable[..., None]:
    """While compiling: by the type of `rest`, one of the two."""
    return _update_split if rest.dtype == types.int16 else _update_separate


@_compiled
def _draw(words: Any, number: Any, key: Any, second_key: Any) -> None:
    """Random bits for elements `number` and on: two rounds of a 32-bit mixing function (Wellons, 2018)."""
    for i in range(words.size):
        word = np.uint32(np.uint32(number + np.uint32(i)) * np.uint32(0x9E3779B9) + key)
        word = np.uint32((word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
        word = np.uint32((word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B))
        word = np.uint32((word ^ (word >> np.uint32(16))) + second_key)
        word = np.uint32((word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
        word = np.uint32((word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B))
        words[i] = word ^ (word >> np.uint32(16))


@_compiled
def _load_bf16(stored: Any, values: Any) -> None:
    for i in range(stored.size):
        values[i] = np.uint32(np.uint32(stored[i]) << np.uint32(16)).view(np.float32)


@_compiled
def _store_bf16(values: Any, stored: Any, words: Any, shift: Any) -> None:
    """Round with the 16 bits of every word from `shift` on."""
    for i in range(values.size):
        bits = np.float32(values[i]).view(np.uint32)
        rounded = np.uint32(bits + ((words[i] >> shift) & np.uint32(0xFFFF))) >> np.uint32(16)
        stored[i] = np.uint16(0x7FC0) if (bits & _ABS) > _INFINITY else np.uint16(rounded)


@_compiled
def _load_signed(codes: Any, scale: Any, values: Any) -> None:
    for i in range(codes.size):
        code = np.uint32(codes[i])
        steps = code & np.uint32(127)
        ratio = np.uint32((steps << _SHIFT) + _FIRST_M).view(np.float32) - _C_M
        value = np.float32((_ONE if steps == np.uint32(127) else ratio) * scale)
        sign = (code >> np.uint32(7)) << np.uint32(31)
        values[i] = np.uint32(np.float32(value).view(np.uint32) | sign).view(np.float32)


@_compiled
def _load_unsigned(codes: Any, scale: Any, values: Any) -> None:
    for i in range(codes.size):
        steps = np.uint32(codes[i])
        ratio = np.uint32((steps << _SHIFT) + _FIRST_V).view(np.float32) - _C_V
        values[i] = (_ONE if steps == np.uint32(255) else ratio) * scale


@_compiled
def _largest(values: Any) -> Any:
    """The largest magnitude, NaN where one is infinite or NaN."""
    largest = np.uint32(0)
    for i in range(values.size):
        largest = max(largest, np.float32(values[i]).view(np.uint32) & _ABS)
    if largest >= _INFINITY:
        return np.float32(np.nan)
    return np.uint32(largest).view(np.float32)


@_compiled
def _signed_scale(values: Any) -> Any:
    """The largest magnitude; what has no inverse counts as 0, which is what its codes decode into."""
    largest: Any = _largest(values)
    return np.float32(0) if largest < _LEAST_SCALE else largest


@_compiled
def _unsigned_scale(values: Any) -> Any:
    """The largest value, but at least the smallest scale: what is above zero stays there. 0 for zeros."""
    largest: Any = _largest(values)
    return largest if largest == 0 or not largest < _LEAST_SCALE else _LEAST_SCALE


@_compiled
def _store_signed(values: Any, scale: Any, codes: Any, words: Any) -> None:
    inverse = _ONE / scale if scale > 0 else np.float32(0)
    for i in range(values.size):
        bits = np.float32(values[i]).view(np.uint32)
        ratio = np.float32(np.uint32(bits & _ABS).view(np.float32) * inverse + _C_M)
        ratio = ratio if ratio < _ONE else _ONE
        noise = (words[i] & np.uint32(0xFFFF)) << np.uint32(3)
        steps = np.uint32(np.float32(ratio).view(np.uint32) - _FIRST_M + noise) >> _SHIFT
        codes[i] = np.uint8(steps | ((bits >> np.uint32(31)) << np.uint32(7)))


@_compiled
def _store_unsigned(values: Any, scale: Any, codes: Any, words: Any) -> None:
    inverse = _ONE / scale if scale > 0 else np.float32(0)
    for i in range(values.size):
        ratio = np.float32(values[i] * inverse + _C_V)
        ratio = ratio if ratio < _ONE else _ONE
        noise = (words[i] >> np.uint32(16)) << np.uint32(3)
        steps = np.uint32(np.float32(ratio).view(np.uint32) - _FIRST_V + noise) >> _SHIFT
        least = np.uint32(1) if values[i] > 0 else np.uint32(0)
        codes[i] = np.uint8(steps if steps > least else least)


def _update_fp32(param: Any, rest: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, bounds: Any, rows: Any) -> None:
    """Update the spans `bounds` (int64, rows of start and stop) with `rows` of `COEFFICIENTS` (fp32), in place.

    param: uint16, the bits of bf16 with `rest` int16, or of fp16 with `rest` fp32, the master; grad, exp_avg,
    exp_avg_sq: fp32; all 1-D. The arithmetic is fp32 in the order of torch's fused kernel, every operation rounded on
    its own. See [Note: loops over slices].
    """
    for span in range(bounds.shape[0]):
        last = bounds[span, 1]
        for start in range(bounds[span, 0], last, _BLOCK):
            stop = min(start + _BLOCK, last)
            m, v = exp_avg[start:stop], exp_avg_sq[start:stop]
            _advance_moments(grad[start:stop], m, v, rows[span])
            _apply_update(param[start:stop], rest[start:stop], m, v, rows[span])


def _update_bf16(
    param: Any, rest: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, bounds: Any, rows: Any, noise: Any
) -> None:
    """As `_update_fp32`, with moments of uint16, the bits of bf16, rounded at random.

    A row of `noise` (uint32) has two keys and the number of the span's first element in its parameter.
    """
    first_moment, second_moment = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    random = np.empty(_BLOCK, np.uint32)
    for span in range(bounds.shape[0]):
        first, last = bounds[span, 0], bounds[span, 1]
        for start in range(first, last, _BLOCK):
            stop = min(start + _BLOCK, last)
            m, v, words = first_moment[: stop - start], second_moment[: stop - start], random[: stop - start]
            stored_m, stored_v = exp_avg[start:stop], exp_avg_sq[start:stop]
            _load_bf16(stored_m, m)
            _load_bf16(stored_v, v)
            _advance_moments(grad[start:stop], m, v, rows[span])
            _apply_update(param[start:stop], rest[start:stop], m, v, rows[span])
            _draw(words, np.uint32(noise[span, 2] + np.uint32(start - first)), noise[span, 0], noise[span, 1])
            _store_bf16(m, stored_m, words, np.uint32(0))
            _store_bf16(v, stored_v, words, np.uint32(16))


def _update_int8(
    param: Any,
    rest: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    exp_avg_scale: Any,
    exp_avg_sq_scale: Any,
    bounds: Any,
    rows: Any,
    noise: Any,
) -> None:
    """As `_update_bf16`, with moments of uint8 codes and one fp32 scale per 64 elements of each."""
    first_moment, second_moment = np.empty(_SCALED, np.float32), np.empty(_SCALED, np.float32)
    random = np.empty(_SCALED, np.uint32)
    for span in range(bounds.shape[0]):
        first, last = bounds[span, 0], bounds[span, 1]
        for start in range(first, last, _SCALED):
            stop = min(start + _SCALED, last)
            block = start // _SCALED
            m, v, words = first_moment[: stop - start], second_moment[: stop - start], random[: stop - start]
            codes_m, codes_v = exp_avg[start:stop], exp_avg_sq[start:stop]
            _load_signed(codes_m, exp_avg_scale[block], m)
            _load_unsigned(codes_v, exp_avg_sq_scale[block], v)
            _advance_moments(grad[start:stop], m, v, rows[span])
            _apply_update(param[start:stop], rest[start:stop], m, v, rows[span])
            _draw(words, np.uint32(noise[span, 2] + np.uint32(start - first)), noise[span, 0], noise[span, 1])
            exp_avg_scale[block], exp_avg_sq_scale[block] = _signed_scale(m), _unsigned_scale(v)
            _store_signed(m, exp_avg_scale[block], codes_m, words)
            _store_unsigned(v, exp_avg_sq_scale[block], codes_v, words)


_FP32, _ROWS = types.float32[::1], types.float32[:, ::1]
_SPANS, _NOISE = types.int64[:, ::1], types.uint32[:, ::1]
_BF16, _CODES = types.uint16[::1], types.uint8[::1]
_MASTERS = {"split": (types.uint16[::1], types.int16[::1]), "separate": (types.uint16[::1], _FP32)}
_MOMENTS: dict[str, tuple[UpdateFunction, tuple[Any, ...]]] = {
    "fp32": (_update_fp32, (_FP32, _FP32, _SPANS, _ROWS)),
    "bf16": (_update_bf16, (_BF16, _BF16, _SPANS, _ROWS, _NOISE)),
    "int8": (_update_int8, (_CODES, _CODES, _FP32, _FP32, _SPANS, _ROWS, _NOISE)),
}


@cache
def compiled_update(moments: str, master: str = "split") -> UpdateFunction:
    """The update for a format of the moments as machine code: from numba's cache on disk, else compiled and kept there.

    Compiling takes a few seconds. Where no cache directory is writable, it is compiled for this process only and the
    log says so.

    Args:
        moments: "fp32", "bf16" or "int8".
        master: "split" in two halves, or "separate" from a parameter in fp16.
    """
    update, operands = _MOMENTS[moments]
    operands = (*_MASTERS[master], _FP32, *operands)
    signature = [types.void(*operands)]
    try:
        function: UpdateFunction = numba.njit(signature, cache=True, **_OPTIONS)(update)
    except Exception as error:  # a cache that is absent, full or damaged raises all kinds; a real mistake raises again
        logger.warning(
            "the optimizer kernel cannot be cached on disk (%s) and is compiled for this process only; "
            "set NUMBA_CACHE_DIR to a writable directory to save a second per start",
            error,
        )
        function = numba.njit(signature, **_OPTIONS)(update)
    return function
