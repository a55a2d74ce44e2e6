"""What an operation that met two dtypes is told about the dtype in which the model computes.

Torch's own message names neither the input nor the buffer that has another one. Nothing is refused at `offload`: many
models keep a buffer in fp32 on purpose and convert what they make of it, as rotary embeddings do.
"""

from __future__ import annotations

import re

import torch

from infinity.config import Precision
from infinity.grouping import has_fp32_statistics
from infinity.runtime import Runtime
from infinity.territory import Territory

_MISMATCH = re.compile(r"dtype|scalar type|Input type .* should be the same")
_MOST_NAMES = 4


def note_dtypes(error: BaseException | None, runtime: Runtime) -> None:
    """Add to an error about dtypes, once, what inputs and buffers are to be in; others stay as they are."""
    precision = runtime.config.precision
    if precision is Precision.FP32 or not isinstance(error, RuntimeError) or not _MISMATCH.search(str(error)):
        return
    compute = runtime.device.compute_dtype(precision)
    note = (
        f"With precision={precision.value!r} this model computes in {compute} on this device (engine.compute_dtype): "
        "inputs are to be given in it."
    )
    if others := _other_buffers(Territory(runtime.model), compute):
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        shown = ", ".join(others[:_MOST_NAMES]) + more
        note += (
            f" Buffers keep the dtype they were built with, and so may what is computed with {shown}. Convert "
            "the buffer after infinity.offload, module.name = module.name.to(engine.compute_dtype), or what the "
            "forward makes of it."
        )
    if note not in getattr(error, "__notes__", []):
        error.add_note(note)


def _other_buffers(territory: Territory, compute: torch.dtype) -> list[str]:
    """Floating-point buffers in another dtype, with that; without fp32 statistics, which are meant to be."""
    statistics = {id(b) for m in territory.modules() if has_fp32_statistics(m) for b in m._buffers.values()}
    return [
        f"{name!r} ({buffer.dtype})"
        for name, buffer in territory.named_buffers()
        if buffer.is_floating_point() and buffer.dtype is not compute and id(buffer) not in statistics
    ]
