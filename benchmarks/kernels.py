"""Optimizer kernels beside the speed of memory: one pass, the same update in chunked torch operations, and copying.

    python benchmarks/kernels.py [--rounds 15] [--numel 16777216] [--threads 1,2] [--json FILE]

Every case updates (or copies) the same number of parameters; within a round they take turns, so a machine that gets
slower is slower for all. Figures are medians over rounds with the range, in parameters per second and in bytes that
cross memory per second: what is read and written once, 28 bytes per parameter for AdamW in bf16 and fp32. `memcpy`
copies 14 bytes per parameter, which crosses memory as often, on the same threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from infinity.bench.arguments import at_least, result_file, several
from infinity.bench.machine import describe_machine
from infinity.config import Precision, StateFormat
from infinity.optim.forms import SplitMaster
from infinity.optim.hyper import AdamWHyper, Kernel, Piece, payload_nbytes
from infinity.optim.kernel_threads import KernelThreads, usable_cores
from infinity.optim.kernels import kernel_for
from infinity.optim.rules import AdamWRule

_HYPER = AdamWHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
_COPIED = 14  # bytes per parameter of `memcpy`


def update_case(kernel: Kernel, numel: int) -> tuple[Callable[[], None], float]:
    """One update of `numel` parameters, and the bytes per parameter that it reads and writes at least."""
    param = torch.full((numel,), 0.5, dtype=kernel.param_dtype)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    state = [torch.zeros(f.numel(numel), dtype=f.dtype) for f in kernel.fields]
    kernel.warm_up()
    kernel.begin(param, state)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        kernel.update(param, grad, state, [Piece(0, numel, step, _HYPER)], None)

    stored = param.itemsize + payload_nbytes(kernel.fields, numel) / numel
    return run, 2 * stored + grad.itemsize


def copy_case(threads: KernelThreads, numel: int) -> tuple[Callable[[], None], float]:
    """A copy that crosses memory as often as an update in bf16, in as many parts as there are threads."""
    source = np.ones(_COPIED * numel, dtype=np.uint8)
    target = np.empty_like(source)
    pairs = zip(np.array_split(source, threads.count), np.array_split(target, threads.count), strict=True)
    parts = [partial(np.copyto, to, part) for part, to in pairs]
    return lambda: threads.run(parts), 2.0 * _COPIED


def measure(rounds: int, numel: int, count: int) -> dict[str, Any]:
    """All cases on `count` threads, in turn."""
    before = torch.get_num_threads()
    with ExitStack() as stack:
        threads = stack.enter_context(KernelThreads(count))
        torch.set_num_threads(count)
        stack.callback(torch.set_num_threads, before)
        cases = {
            "bf16, one pass": update_case(kernel_for(Precision.BF16, threads), numel),
            "bf16, chunked torch operations": update_case(SplitMaster(AdamWRule()), numel),
            "bf16, moments in bf16": update_case(
                kernel_for(Precision.BF16, threads, state_format=StateFormat.BF16), numel
            ),
            "bf16, moments in int8": update_case(
                kernel_for(Precision.BF16, threads, state_format=StateFormat.INT8), numel
            ),
            "fp32, torch fused": update_case(kernel_for(Precision.FP32, threads), numel),
            "fp16, fp32 master": update_case(kernel_for(Precision.FP16, threads), numel),
            "memcpy": copy_case(threads, numel),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, (run, _) in cases.items():
                started_s = time.perf_counter()
                run()
                if number:  # the first round touches the memory
                    seconds[name].append(time.perf_counter() - started_s)
    found = {name: _figures(seconds[name], numel, moved) for name, (_, moved) in cases.items()}
    one_pass, torch_operations = seconds["bf16, one pass"], seconds["bf16, chunked torch operations"]
    return {
        "kernels": found,
        "one_pass_over_torch": statistics.median(torch_operations) / statistics.median(one_pass),
        "one_pass_over_memcpy": statistics.median(seconds["memcpy"]) / statistics.median(one_pass),
    }


def _figures(seconds: list[float], numel: int, moved: float) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {
        "parameters_per_s": numel / middle,
        "bytes_per_s": numel * moved / middle,
        "slowest_parameters_per_s": numel / max(seconds),
        "fastest_parameters_per_s": numel / min(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument("--numel", type=at_least(1), default=1 << 24)
    parser.add_argument("--threads", type=several(at_least(1)), default=sorted({1, usable_cores()}))
    parser.add_argument("--json", type=result_file)
    options = parser.parse_args()
    found = {f"{count} threads": measure(options.rounds, options.numel, count) for count in options.threads}
    report = {
        "machine": describe_machine(),
        "torch": str(torch.__version__),
        "rounds": options.rounds,
        "numel": options.numel,
        "found": found,
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
