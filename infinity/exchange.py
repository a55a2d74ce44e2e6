"""Stages 1 and 2: after an update every rank gets the other ranks' spans of the parameters.

In these stages a rank holds all parameters but updates its own span only. Before the step ends the new spans are traded
chunk by chunk over host memory, into the host copy where there is one and into the swap file. Until then the group
counts as being updated, so nothing reads the mixture. The chunk buffers take the place of the update pipeline's.

[Note: a rank that fails while spans are traded]
A disk that is full on one rank must not leave the others waiting for spans that never come. So what fails on a rank by
itself is kept until all spans have been traded, whatever the bytes; then every rank says how it went, and the step is
lost on all of them. Nothing of the transfers between them is broken, so all can load a checkpoint and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from infinity.errors import IterationError, RankError
from infinity.groups import FlatGroup
from infinity.layout import Chunk, FlatSpan
from infinity.lockstep import Lockstep
from infinity.observe.stalls import StallCause
from infinity.optim.group_update import GroupUpdate
from infinity.residency import CopyState, HostCopy
from infinity.runtime import Runtime
from storage.types import Priority, Ticket, TrafficTag


class ParameterExchange:
    """Trades updated spans. Used by the training thread, after all ranks have met for a step."""

    def __init__(self, runtime: Runtime, lockstep: Lockstep) -> None:
        self._runtime = runtime
        self._lockstep = lockstep
        self._expected: list[tuple[GroupUpdate, Ticket]] = []
        self._agreed_numel: int | None = None
        self._failure: Exception | None = None  # what has gone wrong here in this step

    def expect(self, update: GroupUpdate) -> Ticket:
        """What completes when the update's span has been traded; until then the group counts as being updated."""
        ticket = Ticket(f"exchange of {update.state.group.key}")
        self._expected.append((update, ticket))
        return ticket

    def run(self, wait_computed: Callable[[], None]) -> None:
        """Trade the spans of all updates that are expected, in their order, which is the same on all ranks.

        Args:
            wait_computed: waits until the updates of this rank are computed.

        Raises:
            IterationError: the step is lost, because of what has failed on another rank.
            RankError, StorageError: some groups hold a mixture of two steps.
        """
        self._failure = None
        with self._kept():
            wait_computed()
        traded = [self._trade(update, self._chunk_numel()) for update, _ in self._expected]
        self._agree()
        for copy, (_, ticket) in zip(traded, self._expected, strict=True):
            if copy is not None:
                self._runtime.io.post(self._runtime.read_ahead.exchanged, copy)
            ticket.set_done()
        self._expected.clear()
        self._runtime.io.post(self._runtime.read_ahead.advance)

    def abandon(self, error: BaseException) -> None:
        """The step is lost: nobody waits for what has not been traded."""
        for update, ticket in self._expected:
            if not ticket.done:
                ticket.set_exception(error)
                self._runtime.io.post(self._runtime.read_ahead.exchange_lost, update.copy, ticket, error)
        self._expected.clear()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What fails in this block is raised when all ranks have come to the end; see the note above."""
        try:
            yield
        except RankError:
            raise  # nobody is there any more
        except Exception as error:
            self._failure = self._failure or error

    def _agree(self) -> None:
        mine = "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        said = self._lockstep.exchange_text(mine)
        if self._failure is not None:
            raise self._failure
        for rank, text in zip(self._lockstep.collectives.ranks.members, said, strict=True):
            if text:
                raise IterationError(f"the step is lost on all ranks, because it failed on rank {rank}: {text}")

    def _chunk_numel(self) -> int:
        """Elements of the chunks that are traded: the fewest of any rank's plan, for budgets may differ."""
        if self._agreed_numel is None:
            planned = torch.tensor([self._runtime.placement.chunk_numel])
            self._agreed_numel = int(self._lockstep.exchange(planned).min())
        return self._agreed_numel

    def _trade(self, update: GroupUpdate, chunk_numel: int) -> HostCopy | None:
        """Trade one group; its host copy, if there is one, which then has the spans of all ranks."""
        runtime, group, copy = self._runtime, update.state.group, update.copy
        with self._kept():
            runtime.stalls.wait(update.written, StallCause.NVME_WRITE)
            settled = runtime.io.submit(runtime.read_ahead.settle_update(copy), f"update of {group.key}")
            runtime.stalls.wait(settled, StallCause.OPTIMIZER)
        is_here = copy.state in (CopyState.UPDATING, CopyState.FAILED) and copy.block is not None
        writes: list[Ticket] = []
        for chunk in group.layout.cut(chunk_numel, group.state_span):
            self._trade_chunk(group, chunk, copy if is_here else None, update.step, writes)
        for ticket in writes:
            with self._kept():
                runtime.stalls.wait(ticket, StallCause.NVME_WRITE)
        return copy if is_here else None

    def _trade_chunk(
        self, group: FlatGroup, chunk: Chunk, copy: HostCopy | None, step: int, writes: list[Ticket]
    ) -> None:
        with self._own(group, chunk, copy, step) as own, self._lockstep.stalls.charged(StallCause.RANKS):
            for shard, target in self._lockstep.collectives.trade(own, self._targets(group, chunk, copy)):
                theirs = _shifted(group, chunk, shard)
                if copy is None:
                    with self._kept():  # waited for here, because the buffer is used again
                        self._runtime.stalls.wait(self._write(group, theirs, target, step), StallCause.NVME_WRITE)
                elif copy.is_stored:  # durable steps store what host memory keeps for good, too
                    with self._kept():
                        writes.append(self._write(group, theirs, target, step))

    @contextmanager
    def _own(self, group: FlatGroup, chunk: Chunk, copy: HostCopy | None, step: int) -> Iterator[torch.Tensor]:
        """This rank's part: where it is in host memory, or read into a buffer."""
        if copy is not None:
            yield copy.tensor[group.in_shard(chunk)]
            return
        runtime, size = self._runtime, group.shard_dtype.itemsize
        with self._buffer(group, chunk.numel) as own:
            if runtime.store is not None:
                with self._kept():
                    read = runtime.store.submit_read(
                        group.key,
                        _bytes(own),
                        offset=chunk.start * size,
                        priority=Priority.DEMAND,
                        tag=TrafficTag("param", step),
                        payload_nbytes=chunk.payload_numel * size,
                    )
                    runtime.stalls.wait(read, StallCause.NVME_READ)
            yield own

    @contextmanager
    def _buffer(self, group: FlatGroup, numel: int) -> Iterator[torch.Tensor]:
        runtime, nbytes = self._runtime, numel * group.shard_dtype.itemsize
        owner = f"exchange of {group.key}"
        with runtime.budgets["pipeline"].request(nbytes, owner) as reservation:
            runtime.stalls.wait(reservation, StallCause.NVME_WRITE)
            with runtime.pool.lease(nbytes, owner) as lease:
                yield torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=numel)

    def _targets(self, group: FlatGroup, chunk: Chunk, copy: HostCopy | None) -> Iterator[tuple[int, torch.Tensor]]:
        """Where the parts of the other ranks of the row go, one after another."""
        ranks = self._lockstep.collectives.ranks
        others = [shard for shard in range(ranks.shards) if shard != ranks.shard]
        if copy is not None:
            for shard in others:
                span = _shifted(group, chunk, shard)
                yield shard, copy.tensor[span.start : span.stop]
            return
        with self._buffer(group, chunk.numel) as theirs:
            for shard in others:
                yield shard, theirs

    def _write(self, group: FlatGroup, span: FlatSpan, values: torch.Tensor, step: int) -> Ticket:
        store, size = self._runtime.store, group.shard_dtype.itemsize
        if store is None:
            return Ticket.completed(group.key)
        return store.submit_write(
            group.key,
            _bytes(values),
            offset=span.start * size,
            tag=TrafficTag("param", step),
            payload_nbytes=group.layout.payload_in(span) * size,
        )


def _shifted(group: FlatGroup, chunk: Chunk, shard: int) -> FlatSpan:
    """The elements that lie in a shard's span where the chunk lies in this rank's."""
    shift = group.span_of(shard).start - group.state_span.start
    return FlatSpan(chunk.start + shift, chunk.stop + shift)


def _bytes(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; it belongs to a lease, never to a buffer that autograd sees."""
    return memoryview(values.view(torch.uint8).numpy().data)
