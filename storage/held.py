"""Keys of a store as they were at one moment, kept for whoever copies them while the store goes on.

The bytes stay where they are: `HeldKey.ranges` says in which files and at which offsets, `HeldKey.digests` what they
hash to. Nothing is read until somebody copies them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from storage.checksums import BLOCK_NBYTES, BlockState, Span, xxh3_of
from storage.closing import Closing
from storage.errors import detached
from storage.filesystems import is_written_in_place, stop_copying
from storage.stripes import Piece, overlap
from storage.transfer import StoredKey
from storage.types import Op


@dataclass(frozen=True, slots=True)
class HeldKey:
    """One key.

    Attributes:
        pieces: where its bytes lie.
        digests, states: the xxh3 of its blocks, by number, and what is known about each; empty without checksums.
        spans: of blocks that were written in parts, by number.
    """

    key: str
    nbytes: int
    pieces: Sequence[Piece]
    digests: Sequence[int]
    states: bytes
    spans: Mapping[int, Sequence[Span]]

    @classmethod
    def of(cls, key: str, entry: StoredKey) -> HeldKey:
        """The present state of a key; called under its store's lock.

        Raises:
            ValueError: a write is in flight.
            StorageError: the last write failed.
        """
        if any(operation.op is Op.WRITE for operation in entry.order.operations):
            raise ValueError(f"key {key!r} cannot be held while it is being written")
        for _, _, cause in entry.order.lost:
            raise detached(cause)
        if entry.checksums is None:
            return cls(key, entry.nbytes, entry.pieces, (), b"", {})
        known = entry.checksums
        spans = {number: tuple(block) for number, block in known.spans.items()}
        return cls(key, entry.nbytes, entry.pieces, known.digests[:], bytes(known.states), spans)

    def digest_of(self, number: int) -> int | None:
        """The xxh3 of a block (`storage.checksums.BLOCK_NBYTES`); None if it was not written whole."""
        is_known = number < len(self.states) and self.states[number] == BlockState.WHOLE
        return self.digests[number] if is_known else None

    def digest_of_bytes(self, start: int, stop: int) -> int | None:
        """The xxh3 of bytes of the key if they are a block that was written whole, else None."""
        number = start // BLOCK_NBYTES
        is_block = start % BLOCK_NBYTES == 0 and stop == min(start + BLOCK_NBYTES, self.nbytes)
        return self.digest_of(number) if is_block else None

    def is_known_to_be_wrong(self, start: int, content: memoryview, digest: int) -> bool:
        """Whether bytes from `start` on, inside one block, cannot be what was written, as far as that is known.

        `digest` is their xxh3. Known are whole blocks, and spans of blocks that were written in parts; a part of one
        says nothing.
        """
        number, stop = start // BLOCK_NBYTES, start + len(content)
        if self.digest_of(number) is not None:
            return self.digest_of_bytes(start, stop) not in (digest, None)
        return any(
            span.error is not None
            or span.digest not in (None, xxh3_of(content[span.start - start : span.stop - start]))
            for span in self.spans.get(number, ())
            if start <= span.start and span.stop <= stop
        )

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Bytes `start` to `stop` of the key as (drive, offset in its file, start in the key, size)."""
        return [
            (piece.extent.drive, piece.extent.offset + a - piece.start, a, b - a)
            for piece, a, b in overlap(self.pieces, start, stop)
        ]


class HeldKeys(Closing):
    """Several keys, held until `close`; a context manager. `close` may be called by any thread, more than once.

    Args:
        keys: what is held.
        paths: of the drives' files, by number.
        let_go: ends the hold.
    """

    def __init__(self, keys: Mapping[str, HeldKey], paths: Sequence[Path], let_go: Callable[[], None]) -> None:
        self._closing = ExitStack()
        self._closing.callback(let_go)
        self.keys = keys
        self.fds: list[int] = []
        try:
            for path in paths:
                # Through the page cache and in order: copies are large, and the kernel reads ahead for them.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._closing.callback(os.close, fd)
                self.fds.append(fd)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of all these keys."""
        return sum(key.nbytes for key in self.keys.values())

    def share_with(self, folder: Path) -> None:
        """Let files that are made in a folder from now on share blocks with the held ones, where the system can.

        btrfs shares them only between files of which both are copied on write or neither is.
        """
        if any(map(is_written_in_place, self.fds)):
            stop_copying(folder)  # where that is refused the bytes are copied

    def close(self) -> None:
        """Let go: the bytes may be overwritten. Idempotent."""
        self._closing.pop_all().close()
