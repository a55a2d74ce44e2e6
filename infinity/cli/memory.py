"""Host memory of this process: what it held, and what it should need at most.

[Note: the bound of host memory]
    interpreter_bytes     resident before the engine is made: Python, the libraries, the text, and what one step
                          of a very small model leaves behind
    activation_bytes      `activation_nbytes`, a formula
    device_budget_bytes   parameters and gradients present for compute; 0 where they lie in a GPU's own memory
    host_budget_bytes     everything else of the state that is in memory
Their sum is `bound_bytes`; `peak_rss_bytes` stays below it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil
import torch

from infinity.cli.settings import Training
from infinity.config import Precision
from infinity.devices.cpu import has_fast_bf16
from infinity.models.gpt import VOCABULARY, GptShape, build_plain
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for

_SAVED_PER_CHANNEL = 20  # of a block: residuals 2, norms 2, qkv 3, attention 2, MLP 8, and their small change
_BACKWARD_PER_CHANNEL = 16  # gradients of a block on their way: MLP 8, qkv 3, residuals 2, and copies of them
_LOGITS_COPIES = 4  # logits, log-probabilities, the gradients of both
_SMALL = GptShape(layers=2, hidden=128, heads=2, seq=64)


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
    are on their way; and there are the logits. Values have 4 bytes (2 would do where compute is bf16).
    """
    shape = training.shape
    tokens = training.batch * shape.seq
    kept = shape.layers + _SAVED_PER_CHANNEL if training.recompute else shape.layers * _SAVED_PER_CHANNEL
    per_token = (kept + _BACKWARD_PER_CHANNEL + 3) * shape.hidden + _LOGITS_COPIES * VOCABULARY
    return 4 * tokens * per_token


def warm_up(precision: Precision) -> None:
    """One step of a very small model and one optimizer kernel.

    Afterwards is there what libraries allocate for themselves and load when they are first used.
    """
    model = build_plain(_SMALL, recompute=True, seed=0).to(_warm_dtype(precision))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, _SMALL.seq, dtype=torch.int64)
    torch.autograd.backward(model(tokens, tokens))
    optimizer.step()
    optimizer.zero_grad()
    threads = KernelThreads(None)
    try:
        kernel_for(precision, threads).warm_up()
    finally:
        threads.close()


def _warm_dtype(precision: Precision) -> torch.dtype:
    """What the CPU computes in; on a GPU it makes no difference to host memory."""
    return torch.bfloat16 if precision is Precision.BF16 and has_fast_bf16() else torch.float32
