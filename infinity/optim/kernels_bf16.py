"""AdamW in one pass: on bf16 parameters with a split fp32 master, and on fp16 parameters with a master beside them.

[Note: split master] in splitmaster.py says how a master is split.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infinity.config import StateFormat
from infinity.optim.forms import RuleKernel, SeparateMaster, SplitMaster
from infinity.optim.hyper import CUT_NUMEL, AdamWHyper, Hyper, Piece, check_update
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.moments import noise_keys
from infinity.optim.rules import AdamWRule

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
"""The columns of the table of coefficients that onepass.py takes, one row per piece, fp32."""

_LEAST_NUMEL_PER_THREAD = 1 << 17  # a hop to another thread costs about as much as this many elements


class _OnePassAdamW(RuleKernel):
    """Reads gradient, parameter, the rest of the master and both moments once, and writes all but the gradient back.

    `threads` stays the caller's; without it all work is done on the calling thread. The bits do not depend on it. The
    payload of NaNs in the moments is not specified. Moments in bf16 or 8-bit codes are rounded at random: see
    [Note: stochastic rounding] in moments.py.
    """

    _master: str  # what onepass.py calls the form

    def __init__(self, threads: KernelThreads | None = None, moments: StateFormat = StateFormat.FP32) -> None:
        super().__init__(AdamWRule(), moments)
        self._threads = threads
        self._moments = moments

    def warm_up(self) -> None:
        """Load the compiled kernel, or compile it (some seconds, once per machine)."""
        self._compiled()

    def _compiled(self) -> Callable[..., None]:
        from infinity.optim.onepass import compiled_update  # numba takes a good part of a second to import

        return compiled_update(self._moments.value, self._master)

    def update(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], grad_scale: Tensor | None
    ) -> None:
        """Update `param` and `state` in place; `grad` (fp32) is read only. See `Kernel.update`."""
        check_update(param, grad, state, pieces, param_dtype=self.param_dtype, fields=self.fields)
        scale = 1.0 if grad_scale is None else float(grad_scale)
        bounds = np.array([(piece.start, piece.stop) for piece in pieces], dtype=np.int64).reshape(-1, 2)
        coefficients = _coefficients(pieces, scale)
        rest, *moments = state
        arrays = (_array(param), _array(rest), _array(grad), *map(_array, moments))
        update = self._compiled()
        shares = _shares(bounds, self._count_for(int((bounds[:, 1] - bounds[:, 0]).sum())))
        if self._moments is StateFormat.FP32:
            parts = [partial(update, *arrays, spans, coefficients[rows]) for spans, rows in shares]
        else:
            noise = [_noise(pieces, spans, rows) for spans, rows in shares]
            parts = [
                partial(update, *arrays, spans, coefficients[rows], keys)
                for (spans, rows), keys in zip(shares, noise, strict=True)
            ]
        if self._threads is None or len(parts) == 1:
            for part in parts:
                part()
        else:
            self._threads.run(parts)

    def _count_for(self, numel: int) -> int:
        most = 1 if self._threads is None else self._threads.count
        return max(1, min(most, numel // _LEAST_NUMEL_PER_THREAD))


class SplitMasterAdamW(_OnePassAdamW, SplitMaster):
    """`Kernel` for bf16."""

    _master = "split"


class SeparateMasterAdamW(_OnePassAdamW, SeparateMaster):
    """`Kernel` for fp16. With moments in fp32 torch's own kernel is used instead, whose bits fp16 promises then."""

    _master = "separate"


def _array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as a numpy array, no copy; of 16-bit floating point, in which numba has no numbers, bits."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[np.generic] = tensor.numpy()
    return array


def _noise(
    pieces: Sequence[Piece], spans: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | slice
) -> npt.NDArray[np.uint32]:
    """By span, what its random bits are drawn from: two keys, and the number of its first element (modulo 2^32)."""
    numbers = np.arange(len(pieces))[rows]
    table = np.empty((len(spans), 3), dtype=np.uint32)
    for index, number in enumerate(numbers.tolist()):
        piece = pieces[number]
        first = piece.first + int(spans[index, 0]) - piece.start
        table[index] = (*noise_keys(piece.seed, piece.step), first & 0xFFFFFFFF)
    return table


def _coefficients(pieces: Sequence[Piece], scale: float) -> npt.NDArray[np.float32]:
    rows = {key: _row(*key, scale) for key in {(piece.hyper, piece.step) for piece in pieces}}
    table = np.array([rows[piece.hyper, piece.step] for piece in pieces], dtype=np.float32)
    return table.reshape(-1, len(COEFFICIENTS))


def _row(hyper: Hyper, step: int, scale: float) -> tuple[float, ...]:
    """One row of the table: computed in double precision, rounded to fp32 once, as torch's fused kernel does."""
    if not isinstance(hyper, AdamWHyper):
        raise TypeError(f"AdamWHyper is needed, got {type(hyper).__name__}")
    lerp_weight = float(np.float32(1 - hyper.beta1))
    lerp_from_grad = lerp_weight >= 0.5  # torch's lerp: exact at both ends
    return (
        -scale if hyper.maximize else scale,
        1 - hyper.lr * hyper.weight_decay,
        lerp_weight - 1 if lerp_from_grad else lerp_weight,
        float(lerp_from_grad),
        hyper.beta2,
        1 - hyper.beta2,
        math.sqrt(1 - hyper.beta2**step),
        hyper.eps,
        -(hyper.lr / (1 - hyper.beta1**step)),
    )


def _shares(
    bounds: npt.NDArray[np.int64], count: int
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | slice]]:
    """`bounds` cut into `count` runs of about equal length, on the grid of `CUT_NUMEL`: (spans, their rows) each."""
    if count == 1:
        return [(bounds, slice(None))]
    share = -(-int((bounds[:, 1] - bounds[:, 0]).sum()) // count)
    share += -share % CUT_NUMEL
    spans: list[list[tuple[int, int, int]]] = [[]]
    room = share
    for row, (first, last) in enumerate(bounds.tolist()):
        at = first
        while at < last:
            if room <= 0:
                spans.append([])
                room = share
            end = min(last, at + room + -room % CUT_NUMEL)
            spans[-1].append((at, end, row))
            room -= end - at
            at = end
    tables = [np.array(part, dtype=np.int64) for part in spans]
    return [(np.ascontiguousarray(table[:, :2]), table[:, 2]) for table in tables]
