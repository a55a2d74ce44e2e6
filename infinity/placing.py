"""Initial values go where the placement wants them: host memory for good, the swap files, or both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.layout import SHARD_ALIGN_NUMEL, FlatSpan
from infinity.observe.stalls import StallCause
from infinity.rank_init import SharedValues, copy_span
from infinity.runtime import Runtime
from infinity.sizes import MIB
from storage.align import align_down
from storage.pool import Lease
from storage.types import Ticket, TrafficTag

Fill = Callable[[int, torch.Tensor], int]  # see `write_in_pieces`

INIT_STEP = -1
PIECE_NBYTES = MIB
SMALL_PIECE_NBYTES = MIB // 8  # where host memory is so short that groups are chunked


def sources_of(group: FlatGroup) -> list[torch.Tensor]:
    """What the modules hold as the parameters of a group."""
    found: list[torch.Tensor] = []
    for owners in group.owners:
        module, attribute = owners[0]
        parameter = module._parameters[attribute]
        if parameter is None:
            raise UnsupportedModelError(f"parameter {attribute!r} of {type(module).__name__} disappeared")
        found.append(parameter)
    return found


def adopt(runtime: Runtime, group: FlatGroup) -> None:
    """Copy the parameters that the modules hold into the shard, then let the model forget them.

    With several ranks those that the modules of the first one hold.
    """
    sources = sources_of(group)
    if runtime.lockstep is None:

        def fill(start: int, into: torch.Tensor) -> int:
            first = group.param_span.start + start
            span = FlatSpan(first, first + into.numel())
            copy_span(group, sources, span, into)
            return group.layout.payload_in(span)

        _keep(runtime, group, piece_numel(runtime, group), fill)
    else:
        numel = piece_numel(runtime, group)
        with SharedValues(runtime.lockstep, runtime.pool, group, sources, numel) as shared:
            _keep(runtime, group, shared.numel, shared.fill)
    group.take_over()
    group.put_stand_ins()


def _keep(runtime: Runtime, group: FlatGroup, numel: int, fill: Fill) -> None:
    """Fill a shard, in pieces of `numel` elements, where the placement wants it."""
    if not runtime.copies[group.index].pinned:
        write_in_pieces(runtime, group, numel, fill)
        return
    lease = runtime.pool.lease(group.shard_nbytes, group.key)
    try:
        shard = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.param_span.numel)
        for start in range(0, shard.numel(), numel):
            fill(start, shard[start : start + numel])
    except BaseException:
        lease.release()
        raise
    place(runtime, group, lease)


def place(runtime: Runtime, group: FlatGroup, lease: Lease) -> None:
    """A complete shard in host memory goes where the placement wants it; the lease is given back or taken over."""
    copy = runtime.copies[group.index]
    if copy.pinned:
        copy.begin_read(HostBlock(lease), Ticket.completed(group.key))
        copy.landed()
        if copy.is_stored:
            write(runtime, group, lease.memory, 0, group.shard_payload_nbytes)
        return
    with lease:
        write(runtime, group, lease.memory, 0, group.shard_payload_nbytes)


def pieces_nbytes(group: FlatGroup, piece_nbytes: int) -> int:
    """Host bytes that writing a shard in two pieces at a time takes, or all of a small one."""
    return min(group.shard_nbytes, 2 * piece_nbytes)


def piece_nbytes(runtime: Runtime) -> int:
    """Bytes of the pieces in which shards are written: smaller where host memory is short."""
    return SMALL_PIECE_NBYTES if runtime.placement.chunked else PIECE_NBYTES


def piece_numel(runtime: Runtime, group: FlatGroup) -> int:
    """Elements of the pieces in which a shard is written: all of a small one."""
    nbytes = piece_nbytes(runtime)
    if group.shard_nbytes <= 2 * nbytes:
        return group.param_span.numel
    return align_down(nbytes // group.shard_dtype.itemsize, SHARD_ALIGN_NUMEL)


def write_in_pieces(runtime: Runtime, group: FlatGroup, numel: int, fill: Fill) -> None:
    """Write a shard to the swap files; a piece is written while the next one is filled.

    Args:
        numel: elements of a piece.
        fill: fills a 1-D tensor of the stored dtype with the elements of the shard from the given one on; returns how
            many of them belong to parameters.
    """
    size, whole_numel = group.shard_dtype.itemsize, group.param_span.numel
    with ExitStack() as stack:
        count = 2 if whole_numel > numel else 1
        pieces = [
            stack.enter_context(runtime.pool.lease(numel * size, f"values of {group.key}")) for _ in range(count)
        ]
        writes = [Ticket.completed(group.key) for _ in pieces]
        try:
            for number, start in enumerate(range(0, whole_numel, numel)):
                turn = number % count
                runtime.stalls.wait(writes[turn], StallCause.NVME_WRITE)
                memory = pieces[turn].memory[: min(numel, whole_numel - start) * size]
                payload_numel = fill(start, torch.frombuffer(memory, dtype=group.shard_dtype))
                writes[turn] = submit(runtime, group, memory, start * size, payload_numel * size)
        finally:  # the memory is given back, so nothing may still be written from it
            runtime.stalls.wait(Ticket.all_of(writes, group.key), StallCause.NVME_WRITE)


def write(runtime: Runtime, group: FlatGroup, memory: memoryview, offset_nbytes: int, payload_nbytes: int) -> None:
    """Write a part of a shard's initial value to the swap files and wait for it."""
    runtime.stalls.wait(submit(runtime, group, memory, offset_nbytes, payload_nbytes), StallCause.NVME_WRITE)


def submit(runtime: Runtime, group: FlatGroup, memory: memoryview, offset_nbytes: int, payload_nbytes: int) -> Ticket:
    """Begin to write a part of a shard's initial value; `payload_nbytes` of it are no padding."""
    if runtime.store is None:
        raise UnsupportedModelError(f"{group.key} has no place in the swap files")
    tag = TrafficTag("param", INIT_STEP)
    return runtime.store.submit_write(group.key, memory, offset=offset_nbytes, tag=tag, payload_nbytes=payload_nbytes)
