"""A safetensors file of shards: flat tensors whose bytes come from memory or are copied out of swap files.

The header is padded so that the first tensor starts at a multiple of 4096 bytes; shards are whole pages, so every one
of them does, and a file system that shares blocks between files can share these. The last tensor, `digests` (U8), holds
the xxh3 of every block of 256 KiB of every other tensor: 8 bytes each, little endian, tensor after tensor in the order
of the header, blocks counted from each tensor's start.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
import xxhash

from infinity.checkpoint.format import FileEntry, checksum, damaged, unreadable
from infinity.checkpoint.tensor_file import TensorFileReader, TensorSpan, bytes_of, lay_out, read_all
from infinity.errors import CheckpointError
from storage.align import PAGE_NBYTES
from storage.checksums import BLOCK_NBYTES
from storage.closing import Closing
from storage.copying import RangeCopier, write_all
from storage.errors import IntegrityError
from storage.held import HeldKey, HeldKeys

DIGESTS = "digests"
_DIGEST_NBYTES = 8
_CACHED_BLOCKS = 8


def blocks_of(nbytes: int) -> int:
    return -(-nbytes // BLOCK_NBYTES)


def _blocks(memory: memoryview, first_nbytes: int) -> Iterator[memoryview]:
    """Cut memory into a block of at most `first_nbytes`, and blocks of `BLOCK_NBYTES`."""
    starts = [0, *range(first_nbytes, memory.nbytes, BLOCK_NBYTES)]
    for start, stop in pairwise([*starts, memory.nbytes]):
        if start < stop:
            yield memory[start:stop]


class PartFileWriter:
    """Writes the parts of one file, in any order, each once and whole; then `finish`.

    `write` may be called by any thread, for different parts at the same time; the rest by one. The file is open only
    meanwhile, so that a checkpoint of many files needs few descriptors.

    Args:
        path: file to make.
        parts: dtype and shape of every part, by name, in order.
    """

    def __init__(self, path: Path, parts: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        self.path = path
        count = sum(blocks_of(_nbytes_of(*part)) for part in parts.values())
        every = {**parts, DIGESTS: (torch.uint8, (count * _DIGEST_NBYTES,))}
        self._header, self._spans = lay_out(every, align_nbytes=PAGE_NBYTES)
        self._digests: dict[str, array[int] | None] = dict.fromkeys(parts)

    def write(self, name: str, memory: memoryview) -> None:
        """All bytes of a part, from memory that does not change meanwhile."""
        with self.appending(name) as append:
            append(memory)

    @contextmanager
    def appending(self, name: str) -> Iterator[Callable[[memoryview], None]]:
        """A function that takes the next bytes of a part; all of them have been given at the end of the block."""
        span, digests, position = self._spans[name], array("Q"), 0
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

    def copy(self, name: str, held: HeldKeys, key: str, offset: int, copier: RangeCopier) -> None:
        """All bytes of a part, out of a held key from byte `offset` on. What was copied is read back and checked.

        Raises:
            IntegrityError: it is not what was stored.
            OSError: it could not be read or written.
        """
        span, source = self._spans[name], held.keys[key]
        digests = array("Q")
        with self._opened() as fd:
            for drive, place, start, nbytes in source.ranges(offset, offset + span.nbytes):
                copier.copy(held.fds[drive], place, fd, span.offset + start - offset, nbytes)
            buffer = memoryview(bytearray(BLOCK_NBYTES))
            for start in range(0, span.nbytes, BLOCK_NBYTES):
                block = buffer[: min(BLOCK_NBYTES, span.nbytes - start)]
                read_all(fd, block, span.offset + start, self.path)
                digests.append(self._checked(block, source, offset + start, span.offset + start))
        self._digests[name] = digests

    def _checked(self, block: memoryview, source: HeldKey, start: int, place: int) -> int:
        """The digest of a block that was copied from byte `start` of a key; what the store knows of it must agree."""
        digest = xxhash.xxh3_64_intdigest(block)
        number, rest = divmod(start, BLOCK_NBYTES)
        is_whole = not rest and len(block) == min(BLOCK_NBYTES, source.nbytes - start)
        if is_whole and source.digest_of(number) not in (digest, None):
            raise IntegrityError(
                f"{len(block)} bytes at {start} of {source.key!r}, copied to {self.path}, are not what was written to "
                "the swap file: the checksums differ. The checkpoint is given up; check the drive and the memory of "
                "this machine",
                path=str(self.path),
                offset=place,
                nbytes=len(block),
                key=source.key,
            )
        return digest

    def finish(self) -> FileEntry:
        """Bring everything to the drive; what the index says about the file."""
        every = array("Q")
        for name, digests in self._digests.items():
            if digests is None:
                raise CheckpointError(f"{name} was not written to {self.path}: a bug of infinity, please report it")
            every += digests
        if sys.byteorder == "big":
            every.byteswap()
        data, span = every.tobytes(), self._spans[DIGESTS]
        with self._opened() as fd:
            write_all(fd, memoryview(self._header), 0)
            write_all(fd, memoryview(data), span.offset)
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):  # nobody reads it soon; others have a better use for the memory
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return FileEntry(span.offset + span.nbytes, checksum(self._header), checksum(data))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            os.close(fd)


class PartFileReader(Closing):
    """Reads spans of parts; every block that is touched is checked. The file is checked against its entry at once.

    Raises:
        CheckpointError: it is missing, truncated, or not what the index says.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path = path
        refuse_other_size(path, entry)
        self._file = TensorFileReader(path)
        self.parts: dict[str, TensorSpan] = {}
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        try:
            self.parts = {name: span for name, span in self._file.spans.items() if name != DIGESTS}
            self._digests = self._read_digests(entry)
        except BaseException:
            self.close()
            raise

    def _read_digests(self, entry: FileEntry) -> dict[str, array[int]]:
        first = min((span.offset for span in self._file.spans.values()), default=0)
        if checksum(self._file.read_bytes(0, first)) != entry.checksum:
            raise damaged(self.path, "the checksum of its header is wrong")
        span = self._file.spans.get(DIGESTS)
        data = self._file.read_bytes(span.offset, span.nbytes) if span is not None else b""
        if checksum(data) != entry.digests:
            raise damaged(self.path, "the checksum of its digests is wrong")
        every = array("Q", data)
        if sys.byteorder == "big":
            every.byteswap()
        found, at = {}, 0
        for name, span in sorted(self.parts.items(), key=lambda one: (one[1].offset, one[1].nbytes)):
            count = blocks_of(span.nbytes)
            found[name] = every[at : at + count]
            at += count
        if at != len(every):
            raise damaged(self.path, f"it has {len(every)} digests for {at} blocks")
        return found

    def read(self, name: str, at: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D, CPU, contiguous, of the part's dtype) with elements of a part from `at` on.

        Raises:
            CheckpointError: the part does not have them, or a block is not what was written.
        """
        span = self.parts.get(name)
        if span is None or span.dtype is not into.dtype or (at + into.numel()) * into.element_size() > span.nbytes:
            raise damaged(self.path, f"it does not hold elements {at} to {at + into.numel()} of {name!r}")
        if not into.numel():
            return
        left, start = bytes_of(into), at * into.element_size()
        while left:
            number, skip = divmod(start, BLOCK_NBYTES)
            size = min(BLOCK_NBYTES, span.nbytes - number * BLOCK_NBYTES)
            count = min(size - skip, len(left))
            if count == size:
                self._file.read_into(span.offset + start, left[:count])
                self._check(name, number, left[:count])
            else:
                left[:count] = self._block(name, number, size)[skip : skip + count]
            left, start = left[count:], start + count

    def verify(self) -> int:
        """Check every block; how many bytes they have.

        Raises:
            CheckpointError: one is not what was written.
        """
        total = 0
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        for name, span in self.parts.items():
            for number in range(blocks_of(span.nbytes)):
                block = buffer[: min(BLOCK_NBYTES, span.nbytes - number * BLOCK_NBYTES)]
                self._file.read_into(span.offset + number * BLOCK_NBYTES, block)
                self._check(name, number, block)
                total += len(block)
        return total

    def _block(self, name: str, number: int, size: int) -> bytes:
        found = self._cache.get((name, number))
        if found is None:
            block = bytearray(size)
            self._file.read_into(self.parts[name].offset + number * BLOCK_NBYTES, memoryview(block))
            self._check(name, number, memoryview(block))
            found = self._cache[name, number] = bytes(block)
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return found

    def _check(self, name: str, number: int, block: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(block) != self._digests[name][number]:
            start = number * BLOCK_NBYTES
            raise damaged(self.path, f"bytes {start} to {start + len(block)} of {name!r} have the wrong checksum")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def refuse_other_size(path: Path, entry: FileEntry) -> None:
    """Refuse a file that is missing or has another size than the index says."""
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise damaged(path, "the file is missing") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if found != entry.nbytes:
        what = "truncated" if found < entry.nbytes else "too long"
        raise damaged(path, f"it is {what}: {found} bytes, where {entry.nbytes} were written")


def _nbytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return TensorSpan(dtype, tuple(shape), 0).nbytes
