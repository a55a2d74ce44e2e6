"""Where the optimizer's state lies: one record per chunk, its fields one after another.

A record holds the fields of one chunk (for AdamW in fp32: first and second moment; in bf16 also the low halves of the
master) contiguously, so that a chunk's state is one read and one write. Records are born zero: nothing is read or
written before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinity.groups import FlatGroup
from infinity.layout import Chunk
from infinity.optim.hyper import StateField, stored_nbytes
from infinity.optim.moments import rounding_seed
from storage.pool import Lease


def record_nbytes(chunk: Chunk, fields: Sequence[StateField]) -> int:
    """Bytes of one chunk's record; every field takes whole pages."""
    return stored_nbytes(fields, chunk.numel)


def record_payload_nbytes(chunk: Chunk, fields: Sequence[StateField]) -> int:
    """The same without padding between parameters and at the end; what belongs to a block of elements counts whole."""
    return sum((chunk.payload_numel if f.block_numel == 1 else f.numel(chunk.numel)) * f.dtype.itemsize for f in fields)


@dataclass(slots=True, eq=False)
class Record:
    """The state of one chunk. `lease` is set when it is placed in host memory for good; else it lies under `key`.

    With durable steps (`is_durable`) it lies there in any case.
    """

    key: str
    chunk: Chunk
    fields: tuple[StateField, ...]
    lease: Lease | None = None
    is_initialised: bool = False
    is_durable: bool = False
    nbytes: int = field(init=False)
    payload_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = record_nbytes(self.chunk, self.fields)
        self.payload_nbytes = record_payload_nbytes(self.chunk, self.fields)

    @property
    def is_stored(self) -> bool:
        """Whether the swap files hold it."""
        return self.nbytes > 0 and (self.lease is None or self.is_durable)

    def views(self, memory: memoryview) -> list[torch.Tensor]:
        """The fields as 1-D tensors over `memory`, in order."""
        tensors = []
        offset = 0
        for f in self.fields:
            numel = f.numel(self.chunk.numel)
            tensors.append(torch.frombuffer(memory, dtype=f.dtype, offset=offset, count=numel))
            offset += f.stored_nbytes(self.chunk.numel)
        return tensors


@dataclass(slots=True, eq=False)
class GroupState:
    """Optimizer state of one trainable group: its records, and how often each parameter has been updated.

    `seeds` are those of the parameters' rounding, see [Note: stochastic rounding] in moments.py.
    """

    group: FlatGroup
    records: tuple[Record, ...]
    steps: list[int] = field(default_factory=list)
    seeds: tuple[int, ...] = ()

    @classmethod
    def build(cls, group: FlatGroup, chunk_numel: int, fields: tuple[StateField, ...]) -> GroupState:
        records = tuple(
            Record(f"{group.key}/state{chunk.index}", chunk, fields)
            for chunk in group.layout.cut(chunk_numel, group.state_span)
        )
        seeds = tuple(rounding_seed(slot.name) for slot in group.layout.slots)
        return cls(group, records, [0] * len(group.layout.slots), seeds)
