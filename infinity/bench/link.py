"""What the bytes that a training step copies between host and device need by themselves."""

from __future__ import annotations

import time

import torch

_COPY_NBYTES = 128 << 20  # larger than the caches of a processor


class LinkCopies:
    """Copies between memory of the kinds that the engine uses: pinned on the host for a GPU; ordinary for the others.

    Where "device memory" is a part of host memory, a copy is work for the processors.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._host = torch.ones(_COPY_NBYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._device = torch.ones(_COPY_NBYTES, dtype=torch.uint8, device=device)

    def measure(self, h2d_nbytes: int, d2h_nbytes: int) -> float:
        """Seconds for so many bytes: of the slower direction on a GPU, whose link serves both at once, else of both."""
        directions_s = (
            h2d_nbytes / _COPY_NBYTES * self._copy_s(self._device, self._host),
            d2h_nbytes / _COPY_NBYTES * self._copy_s(self._host, self._device),
        )
        return max(directions_s) if self._is_cuda else sum(directions_s)

    def _copy_s(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._synchronize()
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self._synchronize()
        return time.perf_counter() - started_s

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device.device)
