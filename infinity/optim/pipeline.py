"""The update pipeline: read a chunk's state, run the kernel, write the new state and parameters behind it.

Groups go through in the order in which they were submitted, as many chunks at a time as the pipeline's budget holds;
while the kernel works on one chunk, the next is being read and the one before written. Each chunk is updated in place
in the buffer it was read into, so nothing is copied.

If a host copy of the parameter shard is present it is updated in place and written from there, and the bytes that the
backward read are not read again; otherwise the chunk's part of the shard is read together with its state.

Everything here runs on the I/O loop, except the kernel, which runs on the optimizer worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from infinity.gradients import gradient_key
from infinity.groups import FlatGroup
from infinity.link import LinkPatience
from infinity.optim.digesting import no_digests
from infinity.optim.drive_turns import in_turns
from infinity.optim.group_update import ChunkBuffers, ChunkRun, ChunkWrite, CountDown, GroupUpdate
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_turns import KernelTurns
from infinity.optim.records import Record
from infinity.readahead import ReadAhead
from infinity.residency import CopyState, HostCopy
from infinity.shard_io import ShardIo
from storage.budget import TierBudget
from storage.checksums import Digests
from storage.errors import ClosedError
from storage.pool import HostPool
from storage.types import Priority, Ticket, TrafficTag

_MERGED_NBYTES = 1 << 20  # parameters of a group up to this size are written together: one block, one system call
FORCED_STEP = -3  # the step that reads for forced updates belong to


class UpdatePipeline:
    """Runs `GroupUpdate`s. Owns the pipeline's budget; uses the worker for kernels.

    Args:
        store: where records and shards lie; None when everything is placed in host memory.
        budget: bytes of chunk buffers in flight; at least one chunk.
        on_failure: told about the first exception of an update, which is lost then.
        link: how long a gradient may take from the device.
        preserve: told, on the optimizer worker, the key of what lies in host memory for good before it changes.
        digests: computes, on the optimizer worker, what the store notes of a write (of which bytes, and from where in
            their key on), or nothing.
    """

    def __init__(
        self,
        *,
        store: ShardIo | None,
        pool: HostPool,
        budget: TierBudget,
        kernel: Kernel,
        worker: Executor,
        read_ahead: ReadAhead,
        on_failure: Callable[[BaseException], None],
        link: LinkPatience,
        on_chunk: Callable[[str, float, float], None] | None = None,
        preserve: Callable[[str], None] = lambda key: None,
        digests: Callable[[memoryview, int], Digests | None] = no_digests,
    ) -> None:
        self._store = store
        self._pool = pool
        self._budget = budget
        self._kernel = kernel
        self._kernels = KernelTurns(worker)
        self._turns = count()
        self._written: dict[int, Ticket] = {}  # of the last update of every group
        self._read_ahead = read_ahead
        self._on_failure = on_failure
        self._on_chunk = on_chunk
        self._link = link
        self._preserve = preserve
        self._digests = digests
        self._tasks: set[asyncio.Task[None]] = set()
        self._arriving: set[asyncio.Task[None]] = set()  # gradients of updates that nobody deferred
        self._unreleased: set[GroupUpdate] = set()  # lost, but their gradients may still come from the device
        self._read_priority = Priority.READ_AHEAD
        self._reading: dict[str, list[str]] = {}  # keys that a chunk is being read from, by the key of its record
        self.chunks_done = 0

    def use(self, kernel: Kernel) -> None:
        """Take another kernel; only while nothing is being updated."""
        self._kernel = kernel

    def submit(self, updates: Sequence[GroupUpdate]) -> None:
        """Start updates (a message from the training thread). Their tickets tell how they end."""
        for update in updates:
            update.is_taken = True
            arrival = self._start(update)
            self._arriving.add(arrival)
            arrival.add_done_callback(self._arriving.discard)

    def submit_deferred(self, update: GroupUpdate) -> None:
        """Start an update that nobody waits for yet: its kernels come after those of updates that were submitted."""
        self._start(update, after=tuple(self._arriving))

    def _start(self, update: GroupUpdate, after: Sequence[asyncio.Task[None]] = ()) -> asyncio.Task[None]:
        """Start an update; the arrival of its gradient."""
        update.waits, update.turn = False, next(self._turns)
        loop = asyncio.get_running_loop()
        arrival = loop.create_task(self._arrive(update, after))
        arrival.add_done_callback(_noticed)
        index = update.state.group.index
        before, self._written[index] = self._written.get(index, Ticket.completed()), update.written
        task = loop.create_task(self._run(update, arrival, before))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, update))
        return arrival

    def defer(self, updates: Sequence[GroupUpdate]) -> None:
        """Let updates wait until their groups are used (a message from the training thread)."""
        for update in updates:
            update.is_taken = update.waits = True
            self._read_ahead.defer(update.state.group.index, _Deferred(self, update))

    def start_waiting(self) -> None:
        """Start what was deferred (a message): the training thread waits for memory that it holds."""
        self._read_ahead.force()

    def give_up(self, updates: Sequence[GroupUpdate], error: BaseException) -> None:
        """The training thread was interrupted (a message): those of these updates fail that never came here."""
        for update in updates:
            if not update.is_taken:
                self.fail(update, error)

    def _ended(self, update: GroupUpdate, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not update.written.done:  # cancelled before its first step: not even `_run` has begun
            self.fail(update, ClosedError(f"{update.written.label} was cancelled because its engine closed"))

    def hasten(self) -> None:
        """The training thread begins to wait for updates (a message): what they read goes before reads ahead."""
        self._read_priority = Priority.DEMAND
        if self._store is not None:
            for key in dict.fromkeys(key for keys in self._reading.values() for key in keys):
                self._store.promote(key)

    def relax(self) -> None:
        """It waits no more (a message)."""
        self._read_priority = Priority.READ_AHEAD

    async def drain(self) -> None:
        """Wait until nothing is being updated or written."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, update: GroupUpdate, arrival: asyncio.Task[None], before: Ticket) -> None:
        try:
            await _outcome(before)  # durable steps write what lies in host memory for good from where it lies
            copy = await self._take_copy(update)
            runs = [ChunkRun(record, parts) for record in update.state.records if (parts := update.pieces(record))]
            writes: list[Ticket] = []
            remaining = CountDown(len(runs), lambda: self._computed(update, copy, runs, writes))
            ordered = in_turns(self._store, update, copy, runs)
            tasks = [asyncio.create_task(self._update_chunk(update, run, copy, remaining, arrival)) for run in ordered]
            await asyncio.wait([arrival, *tasks])
            errors = [error for task in (arrival, *tasks) if (error := task.exception()) is not None]
            errors += [error for ticket in writes if (error := await _outcome(ticket)) is not None]
            if errors:
                raise errors[0]
            update.gradient.release()
            update.written.set_done()
            if copy is not None:
                self._read_ahead.updated(copy)
        except BaseException as error:
            self.fail(update, error)
            if not isinstance(error, Exception):
                raise

    async def _take_copy(self, update: GroupUpdate) -> HostCopy | None:
        """The host copy, moved to UPDATING, if one is there; None when the bytes are only in the swap file."""
        copy = update.copy
        while copy.state in (CopyState.READING, CopyState.WRITING) or copy.is_claimed:
            await self._read_ahead.wait_change()
        copy.raise_lost_update()
        if copy.state is CopyState.FAILED:
            copy.drop()
        if copy.state is CopyState.CLEAN:
            copy.begin_update(update.computed)
            return copy
        return None

    async def _arrive(self, update: GroupUpdate, after: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the gradient here, and for others: on the optimizer worker it would keep other updates waiting."""
        if after:
            await asyncio.wait(after)
        for fence in update.gradient.fences:
            await self._link.until_over(fence, _copy_of_gradient(update))

    async def _update_chunk(
        self,
        update: GroupUpdate,
        run: ChunkRun,
        copy: HostCopy | None,
        remaining: CountDown,
        arrival: asyncio.Task[None],
    ) -> None:
        buffers = ChunkBuffers(update, run.record, copy)
        with ExitStack() as held:
            if buffers.nbytes:
                owner = run.record.key
                reservation = held.enter_context(self._budget.request(buffers.nbytes, owner))
                await reservation
                buffers.lease = held.enter_context(self._pool.lease(buffers.nbytes, owner))
            with self._noted(update, run.record, buffers):
                await self._read(update, run.record, buffers)
            await asyncio.shield(arrival)
            writes = await self._kernels.run(update.turn, partial(self._compute, update, run, buffers))
            update.gradient.release_part(run.record.chunk)
            run.record.is_initialised = True
            written: list[Ticket] = []
            try:
                if self._store is not None:
                    for write in writes:
                        written.append(write.submit(self._store, update.step))
                remaining.one_done()
            finally:  # whatever cannot be written: the memory is given back then
                await Ticket.all_of(written, run.record.key)

    @contextmanager
    def _noted(self, update: GroupUpdate, record: Record, buffers: ChunkBuffers) -> Iterator[None]:
        """For `hasten`: what a chunk is being read from."""
        group = update.state.group
        keys = {record.key: buffers.has_record and record.is_initialised, group.key: buffers.has_param}
        keys[gradient_key(group)] = buffers.has_grad
        self._reading[record.key] = [key for key, is_read in keys.items() if is_read]
        try:
            yield
        finally:
            del self._reading[record.key]

    async def _read(self, update: GroupUpdate, record: Record, buffers: ChunkBuffers) -> None:
        store, chunk, group, priority = self._store, record.chunk, update.state.group, self._read_priority
        tickets: list[Ticket] = []
        try:
            if store is not None and buffers.has_record and record.is_initialised:
                read = partial(store.submit_read, priority=priority, tag=TrafficTag("state", update.step))
                tickets.append(read(record.key, buffers.record, payload_nbytes=record.payload_nbytes))
            if store is not None and buffers.has_param:
                size, place = group.shard_dtype.itemsize, group.in_shard(chunk)
                forced, planned = TrafficTag("param_forced", FORCED_STEP), TrafficTag("param", update.step)
                read = partial(store.submit_read, priority=priority, tag=forced if update.is_forced else planned)
                payload_nbytes = chunk.payload_numel * size
                tickets.append(read(group.key, buffers.param, offset=place.start * size, payload_nbytes=payload_nbytes))
            if buffers.has_grad:
                tickets.append(update.gradient.submit_read(chunk, buffers.grad, update.step, priority))
        finally:  # all of them, whatever fails: the memory is given back then, and nothing may be filling it any more
            await Ticket.all_of(tickets, record.key)

    def _compute(self, update: GroupUpdate, run: ChunkRun, buffers: ChunkBuffers) -> list[ChunkWrite]:
        """On the optimizer worker: one kernel call for one chunk; what it has changed in bytes that are stored."""
        started_s = time.perf_counter()
        record, chunk, group = run.record, run.record.chunk, update.state.group
        if record.lease is not None:
            self._preserve(record.key)
        if update.copy.pinned:
            self._preserve(group.key)
        memory = record.lease.memory if record.lease is not None else buffers.record
        state = record.views(memory)
        if buffers.has_param:
            param = torch.frombuffer(buffers.param, dtype=group.shard_dtype, count=chunk.numel)
        else:
            param = update.copy.tensor[group.in_shard(chunk)]
        if buffers.has_grad:
            grad = torch.frombuffer(buffers.grad, dtype=torch.float32, count=chunk.numel)
        else:
            grad = update.gradient.values(chunk)
        if not record.is_initialised:
            self._kernel.begin(param, state)
        for part in run.parts:
            self._kernel.update(param, grad, state, part.pieces, part.grad_scale)
        writes = self._writes(update, record, buffers)
        self.chunks_done += 1
        if self._on_chunk is not None:
            self._on_chunk(record.key, started_s, time.perf_counter() - started_s)
        return writes

    def _writes(self, update: GroupUpdate, record: Record, buffers: ChunkBuffers) -> list[ChunkWrite]:
        """What a chunk's update has changed of stored keys; see [Note: digests while bytes are warm] in digesting.py.

        What it has changed in the copy of a small group is written with all of that (`_write_small`).
        """
        chunk, group = record.chunk, update.state.group
        writes: list[ChunkWrite] = []
        if self._store is None:
            return writes
        if record.is_stored:
            memory = record.lease.memory if record.lease is not None else buffers.record
            writes.append(ChunkWrite(record.key, "state", memory, 0, record.payload_nbytes))
        if update.copy.is_stored and (buffers.has_param or not _is_small(group)):
            passing = buffers.param if buffers.has_param else None
            writes.append(update.param_write(group.in_shard(chunk), chunk.payload_numel, passing))
        digests = [self._digests(write.memory, write.offset) for write in writes]
        return [one if its is None else replace(one, digests=its) for one, its in zip(writes, digests, strict=True)]

    def _write_small(self, update: GroupUpdate, runs: Sequence[ChunkRun]) -> list[Ticket]:
        """Write what chunks have changed in the copy of a small group: neighbours in one go."""
        store, group = self._store, update.state.group
        if store is None or not update.copy.is_stored or not _is_small(group):
            return []
        spans: list[tuple[slice, int]] = []
        for chunk in (run.record.chunk for run in runs):
            place, payload_numel = group.in_shard(chunk), chunk.payload_numel
            if spans and spans[-1][0].stop == place.start:
                before, numel = spans.pop()
                place, payload_numel = slice(before.start, place.stop), numel + payload_numel
            spans.append((place, payload_numel))
        return [update.param_write(*span).submit(store, update.step) for span in spans]

    def _computed(
        self, update: GroupUpdate, copy: HostCopy | None, runs: Sequence[ChunkRun], writes: list[Ticket]
    ) -> None:
        """Every kernel of the update has run and every write is submitted: later reads see the new bytes."""
        if copy is not None:
            writes += self._write_small(update, runs)
            copy.updated(update.written)
        if all(fence.done for fence in update.gradient.fences):
            update.gradient.release()  # before its writes have landed: the next gradient may wait for the memory
        update.computed.set_done()
        self._read_ahead.advance()

    def fail(self, update: GroupUpdate, error: BaseException) -> None:
        """End an update that cannot go on, or cannot start; its state is lost."""
        if isinstance(error, asyncio.CancelledError):  # the loop ends it in the middle
            error = ClosedError(f"the update of {update.state.group.key} was cancelled because its engine closed")
        if update.copy.state in (CopyState.UPDATING, CopyState.WRITING):
            update.copy.fail()
        update.copy.lost_update = error
        self._let_go(update)
        update.computed.set_exception(error)
        update.written.set_exception(error)
        self._on_failure(error)
        self._read_ahead.updated(update.copy)

    def _let_go(self, update: GroupUpdate) -> None:
        """Give the memory of a gradient back that no kernel has waited for: its copies may be under way."""
        if all(fence.done for fence in update.gradient.fences):
            update.gradient.release()
            return
        self._unreleased.add(update)
        with suppress(RuntimeError):  # no loop runs any more: `free` comes next
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._release_arrived(update))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _release_arrived(self, update: GroupUpdate) -> None:
        for fence in update.gradient.fences:
            try:
                await self._link.until_over(fence, _copy_of_gradient(update))
            except Exception as error:
                self._on_failure(error)
                if not fence.done:  # it may still write there
                    return
        self._unreleased.discard(update)
        update.gradient.release()

    def free(self) -> None:
        """Give back what copies from the device have held that never ended; none is under way any more. Idempotent."""
        while self._unreleased:
            self._unreleased.pop().gradient.release()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """`infinity.readahead.DeferredUpdate`: an update of a pipeline that has not started."""

    pipeline: UpdatePipeline
    update: GroupUpdate

    def start(self, *, is_forced: bool) -> None:
        self.update.is_forced = is_forced
        self.pipeline.submit_deferred(self.update)

    def fail(self, error: BaseException) -> None:
        self.pipeline.fail(self.update, error)


def _copy_of_gradient(update: GroupUpdate) -> str:
    return f"the copy of the gradient of {update.state.group.key} from the device"


def _is_small(group: FlatGroup) -> bool:
    return group.shard_nbytes <= _MERGED_NBYTES


def _noticed(task: asyncio.Task[None]) -> None:
    """What went wrong is told where it is awaited; an update that has failed before that asks no more."""
    if not task.cancelled():
        task.exception()


async def _outcome(ticket: Ticket) -> Exception | None:
    """What went wrong with a transfer, when it is over."""
    try:
        await ticket
    except Exception as error:
        return error
    return None
