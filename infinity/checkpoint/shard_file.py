"""What a file of shards is made of: flat tensors, and where their bytes are when a checkpoint is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.format import ParameterEntry


@dataclass(frozen=True, slots=True)
class StoredSource:
    """Bytes of a key in the swap files, from `offset` on."""

    key: str
    offset: int


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Bytes in host memory; `key` is the name by which whoever changes them knows them."""

    key: str
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Part:
    """One flat tensor of a file of shards."""

    name: str
    dtype: torch.dtype
    numel: int
    source: StoredSource | MemorySource


@dataclass(frozen=True, slots=True)
class ShardFile:
    """What one file will hold.

    Attributes:
        entries: makes what it says about parameters, as of the moment of the capture; called by any thread, later. The
            training thread does not wait for it: there is a piece for every parameter, kind and record.
    """

    name: str
    parts: Sequence[Part]
    entries: Callable[[], dict[str, ParameterEntry]]

    def stored_keys(self) -> set[str]:
        return {part.source.key for part in self.parts if isinstance(part.source, StoredSource)}
