"""The order in which the chunks of an update are moved, so that all drives are as far with it at any time.

A chunk's record is mostly too small to be cut and lies on one drive, while parameters and gradients of a group lie on
all of them in parts. What few chunks move together may then all lie on one drive, and whether it does changes with the
length of chunks. So chunks are taken by where their bytes are, which the store knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from infinity.chunk_order import spread_over_drives
from infinity.gradients import GRAD_DTYPE, gradient_key
from infinity.optim.group_update import ChunkRun, GroupUpdate
from infinity.residency import HostCopy
from infinity.shard_io import ShardIo


def in_turns(
    store: ShardIo | None, update: GroupUpdate, copy: HostCopy | None, runs: Sequence[ChunkRun]
) -> Sequence[ChunkRun]:
    """The runs of an update in the order in which they are started; on one drive that of their bytes.

    Args:
        copy: of the shard, if one is in host memory.
    """
    if store is None or store.n_drives <= 1:
        return runs
    loads = [_load(store, update, copy, run) for run in runs]
    return [runs[number] for number in evenly(loads)]


def _load(store: ShardIo, update: GroupUpdate, copy: HostCopy | None, run: ChunkRun) -> list[int]:
    """Bytes that a chunk reads and writes, by drive."""
    record, group, chunk = run.record, update.state.group, run.record.chunk
    load = [0] * store.n_drives

    def add(key: str, start: int, nbytes: int, times: int) -> None:
        for drive, part_nbytes in store.nbytes_by_drive(key, start, start + nbytes).items():
            load[drive] += times * part_nbytes

    if record.is_stored and record.nbytes:
        add(record.key, 0, record.nbytes, 2 if record.lease is None else 1)
    if update.copy.is_stored:
        size = group.shard_dtype.itemsize
        add(group.key, group.in_shard(chunk).start * size, chunk.numel * size, 2 if copy is None else 1)
    if update.gradient.is_spilled:
        size = GRAD_DTYPE.itemsize
        add(gradient_key(group), group.in_grad(chunk).start * size, chunk.numel * size, 1)
    return load


def evenly(loads: Sequence[Sequence[int]]) -> list[int]:
    """An order of chunks in which every drive is about as far with its part as the others after any number of them.

    The next chunk is one that asks most of the drive that is furthest behind.

    Args:
        loads: of every chunk, bytes by drive; all of the same length.
    """
    numbers = spread_over_drives(range(len(loads)), 2)
    totals = [max(sum(load), 1) for load in zip(*loads, strict=True)]
    waiting: list[deque[int]] = [deque() for _ in totals]
    for number in numbers:
        parts = [nbytes / total for nbytes, total in zip(loads[number], totals, strict=True)]
        waiting[parts.index(max(parts))].append(number)
    done = [0] * len(totals)
    order: list[int] = []
    for _ in numbers:
        drive = min((d for d, queue in enumerate(waiting) if queue), key=lambda d: (done[d] / totals[d], d))
        order.append(waiting[drive].popleft())
        done = [sum(pair) for pair in zip(done, loads[order[-1]], strict=True)]
    return order
