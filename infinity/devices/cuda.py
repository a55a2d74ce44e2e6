"""A CUDA GPU: copies run on streams of their own beside the compute stream, ordered by events.

[Note: three streams]
Compute runs on the caller's current stream, uploads on one stream, downloads on another; one stream per role, not per
unit, since the allocator keeps a pool per stream. Buffers that autograd sees are allocated by the caller on the compute
stream. A freed block goes back to that stream at once, while kernels that use it may still be queued; so the upload
stream first waits for an event of the compute stream, and only then writes into what may be a reused block. That one
wait closes the classic race. Compute that reads an upload waits for the upload's event (`make_ready`).

[Note: no record_stream]
A tensor used on a stream other than its own is kept by a reference until an event recorded after its last use has
passed. `record_stream` would do the same at moments that nobody controls.

[Note: landing buffers]
Between different dtypes a copy goes in pieces through a buffer on the device, where the conversion runs; within one
stream the pieces follow one another, so one buffer per direction is enough. Adding to host memory is done by a worker
thread, through two pinned pieces. These fixed buffers (at most `overhead_nbytes` on the device) are not part of the
device budget, as the CUDA context itself is not.

Autograd runs hooks on a thread of its own, whose current device may be another: every entry point sets the device.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infinity.config import DeviceKind, Precision
from infinity.devices.base import Copy, Device, DeviceBlock, Fence, Register
from infinity.devices.cpu import add
from infinity.sizes import MIB, format_nbytes
from storage.types import Ticket

_log = logging.getLogger(__name__)
_LANDING_NBYTES = 16 * MIB
_STAGING_NBYTES = 8 * MIB
_N_STAGING = 2
_HOST_REGISTER_PORTABLE = 1  # pinned for every CUDA context of the process
_POLL_S = 0.0005
_JOIN_TIMEOUT_S = 30.0


class CudaFence:
    """A copy queued on a stream; over when its event has passed."""

    def __init__(self, event: torch.cuda.Event, label: str) -> None:
        self.event = event
        self._label = label

    @property
    def done(self) -> bool:
        return _has_passed(self.event)

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self.event.synchronize()  # releases the GIL
            return
        deadline_s = time.monotonic() + timeout_s
        while not self.done:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"the copy of {self._label} is not over after {timeout_s:g} s")
            time.sleep(_POLL_S)


class TicketFence:
    """A copy that ends in work on the host; over when the worker says so."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    @property
    def done(self) -> bool:
        return self._ticket.done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._ticket.wait(timeout_s):
            raise TimeoutError(f"the copy of {self._ticket.label} is not over after {timeout_s:g} s")
        self._ticket.result()


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A copy queued on a stream. Holding its tensors keeps their memory from being used again."""

    event: torch.cuda.Event
    copy: Copy


@dataclass(frozen=True, slots=True)
class _Accumulation:
    """Device values to be added to host memory. Holding the source keeps its memory from being used again."""

    source: torch.Tensor
    target: torch.Tensor
    produced: torch.cuda.Event
    ticket: Ticket


class CudaDevice(Device):
    """One CUDA device. See the notes of this module for the order of streams and the lifetime of memory."""

    def __init__(self, budget_nbytes: int, torch_device: torch.device | None = None) -> None:
        super().__init__(budget_nbytes)
        device = torch.device("cuda") if torch_device is None else torch_device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        with torch.cuda.device(self._index):
            self._h2d = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            self._d2h = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._h2d_landing = _Landing(self._h2d, self._device)
        self._d2h_landing = _Landing(self._d2h, self._device)
        self._in_flight: deque[_InFlight] = deque()
        self._lock = threading.Lock()
        self._adder = _Adder(self._index, self._d2h)
        self._closed = False

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.CUDA

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def overhead_nbytes(self) -> int:
        """Most device memory that the device itself uses besides its budget."""
        return 2 * _LANDING_NBYTES

    def compute_dtype(self, precision: Precision) -> torch.dtype:
        if precision is Precision.FP16:
            return torch.float16
        with torch.cuda.device(self._index):
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if precision is Precision.BF16 and is_fast else torch.float32

    def allocate(self, nbytes: int, owner: str) -> DeviceBlock:
        self._reap()
        return super().allocate(nbytes, owner)

    def free(self, block: DeviceBlock) -> None:
        self._reap()
        super().free(block)

    def _upload(self, copy: Copy) -> Fence:
        source, target = copy.source, copy.target
        with torch.cuda.device(self._index):
            # [Note: three streams]: the target may be a block whose former user is still queued.
            self._h2d.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self._h2d), torch.no_grad():
                if source.dtype == target.dtype:
                    target.data.copy_(source, non_blocking=True)
                else:
                    for part, piece in self._h2d_landing.pieces(source.dtype, target, source):
                        piece.copy_(part.source, non_blocking=True)
                        part.target.data.copy_(piece)
            return self._fence(self._h2d, copy)

    def make_ready(self, fence: Fence) -> None:
        if isinstance(fence, CudaFence):
            torch.cuda.current_stream(self._index).wait_event(fence.event)
        else:
            fence.wait(_JOIN_TIMEOUT_S)

    def _download(self, copy: Copy) -> Fence:
        source, target = copy.source, copy.target
        with torch.cuda.device(self._index):
            self._d2h.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self._d2h), torch.no_grad():
                if source.dtype == target.dtype:
                    target.data.copy_(source, non_blocking=True)
                else:
                    for part, piece in self._d2h_landing.pieces(target.dtype, target, source):
                        piece.copy_(part.source)
                        part.target.data.copy_(piece, non_blocking=True)
            return self._fence(self._d2h, copy)

    def _add_to_host(self, copy: Copy) -> Fence:
        with torch.cuda.device(self._index):
            produced = torch.cuda.current_stream().record_event()
            ticket = self._adder.submit(copy.source, copy.target, produced, copy.label)
        ticket.add_done_callback(lambda over: self._over(copy) if over.exception is None else None)
        return TicketFence(ticket)

    def host_register(self) -> Register | None:
        return self._register

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._adder.close()
        with self._lock:
            waiting = list(self._in_flight)
            self._in_flight.clear()
        for one in waiting:
            CudaFence(one.event, "the last tensors").wait(_JOIN_TIMEOUT_S)

    def _fence(self, stream: torch.cuda.Stream, copy: Copy) -> CudaFence:
        """An event after what was queued on the stream; the tensors of the copy live until it has passed."""
        event = _record(stream)
        with self._lock:
            self._in_flight.append(_InFlight(event, copy))
        self._reap()
        return CudaFence(event, copy.label)

    def _reap(self) -> None:
        """Drop references that no stream needs any more. See [Note: no record_stream]."""
        over: list[_InFlight] = []
        with self._lock:
            left: deque[_InFlight] = deque()
            for one in self._in_flight:
                (over if _has_passed(one.event) else left).append(one)
            self._in_flight = left
        end_s = time.perf_counter()
        for one in over:
            self._over(one.copy, end_s)

    def _swallow_stale_error(self) -> None:
        """CUDA also keeps a failed call's error for whoever launches the next kernel; let that be this one."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)

    def _register(self, address: int, nbytes: int) -> Callable[[], None]:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._index):
            code = int(runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code:
            self._swallow_stale_error()
            reason = runtime.cudaGetErrorString(runtime.cudaError(code))
            raise RuntimeError(
                f"CUDA cannot pin {format_nbytes(nbytes)} of host memory: {reason} (error {code}); raise the "
                "locked-memory limit (ulimit -l), lower the host budget, or set host.pin = false"
            )

        def unregister() -> None:
            with torch.cuda.device(self._index):
                torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

        return unregister


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after everything queued on the stream. The host sleeps while it waits for it instead of spinning."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Part:
    """Corresponding parts of a source and a target."""

    source: torch.Tensor
    target: torch.Tensor


class _Landing:
    """A device buffer on one stream for values between two dtypes; made at its first use."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._buffer: torch.Tensor | None = None

    def pieces(
        self, dtype: torch.dtype, target: torch.Tensor, source: torch.Tensor
    ) -> list[tuple[_Part, torch.Tensor]]:
        """Parts of a copy with the buffer for each, as `dtype`. Only for work on the landing's stream."""
        buffer = self._open().view(dtype)
        parts = [
            _Part(source[start : start + buffer.numel()], target[start : start + buffer.numel()])
            for start in range(0, target.numel(), buffer.numel())
        ]
        return [(part, buffer[: part.target.numel()]) for part in parts]

    def _open(self) -> torch.Tensor:
        if self._buffer is None:
            with torch.inference_mode(False), torch.cuda.stream(self._stream):
                self._buffer = torch.empty(_LANDING_NBYTES, dtype=torch.uint8, device=self._device)
        return self._buffer


class _Adder:
    """Adds device values to host memory, on a worker thread that starts with the first of them.

    Two pinned pieces take turns: while one is added, the next one crosses the link.
    """

    def __init__(self, index: int, stream: torch.cuda.Stream) -> None:
        self._index = index
        self._stream = stream
        self._jobs: queue.SimpleQueue[_Accumulation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, source: torch.Tensor, target: torch.Tensor, produced: torch.cuda.Event, label: str) -> Ticket:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="infinity-d2h-add", daemon=True)
            self._thread.start()
        ticket = Ticket(label)
        self._jobs.put(_Accumulation(source, target, produced, ticket))
        return ticket

    def close(self) -> None:
        """Finish what was submitted, then end the thread; one that hangs is left behind, and logged."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("%s has not ended within %g s and is left behind", self._thread.name, _JOIN_TIMEOUT_S)
            self._thread = None

    def _run(self) -> None:
        staging: list[torch.Tensor] = []
        while self._run_next(staging):
            continue  # each job lives in a call of its own, so that its source does not outlive it

    def _run_next(self, staging: list[torch.Tensor]) -> bool:
        job = self._jobs.get()
        if job is None:
            return False
        try:
            with torch.cuda.device(self._index):
                while len(staging) < _N_STAGING:
                    staging.append(torch.empty(_STAGING_NBYTES, dtype=torch.uint8, pin_memory=True))
                self._add(job, staging)
        except BaseException as error:
            job.ticket.set_exception(error)
        else:
            job.ticket.set_done()
        return True

    def _add(self, job: _Accumulation, staging: list[torch.Tensor]) -> None:
        # The source crosses in its own dtype, and the host widens while it adds: exact, and fewer bytes.
        numel = _STAGING_NBYTES // job.source.itemsize
        crossing: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = deque()
        self._stream.wait_event(job.produced)
        for number, start in enumerate(range(0, job.source.numel(), numel)):
            if len(crossing) == len(staging):
                _add_first(crossing)
            part = job.source[start : start + numel]
            piece = staging[number % len(staging)].view(part.dtype)[: part.numel()]
            with torch.cuda.stream(self._stream), torch.no_grad():
                piece.copy_(part, non_blocking=True)
            crossing.append((_record(self._stream), job.target[start : start + numel], piece))
        while crossing:
            _add_first(crossing)


def _add_first(crossing: deque[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]]) -> None:
    event, target, piece = crossing.popleft()
    event.synchronize()  # on the worker, which may hang with the GPU: those who wait for the ticket do not
    add(target, piece)
