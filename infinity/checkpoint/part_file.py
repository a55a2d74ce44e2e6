"""A safetensors file of shards: flat tensors whose bytes come from memory or are copied out of swap files.

The header is padded so that the first tensor starts at a multiple of 4096 bytes; shards are whole pages, so every one
of them does, and a file system that shares blocks between files can share these. The last tensor, `digests` (U8), holds
the xxh3 of every block of every other tensor (see `block_rows`): 8 bytes each, little endian, row after row in the
order of the bytes.

[Note: what is read back]
Bytes that a file shares with a swap file cannot differ from it. Their digests are those that the store noted when they
were written, and nothing is read: damage on the drive since then is found by whoever reads the block next, be it
training or a reader of the checkpoint. Bytes that were copied are read back and compared with what the store knows;
so are shared ones of blocks whose digest it does not know, because they were written in parts, or without checksums.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import xxhash

from infinity.checkpoint.block_rows import BlockRow, Joined, count_blocks, rows_of, to_metadata
from infinity.checkpoint.format import FileEntry, checksum
from infinity.checkpoint.pace import Pace
from infinity.checkpoint.tensor_file import lay_out, read_all
from infinity.errors import CheckpointError
from storage.align import PAGE_NBYTES
from storage.checksums import BLOCK_NBYTES
from storage.copying import CopyMethod, RangeCopier, write_all
from storage.errors import IntegrityError
from storage.held import HeldKey, HeldKeys

DIGESTS = "digests"
_DIGEST_NBYTES = 8
_COPY_NBYTES = 16 << 20  # of one piece of work


def _blocks(memory: memoryview, first_nbytes: int) -> Iterator[memoryview]:
    """Cut memory into a block of at most `first_nbytes`, and blocks of `BLOCK_NBYTES`."""
    starts = [0, *range(first_nbytes, memory.nbytes, BLOCK_NBYTES)]
    for start, stop in pairwise([*starts, memory.nbytes]):
        if start < stop:
            yield memory[start:stop]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A block whose bytes have to be read: where its digest goes, and which byte of which key it begins with."""

    row: BlockRow
    digests: array[int]
    number: int
    source: HeldKey
    start: int


class PartFileWriter:
    """Writes the parts of one file, in any order, each once and whole; then `finish`.

    `write` may be called by any thread, for different parts at the same time; the rest by one. The file is open only
    meanwhile, so that a checkpoint of many files needs few descriptors.

    Args:
        path: file to make.
        parts: dtype and shape of every part, by name, in order.
        joined: those that are copied together, by `copy`, and how their blocks lie; see `block_rows`.

    Attributes:
        read_back_nbytes: bytes that were read to know their digests.
    """

    def __init__(
        self,
        path: Path,
        parts: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        joined: Sequence[Joined] = (),
    ) -> None:
        self.path = path
        self.read_back_nbytes = 0
        nbytes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in parts.items()}
        count = count_blocks(nbytes, joined)
        every = {**parts, DIGESTS: (torch.uint8, (count * _DIGEST_NBYTES,))}
        self._header, self._spans = lay_out(every, align_nbytes=PAGE_NBYTES, metadata=to_metadata(joined))
        rows = rows_of({name: self._spans[name] for name in parts}, joined)
        self._row_of = {name: row for row in rows for name in row.names}
        self._digests: dict[str, array[int] | None] = {row.names[0]: None for row in rows}  # in the order of the bytes
        self._unread: list[_Unread] = []

    def write(self, name: str, memory: memoryview) -> None:
        """All bytes of a part, from memory that does not change meanwhile."""
        with self.appending(name) as append:
            append(memory)

    @contextmanager
    def appending(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        """A function that takes the next bytes of a part; all of them have been given at the end of the block."""
        span = self._spans[name]
        if self._row_of[name] != BlockRow((name,), span.offset, span.offset + span.nbytes):
            raise ValueError(f"{name} is to be copied with {self._row_of[name].names}")
        digests, position = array("Q"), 0
        digest = xxhash.xxh3_64()
        with self._opened() as fd:

            def append(memory: memoryview) -> None:
                nonlocal position
                if position + memory.nbytes > span.nbytes:  # the next part would be overwritten
                    raise ValueError(f"{name} has {span.nbytes} bytes, given were {position + memory.nbytes}")
                for block in _blocks(memory, BLOCK_NBYTES - position % BLOCK_NBYTES):
                    write_all(fd, block, span.offset + position)
                    digest.update(block)
                    position += block.nbytes
                    if position % BLOCK_NBYTES == 0 or position == span.nbytes:
                        digests.append(digest.intdigest())
                        digest.reset()

            yield append
        if position != span.nbytes:
            raise ValueError(f"{name} has {span.nbytes} bytes, given were {position}")
        self._digests[name] = digests

    def copy(self, name: str, held: HeldKeys, key: str, offset: int, copier: RangeCopier, pace: Pace) -> bool:
        """All bytes of the parts that are joined with `name`, out of a held key from byte `offset` on.

        What was copied is read back and checked at once, while it is in memory. What is shared with the swap file needs
        no more than `read_back` after the hold has ended.

        Returns:
            Whether all of it is shared.

        Raises:
            IntegrityError: it is not what was stored.
            OSError: it could not be read or written.
        """
        row, source = self._row_of[name], held.keys[key]
        shift = row.start - offset  # from a byte of the key to that of the file
        copied: list[tuple[int, int]] = []
        with self._opened() as fd:
            for drive, place, start, nbytes in source.ranges(offset, offset + row.nbytes):
                for at in range(0, nbytes, _COPY_NBYTES):
                    size, into = min(_COPY_NBYTES, nbytes - at), start + at + shift
                    if copier.copy(held.fds[drive], place + at, fd, into, size) is not CopyMethod.REFLINK:
                        copied.append((row.number_at(into), row.number_at(into + size - 1)))
                        _forget(held.fds[drive], place + at, size)
                        pace.rest()
            digests = array("Q", bytes(_DIGEST_NBYTES * row.count))
            to_read = {number for first, last in copied for number in range(first, last + 1)}
            unread = []
            for number in range(row.count):
                first, last = row.bounds(number)
                digest = source.digest_of_bytes(first - shift, last - shift)
                if digest is None or number in to_read:
                    unread.append(_Unread(row, digests, number, source, first - shift))
                else:
                    digests[number] = digest
            self._digests[row.names[0]] = digests
            if copied:
                self._read(fd, unread, pace)
            else:
                self._unread += unread
        return not copied

    def read_back(self, pace: Pace) -> None:
        """Read the shared blocks whose digests are not known; the swap file need not hold them any more.

        Raises:
            IntegrityError, OSError: as `copy`.
        """
        unread, self._unread = self._unread, []
        if unread:
            with self._opened() as fd:
                _expect_scattered_reads(fd)
                self._read(fd, unread, pace)

    def _read(self, fd: int, blocks: Sequence[_Unread], pace: Pace) -> None:
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        for one in blocks:
            start, stop = one.row.bounds(one.number)
            block = buffer[: stop - start]
            read_all(fd, block, start, self.path)
            digest = xxhash.xxh3_64_intdigest(block)
            if one.source.is_known_to_be_wrong(one.start, block, digest):
                raise self._refusal(one, start, len(block))
            one.digests[one.number] = digest
            self.read_back_nbytes += len(block)
            pace.rest()

    def _refusal(self, one: _Unread, place: int, nbytes: int) -> IntegrityError:
        return IntegrityError(
            f"{nbytes} bytes at {one.start} of {one.source.key!r}, copied to {self.path}, are not what was written to "
            "the swap file: the checksums differ. The checkpoint is given up; check the drive and the memory of this "
            "machine",
            path=str(self.path),
            offset=place,
            nbytes=nbytes,
            key=one.source.key,
        )

    def finish(self) -> FileEntry:
        """Bring everything to the drive; what the index says about the file."""
        every = array("Q")
        for name, digests in self._digests.items():
            if digests is None or self._unread:
                raise CheckpointError(f"{name} was not written to {self.path}: a bug of infinity, please report it")
            every += digests
        if sys.byteorder == "big":
            every.byteswap()
        data, span = every.tobytes(), self._spans[DIGESTS]
        with self._opened() as fd:
            write_all(fd, memoryview(self._header), 0)
            write_all(fd, memoryview(data), span.offset)
            os.fsync(fd)
            _forget(fd, 0, 0)
        return FileEntry(span.offset + span.nbytes, checksum(self._header), checksum(data))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


def _expect_scattered_reads(fd: int) -> None:
    """Nothing beyond what is asked for is read ahead."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _forget(fd: int, offset: int, nbytes: int) -> None:
    """Nobody reads these bytes soon; others have a better use for the memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
