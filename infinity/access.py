"""Holding parameters gathered for the user, and writing back what was edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from infinity.errors import DeviceOutOfMemoryError, cause_for
from infinity.gather import UserHold
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import Chunk
from infinity.observe.shortages import hand_on_report
from infinity.observe.stalls import StallCause
from infinity.optim.records import Record
from infinity.order import Phase
from infinity.passage import release_after
from infinity.runtime import Runtime
from infinity.sizes import format_nbytes
from storage.types import Priority, Ticket, TrafficTag


class ParameterAccess:
    """Gathers on behalf of the user and writes edits back; `on_change` is told before stored bytes change."""

    def __init__(self, runtime: Runtime, on_change: Callable[[], None]) -> None:
        self._runtime = runtime
        self._on_change = on_change
        self._moving = Ticket.completed()  # the last transfer of the buffer
        runtime.gatherer.kept.watch(runtime.groups)

    @contextmanager
    def hold(self, groups: list[FlatGroup]) -> Iterator[None]:
        """Hold groups gathered for the length of a block."""
        gatherer = self._runtime.gatherer
        gatherer.release_unviewed()
        hold = UserHold()
        held: list[FlatGroup] = []
        try:
            for number, group in enumerate(groups):
                try:
                    gatherer.gather(group, hold, Phase.FORWARD)
                except DeviceOutOfMemoryError as error:
                    explained = self._too_much(groups, number, error)
                    raise explained from cause_for(explained, error)
                held.append(group)
            with gatherer.kept.views.guarded_graphs():
                yield
            for group in held:
                self.accept(group)
        finally:
            for group in held:
                gatherer.release_when_unviewed(group, hold)

    def _too_much(self, groups: list[FlatGroup], number: int, error: DeviceOutOfMemoryError) -> DeviceOutOfMemoryError:
        """The group with this number does not fit beside those before it: what all of them need together."""
        missing = [group for group in groups[number:] if not self._runtime.gatherer.is_gathered(group)]
        if len(missing) == 1:
            return error  # it names what it needs, which is all that is needed
        budget = self._runtime.device.budget
        enough_nbytes = budget.used_nbytes + sum(group.flat_nbytes for group in missing)
        explained = DeviceOutOfMemoryError(
            f"infinity.gathered() holds everything it is given at once, {len(groups)} groups of parameters, for which "
            f"the device budget would have to be {enough_nbytes} bytes ({format_nbytes(enough_nbytes)}); it is "
            f"{budget.limit_nbytes}. Gather smaller parts one after another, such as `for block in model.blocks: with "
            "infinity.gathered(block): ...`. For a whole model, engine.export(folder) streams it into files, and "
            "infinity.state_dicts.get_model_state_dict(engine) gives it in host memory, without the device"
        )
        hand_on_report(error, explained)
        return explained

    def accept(self, group: FlatGroup) -> None:
        """Write a gathered group back if somebody changed it in place."""
        if self._runtime.gatherer.edited(group):
            self._on_change()
            self.write_back(group)
            self._runtime.gatherer.accept_edits(group)

    def write_back(self, group: FlatGroup) -> None:
        """Make the present values of a gathered group its stored ones, chunk by chunk; what did not change stays.

        The buffers take the place of the update pipeline, which has nothing to do meanwhile.
        """
        runtime = self._runtime
        runtime.land_updates()
        runtime.before_replacing()
        records = {r.chunk.start: r for r in runtime.states[group.index].records} if group.trainable else {}
        is_chunked = runtime.copies[group.index].is_chunked
        if not is_chunked:
            runtime.gatherer.claims.take(group)
        try:
            for span in group.shard_spans():
                for chunk in group.layout.cut(runtime.placement.chunk_numel, span):
                    self._write_chunk(group, chunk, records.get(chunk.start))
        finally:
            if not is_chunked:
                runtime.gatherer.claims.release(group)

    def _write_chunk(self, group: FlatGroup, chunk: Chunk, record: Record | None) -> None:
        """The master of a changed element becomes its new value in the dtype of the shard."""
        copy = self._runtime.copies[group.index]
        param_nbytes = chunk.numel * group.shard_dtype.itemsize
        has_rest = record is not None and record.is_initialised and self._runtime.kernel.completes_master
        state_nbytes = record.nbytes if record is not None and has_rest and record.lease is None else 0
        old_nbytes = param_nbytes if copy.is_chunked else 0  # of no use any more when the state is read
        with self._buffer(group, param_nbytes + max(state_nbytes, old_nbytes)) as block:
            new = torch.frombuffer(block.memory, dtype=group.shard_dtype, count=chunk.numel)
            with torch.no_grad():
                new.copy_(group.flat.detach()[chunk.start : chunk.stop])
            if copy.is_chunked:
                old = self._read_stored(group, chunk, block.memory[param_nbytes : 2 * param_nbytes])
            else:
                old = copy.tensor[group.in_shard(chunk)]
            changed = (_bits(old) != _bits(new)) & _payload(chunk)
            if not bool(changed.any()):
                return
            if copy.is_stored:
                offset = group.in_shard(chunk).start * group.shard_dtype.itemsize
                self._write(group.key, block.memory[:param_nbytes], "param", offset)
            old.copy_(new)  # only now: a copy that counts as clean holds what the swap file holds
            if record is not None and has_rest:
                self._edit_master(record, new, changed, block.memory[param_nbytes : param_nbytes + state_nbytes])

    def _read_stored(self, group: FlatGroup, chunk: Chunk, memory: memoryview) -> torch.Tensor:
        """What the swap file holds of a chunk of a shard."""
        if self._runtime.store is None:
            raise RuntimeError(f"{group.key} is chunked, but there are no swap files")
        offset = group.in_shard(chunk).start * group.shard_dtype.itemsize
        tag = self._tag("param")
        read = self._runtime.store.submit_read(group.key, memory, offset=offset, priority=Priority.DEMAND, tag=tag)
        self._wait(read, StallCause.NVME_READ)
        return torch.frombuffer(memory, dtype=group.shard_dtype, count=chunk.numel)

    def _edit_master(self, record: Record, new: torch.Tensor, changed: torch.Tensor, buffer: memoryview) -> None:
        runtime = self._runtime
        if record.lease is not None:
            runtime.kernel.edited(new, record.views(record.lease.memory), changed)
            if record.is_stored:
                self._write(record.key, record.lease.memory, "state", 0)
            return
        if runtime.store is not None:
            read = runtime.store.submit_read(record.key, buffer, priority=Priority.DEMAND, tag=self._tag("state"))
            self._wait(read, StallCause.NVME_READ)
            runtime.kernel.edited(new, record.views(buffer), changed)
            self._write(record.key, buffer, "state", 0)

    def _write(self, key: str, memory: memoryview, kind: str, offset: int) -> None:
        if self._runtime.store is not None:
            ticket = self._runtime.store.submit_write(key, memory, offset=offset, tag=self._tag(kind))
            self._wait(ticket, StallCause.NVME_WRITE)

    def _wait(self, transfer: Ticket, cause: StallCause) -> None:
        """Wait for a transfer of the buffer. One that is given up (a timeout, Ctrl-C) keeps it until it is over."""
        self._moving = transfer
        self._runtime.stalls.wait(transfer, cause)

    @contextmanager
    def _buffer(self, group: FlatGroup, nbytes: int) -> Iterator[HostBlock]:
        budget, owner = self._runtime.budgets["pipeline"], f"edit of {group.key}"
        if nbytes <= budget.limit_nbytes:  # a model without anything to train has no pipeline
            reservation = budget.request(nbytes, owner)
            try:
                self._runtime.stalls.wait(reservation, StallCause.NVME_WRITE)
            except BaseException:
                reservation.release()
                raise
            block = HostBlock.take(self._runtime.pool, reservation, owner)
        else:
            block = HostBlock(self._runtime.pool.lease(nbytes, owner))
        self._moving = Ticket.completed(owner)
        try:
            yield block
        finally:
            release_after(block, self._moving)

    def _tag(self, kind: str) -> TrafficTag:
        return TrafficTag(f"{kind}_edit", self._runtime.step)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The elements as integers, so that NaNs and zeros of either sign compare by their bits."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])


def _payload(chunk: Chunk) -> torch.Tensor:
    """Which elements of a chunk belong to parameters; what lies between them is undefined."""
    mask = torch.zeros(chunk.numel, dtype=torch.bool)
    for piece in chunk.pieces:
        mask[piece.start : piece.stop] = True
    return mask
