"""Reads files of shards (see `part_file`): every block that is touched is checked."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from pathlib import Path

import torch
import xxhash

from infinity.checkpoint.block_rows import BlockRow, from_metadata, rows_of
from infinity.checkpoint.format import FileEntry, checksum, damaged, unreadable
from infinity.checkpoint.part_file import DIGESTS
from infinity.checkpoint.tensor_file import TensorFileReader, TensorSpan, bytes_of
from storage.checksums import BLOCK_NBYTES
from storage.closing import Closing

_CACHED_BLOCKS = 8


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
        self._rows: dict[str, BlockRow] = {}  # by tensor
        self._cache: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        try:
            self.parts = {name: span for name, span in self._file.spans.items() if name != DIGESTS}
            self._digests = self._read_digests(entry)
        except BaseException:
            self.close()
            raise

    def _read_digests(self, entry: FileEntry) -> dict[int, array[int]]:
        """The digests of every row, by where it starts."""
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
        try:
            rows = rows_of(self.parts, from_metadata(self._file.metadata))
        except (ValueError, TypeError) as error:
            raise damaged(self.path, f"its header is not understood: {error}") from error
        found, at = {}, 0
        for row in rows:
            if row.count:  # an empty tensor starts where another one does
                found[row.start] = every[at : at + row.count]
                at += row.count
            self._rows |= dict.fromkeys(row.names, row)
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
        row, left = self._rows[name], bytes_of(into)
        offset = span.offset + at * into.element_size()
        while left:
            number = row.number_at(offset)
            start, stop = row.bounds(number)
            count = min(stop - offset, len(left))
            if count == stop - start:
                self._file.read_into(offset, left[:count])
                self._check(row, number, left[:count])
            else:
                left[:count] = self._block(row, number)[offset - start : offset - start + count]
            left, offset = left[count:], offset + count

    def verify(self) -> int:
        """Check every block; how many bytes they have.

        Raises:
            CheckpointError: one is not what was written.
        """
        total = 0
        buffer = memoryview(bytearray(BLOCK_NBYTES))
        for row in {row.start: row for row in self._rows.values() if row.count}.values():
            for number in range(row.count):
                start, stop = row.bounds(number)
                block = buffer[: stop - start]
                self._file.read_into(start, block)
                self._check(row, number, block)
                total += len(block)
        return total

    def _block(self, row: BlockRow, number: int) -> bytes:
        found = self._cache.get((row.start, number))
        if found is None:
            start, stop = row.bounds(number)
            block = bytearray(stop - start)
            self._file.read_into(start, memoryview(block))
            self._check(row, number, memoryview(block))
            found = self._cache[row.start, number] = bytes(block)
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return found

    def _check(self, row: BlockRow, number: int, block: memoryview) -> None:
        if xxhash.xxh3_64_intdigest(block) == self._digests[row.start][number]:
            return
        start, stop = row.bounds(number)
        where = []
        for name in row.names:
            span = self.parts[name]
            first, last = max(start, span.offset) - span.offset, min(stop, span.offset + span.nbytes) - span.offset
            if first < last:
                where.append(f"bytes {first} to {last} of {name!r}")
        raise damaged(self.path, f"{' and '.join(where)} have the wrong checksum")

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
