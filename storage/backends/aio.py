"""O_DIRECT transfers through the kernel's asynchronous interface, on one thread: for many small blocks."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from typing import Unpack

from storage.align import PAGE_NBYTES, align_down
from storage.backends.kernel_aio import KernelAio, address_of
from storage.backends.queue import Block, Transfer
from storage.backends.serving import QueuedBackend, QueueOptions
from storage.backends.system import SystemCalls, io_error, move, without_frames
from storage.errors import StorageError
from storage.types import IoRequest

# What has ended is replaced at the drive after so many, not all at once: a batch that leaves together comes back
# together, and meanwhile the drive has nothing to do.
_REFILL = 4


class AioBackend(QueuedBackend):
    """Serves requests with `io_submit`/`io_getevents`.

    Args:
        depth: how many blocks are at the device at the same time.
        block_nbytes: size of one transfer; a page multiple.
        kernel: with room for `depth`; tests put others in. Closed with the backend.
        calls: for what is resumed or tried again, one by one; tests put others in.
        options: see `QueueOptions`.

    Raises:
        OSError: the kernel does not serve this; see `kernel_aio.why_not`.
    """

    name = "aio"
    opens_direct = True

    def __init__(
        self,
        *,
        depth: int,
        block_nbytes: int,
        kernel: KernelAio | None = None,
        calls: SystemCalls | None = None,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(costs=1, block_nbytes=block_nbytes, **options)
        (self._cost,) = self._costs
        self._kernel = kernel or KernelAio(depth)
        self._calls = calls or SystemCalls()
        self._free = list(range(depth))  # slots
        self._served: dict[int, Block] = {}  # by slot
        self._bell_rings = False  # set by whoever rings it, taken back by the thread before it looks at the queue
        self._is_closing = False
        self._is_over = False  # the thread has ended, or is about to
        self._lock = threading.Lock()  # guards the bell's end
        self._thread = threading.Thread(target=self._serve, name="infinity-io-aio", daemon=True)
        try:
            self._start([self._thread])
        except BaseException:
            self._kernel.close()
            raise

    def submit(self, request: IoRequest) -> None:
        self._queue.put(request)
        if not self._bell_rings and threading.get_ident() != self._thread.ident:
            self._ring_bell()

    def close(self) -> None:
        self._is_closing = True
        self._shut_down(self._ring_bell)

    def _ring_bell(self) -> None:
        with self._lock:
            if not self._is_over:
                self._bell_rings = True
                self._kernel.ring_bell()

    # On the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        began_s = time.thread_time()
        try:
            while self._served or not self._is_closing:
                self._finish(self._start_blocks())  # what could not be started
                before_s = time.thread_time()
                ended = self._kernel.wait()
                after_s = time.thread_time()
                self._cost.system_s += after_s - before_s
                self._finish(ended)
                del ended
                self._cost.python_s = time.thread_time() - began_s - self._cost.system_s - self._cost.check_s
        except BaseException as error:  # the kernel gave up, not a transfer: whatever waits has to hear of it
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._is_over = True
        self._kernel.close()  # waits for what is in flight: nothing moves any more when its tickets fail
        if error is not None:
            for transfer in self._queue.fail(error):
                transfer.complete()

    def _start_blocks(self) -> list[tuple[int, int]]:
        """Start as many blocks as there is room for; those that the kernel refused, as (slot, -errno)."""
        if not self._free:
            return []
        self._bell_rings = False
        blocks = self._queue.take_many(len(self._free))
        if not blocks:
            return []
        slots = []
        for block in blocks:
            transfer, start, stop = block
            request, slot = transfer.request, self._free.pop()
            address = address_of(request.memory) + start
            self._kernel.prepare(slot, request.op, request.fd, address, stop - start, request.offset + start)
            self._served[slot] = block
            slots.append(slot)
        before_s = time.thread_time()
        refused = self._kernel.submit(slots)
        self._cost.system_s += time.thread_time() - before_s
        return refused

    def _finish(self, ended: list[tuple[int, int]]) -> None:
        """Complete blocks that have ended, and start others in their place."""
        while ended:
            some, ended = ended[:_REFILL], ended[_REFILL:]
            self._complete(some)
            ended += self._start_blocks()

    def _complete(self, ended: Sequence[tuple[int, int]]) -> None:
        done: list[tuple[Transfer, BaseException | None]] = []
        for slot, result in ended:
            block = self._served.pop(slot)
            self._free.append(slot)
            done.append((block[0], self._outcome(block, result)))
        self._cost.operations += len(done)
        for transfer in self._queue.blocks_done(done):
            transfer.complete()

    def _outcome(self, block: Block, result: int) -> BaseException | None:
        """What went wrong with a block. What was short or interrupted is resumed here."""
        transfer, start, stop = block
        request = transfer.request
        try:
            if result != stop - start:
                self._resume(request, start, stop, result)
            if request.check is not None:
                before_s = time.thread_time()
                request.check(start, stop)
                self._cost.check_s += time.thread_time() - before_s
        except StorageError as caught:  # it says itself what happened where
            return without_frames(caught)
        except BaseException as caught:  # whatever it is, the ticket has to carry it
            return caught
        return None

    def _resume(self, request: IoRequest, start: int, stop: int, result: int) -> None:
        """Move what is left of a block by the ordinary calls. Rare: other transfers wait meanwhile."""
        retries = self._eio_retries
        if result < 0:
            error = OSError(-result, "")
            if -result == errno.EIO:
                retries -= 1
            if retries < 0 or -result not in (errno.EIO, errno.EAGAIN, errno.EINTR):
                raise io_error(request, start, stop, error) from error
        start += align_down(max(0, result), PAGE_NBYTES)
        move(self._calls, request, start, stop, eio_retries=max(0, retries))
