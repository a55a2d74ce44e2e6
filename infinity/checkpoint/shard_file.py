"""What a file of shards is made of: flat tensors, and where their bytes are when a checkpoint is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from infinity.checkpoint.block_rows import Joined
from infinity.checkpoint.format import ParameterEntry
from storage.checksums import BLOCK_NBYTES


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

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Parts that are copied together: how their blocks lie in the file, and where the first byte comes from."""

    joined: Joined
    source: StoredSource

    @classmethod
    def of(cls, parts: Sequence[Part]) -> StoredRun:
        """Those of parts that lie one after another, in their file and in a key."""
        source = parts[0].source
        if not isinstance(source, StoredSource):
            raise TypeError(f"{parts[0].name} is not in a swap file")
        lead_nbytes = BLOCK_NBYTES - source.offset % BLOCK_NBYTES
        return cls(Joined(tuple(part.name for part in parts), lead_nbytes), source)


def _follows(source: StoredSource, before: Part) -> bool:
    of = before.source
    return isinstance(of, StoredSource) and source == StoredSource(of.key, of.offset + before.nbytes)


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

    def stored_runs(self) -> list[StoredRun]:
        """The parts that lie in swap files, those that lie there one after another together."""
        runs: list[list[Part]] = []
        for part in self.parts:
            if not isinstance(part.source, StoredSource):
                runs.append([])  # what follows does not follow on what was before
            elif runs and runs[-1] and _follows(part.source, runs[-1][-1]):
                runs[-1].append(part)
            else:
                runs.append([part])
        return [StoredRun.of(run) for run in runs if run]

    def stored_keys(self) -> set[str]:
        return {part.source.key for part in self.parts if isinstance(part.source, StoredSource)}
