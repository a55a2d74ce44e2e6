"""Initial values go where the placement wants them: host memory for good, the swap files, or both."""

from __future__ import annotations

import torch

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.observe.stalls import StallCause
from infinity.rank_init import copy_span, share_shard
from infinity.runtime import Runtime
from storage.pool import Lease
from storage.types import Ticket, TrafficTag

INIT_STEP = -1


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
    """Copy the parameters that the modules hold into the shard, then let the model forget them."""
    lease = _make_shard(runtime, group)
    group.take_over()
    group.put_stand_ins()
    place(runtime, group, lease)


def _make_shard(runtime: Runtime, group: FlatGroup) -> Lease:
    """This rank's shard, made of the values that the modules hold; with several ranks, of those on the first one."""
    lease = runtime.pool.lease(group.shard_nbytes, group.key)
    shard = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.param_span.numel)
    if runtime.lockstep is not None:
        share_shard(runtime.lockstep, runtime.pool, group, sources_of(group), shard)
    else:
        copy_span(group, sources_of(group), group.param_span, shard)
    return lease


def place(runtime: Runtime, group: FlatGroup, lease: Lease) -> None:
    """A complete shard in host memory goes where the placement wants it; the lease is given back or taken over."""
    copy = runtime.copies[group.index]
    if copy.pinned:
        copy.begin_read(HostBlock(lease), Ticket.completed(group.key))
        copy.landed()
        if copy.is_stored:
            write(runtime, group, lease.memory, 0, group.layout.payload_numel)
        return
    with lease:
        write(runtime, group, lease.memory, 0, group.shard_payload_nbytes)


def write(runtime: Runtime, group: FlatGroup, memory: memoryview, offset_nbytes: int, payload_nbytes: int) -> None:
    """Write a part of a shard's initial value to the swap files and wait for it."""
    runtime.stalls.wait(submit(runtime, group, memory, offset_nbytes, payload_nbytes), StallCause.NVME_WRITE)


def submit(runtime: Runtime, group: FlatGroup, memory: memoryview, offset_nbytes: int, payload_nbytes: int) -> Ticket:
    """Begin to write a part of a shard's initial value; `payload_nbytes` of it are no padding."""
    if runtime.store is None:
        raise UnsupportedModelError(f"{group.key} has no place in the swap files")
    tag = TrafficTag("param", INIT_STEP)
    return runtime.store.submit_write(group.key, memory, offset=offset_nbytes, tag=tag, payload_nbytes=payload_nbytes)
