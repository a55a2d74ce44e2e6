"""Host memory of this process: what it held, and what it should need at most.

[Note: the bound of host memory]
    interpreter_bytes     resident before the engine is made: Python, the libraries, the text, and what forward
                          and backward of a small model leave behind
    activation_bytes      `activation_nbytes`, a formula
    device_budget_bytes   parameters and gradients present for compute; 0 where they lie in a GPU's own memory
    host_budget_bytes     everything else of the state that is in memory
    trace_bytes           the events that the run keeps of itself
Their sum is `bound_bytes`; `peak_rss_bytes` stays below it.

[Note: large blocks]
When glibc frees a large block it raises the size from which blocks are mapped one by one, up to 32 MiB. Tensors then
come from a heap that cannot shrink below its topmost block, and a run of ours kept 60 MiB of holes. `map_large_blocks`
fixes that size; the plain baseline does the same, so that the two differ in offloading alone. With recomputation the
input of every block stays until the backward, and in the heap, between what comes and goes, it leaves holes that grow
with the number of blocks (22 MB for 57 of 768 channels at 128 tokens): so blocks as large as it are mapped too. Not the
smaller ones, which come and go: where they were, batches of 512 tokens took a sixth to a third more processor time.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from infinity.cli.settings import Training
from infinity.config import Precision, StateFormat
from infinity.devices.cpu import has_fast_bf16
from infinity.errors import ConfigError
from infinity.models.gpt import VOCABULARY, Gpt, GptShape
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.sizes import format_nbytes

_SAVED_PER_CHANNEL = 20  # of a block: residuals 2, norms 2, qkv 3, attention 2, MLP 8, and their small change
_BACKWARD_PER_CHANNEL = 16  # gradients of a block on their way: MLP 8, qkv 3, residuals 2, and copies of them
_OUTSIDE_PER_CHANNEL = 3  # embeddings and the last norm
_LOGITS_COPIES = 4  # logits, log-probabilities, the gradients of both
_M_TRIM_THRESHOLD = -1  # glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_LARGE_NBYTES = 1 << 20
_SMALL_NBYTES = 1 << 17  # glibc's own threshold as it starts
_LEAST_PER_VALUE = 2  # bytes of an activation: bf16
_SMALL_HIDDEN = 256
_HEAD = 64


def rss_bytes() -> int:
    """Resident bytes now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Most bytes resident at any time since this program was started."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage remembers the size of the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def activation_nbytes(training: Training) -> int:
    """Bytes of activations at the worst moment, the backward of the last block.

    Every block keeps 20 values per token and channel, or only its input with recomputation; one block's gradients
    are on their way; and there are the logits. A value counts 4 bytes: where the CPU computes in bf16 it has 2, but its
    kernels keep fp32 copies on the way.
    """
    shape = training.shape
    tokens = training.batch * shape.seq
    kept = shape.layers + _SAVED_PER_CHANNEL if training.recompute else shape.layers * _SAVED_PER_CHANNEL
    values = (kept + _BACKWARD_PER_CHANNEL + _OUTSIDE_PER_CHANNEL) * shape.hidden
    return 4 * tokens * (values + _LOGITS_COPIES * VOCABULARY)


def check_activations(training: Training) -> None:
    """Refuse a batch that this machine could not train with any setting, before anything runs.

    Counted is what no setting does without: one block's values for its backward, 2 bytes each, and two copies of the
    logits. What lies between blocks may be recomputed, or go to the swap files.

    Raises:
        ConfigError: with the arithmetic.
    """
    if training.uses_cuda:
        return
    at_once = -(-training.batch // training.micro_batches)
    per_token = _SAVED_PER_CHANNEL * training.shape.hidden + 2 * VOCABULARY
    need = _LEAST_PER_VALUE * per_token * at_once * training.shape.seq
    have = int(psutil.virtual_memory().available + psutil.swap_memory().free)
    if need > have:
        raise ConfigError(
            f"activations of {at_once} x {training.shape.seq} tokens at once need more than {format_nbytes(need)}, but "
            f"{format_nbytes(have)} are available here. Take a smaller --batch, or more --micro-batches; as many "
            "tokens in a step come from a larger --accumulate too"
        )


def large_nbytes(training: Training) -> int:
    """From how many bytes on a block of memory is mapped by itself; see the note above."""
    if not training.recompute:
        return _LARGE_NBYTES
    input_nbytes = training.batch * training.shape.seq * training.shape.hidden * _LEAST_PER_VALUE
    return min(max(input_nbytes, _SMALL_NBYTES), _LARGE_NBYTES)


def map_large_blocks(training: Training) -> None:
    """Let the C library map large blocks one by one and give them back when they are freed; see the note above."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # not glibc: other allocators have no such threshold
    mallopt(_M_TRIM_THRESHOLD, _LARGE_NBYTES)
    mallopt(_M_MMAP_THRESHOLD, large_nbytes(training))


def warm_up(training: Training, precision: Precision, state_format: StateFormat) -> None:
    """Forward and backward of a small model, and one optimizer kernel.

    Afterwards is there what libraries load when they are first used and keep for themselves.
    """
    real = training.shape
    is_small = real.hidden <= _SMALL_HIDDEN
    hidden, heads = (real.hidden, real.heads) if is_small else (_SMALL_HIDDEN, _SMALL_HIDDEN // _HEAD)
    small = GptShape(layers=2, hidden=hidden, heads=heads, seq=real.seq)
    _forward_and_backward(replace(training, shape=small), _compute_dtype(training, precision))
    threads = KernelThreads(None)
    try:
        kernel_for(precision, threads, state_format=state_format).warm_up()
    finally:
        threads.close()


def _forward_and_backward(training: Training, dtype: torch.dtype) -> None:
    # Neither an optimizer of torch nor anything drawn on "meta": they load torch's compiler, 70 MB.
    model = Gpt(training.shape, recompute=training.recompute).to(dtype)
    tokens = torch.zeros(training.batch, training.shape.seq, dtype=torch.int64)
    torch.autograd.backward(model(tokens, tokens))


def _compute_dtype(training: Training, precision: Precision) -> torch.dtype:
    """What the CPU computes in. A GPU's activations are not in host memory, and the fake computes in fp32."""
    is_bf16 = precision is Precision.BF16 and training.device == "cpu" and has_fast_bf16()
    return torch.bfloat16 if is_bf16 else torch.float32
