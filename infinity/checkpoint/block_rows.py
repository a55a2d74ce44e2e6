"""Which bytes of a file of shards have a digest together.

The tensors of a file are cut into blocks of `BLOCK_NBYTES`, each tensor from its start, as a row of its own. Tensors
that were copied out of a swap file are joined instead, as far as they lie there one after another, and the first block
of their row is shorter where the bytes begin inside a block of the store. So blocks of the row are blocks of the store,
whose digests it knows, and none of them has to be read to have one. The header of the file names such rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infinity.checkpoint.tensor_file import TensorSpan
from storage.checksums import BLOCK_NBYTES

ROWS = "rows"  # of the metadata in the header


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors, one behind the other, that are one row of blocks; the first block has `lead_nbytes` at most."""

    names: tuple[str, ...]
    lead_nbytes: int = BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Bytes `start` to `stop` of a file, in blocks: the first of `lead_nbytes`, the others of `BLOCK_NBYTES`.

    The last one has what is left.
    """

    names: tuple[str, ...]
    start: int
    stop: int
    lead_nbytes: int = BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.stop - self.start

    @property
    def count(self) -> int:
        """How many blocks."""
        return _blocks_of(self.nbytes, self.lead_nbytes)

    def number_at(self, offset: int) -> int:
        """The block that a byte of the file lies in."""
        return (offset - self.start + BLOCK_NBYTES - self.lead_nbytes) // BLOCK_NBYTES

    def bounds(self, number: int) -> tuple[int, int]:
        """Where a block starts and stops in the file."""
        stop = self.start + self.lead_nbytes + number * BLOCK_NBYTES
        return max(self.start, stop - BLOCK_NBYTES), min(stop, self.stop)


def _blocks_of(nbytes: int, lead_nbytes: int) -> int:
    return 1 + max(0, -(-(nbytes - lead_nbytes) // BLOCK_NBYTES)) if nbytes else 0


def count_blocks(nbytes: Mapping[str, int], joined: Sequence[Joined]) -> int:
    """How many blocks a file has whose tensors, by name, have so many bytes."""
    alone = nbytes.keys() - {name for one in joined for name in one.names}
    return sum(_blocks_of(nbytes[name], BLOCK_NBYTES) for name in alone) + sum(
        _blocks_of(sum(nbytes[name] for name in one.names), one.lead_nbytes) for one in joined
    )


def rows_of(spans: Mapping[str, TensorSpan], joined: Sequence[Joined]) -> list[BlockRow]:
    """The rows of a file's tensors, in the order in which their digests are stored: that of the bytes.

    Raises:
        ValueError: tensors that are joined are not there, or do not lie behind one another.
    """
    rows, alone = [], dict(spans)
    for one in joined:
        if not one.names or not alone.keys() >= set(one.names) or not 0 < one.lead_nbytes <= BLOCK_NBYTES:
            raise ValueError(f"there is no row of the tensors {', '.join(map(repr, one.names))}")
        own = [alone.pop(name) for name in one.names]
        if any(after.offset != before.offset + before.nbytes for before, after in pairwise(own)):
            raise ValueError(f"the tensors {', '.join(map(repr, one.names))} do not lie behind one another")
        rows.append(BlockRow(one.names, own[0].offset, own[-1].offset + own[-1].nbytes, one.lead_nbytes))
    rows += [BlockRow((name,), span.offset, span.offset + span.nbytes) for name, span in alone.items()]
    return sorted(rows, key=lambda row: (row.start, row.stop))


def to_metadata(joined: Sequence[Joined]) -> dict[str, str]:
    """What the header of a file says about rows that are not each one tensor from its start on."""
    special = [[list(one.names), one.lead_nbytes] for one in joined if one != Joined(one.names[:1])]
    return {ROWS: json.dumps(special, separators=(",", ":"))} if special else {}


def from_metadata(metadata: Mapping[str, str]) -> list[Joined]:
    """What `to_metadata` was given.

    Raises:
        ValueError, TypeError: it says something else.
    """
    return [Joined(tuple(names), int(lead_nbytes)) for names, lead_nbytes in json.loads(metadata.get(ROWS, "[]"))]
