"""Shards and state of single parameters on their way from one layout to another, in a nameless temporary file.

What is stored is carried as it lies: the bits of the parameter shard and of every field of the optimizer's state.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from infinity.checkpoint.tensor_file import bytes_of
from infinity.errors import CheckpointError
from infinity.sizes import format_nbytes
from storage.closing import Closing

_Call = Callable[[int, memoryview, int], int]


@dataclass(frozen=True, slots=True)
class Load:
    """One tensor to carry, by a key of the caller's."""

    key: Hashable
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Carry(Closing):
    """A context manager; the file is gone when it is closed, or when the process ends.

    Args:
        folder: where the file lies.
        loads: everything that it has to hold.

    Raises:
        CheckpointError: the folder has no room for it.
    """

    def __init__(self, folder: Path, loads: Iterable[Load]) -> None:
        self._places: dict[Hashable, tuple[int, int]] = {}  # first byte and bytes per element
        nbytes = 0
        for load in loads:
            self._places[load.key] = nbytes, load.dtype.itemsize
            nbytes += load.nbytes
        self.nbytes = nbytes
        try:
            self._file = _make_file(folder, nbytes)
        except OSError as error:
            raise CheckpointError(
                f"{folder} has no room for {format_nbytes(nbytes)} ({nbytes} bytes), which a changed model needs for a "
                f"moment to move its state: {error.strerror or error}. Nothing has changed"
            ) from error

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    def write(self, key: Hashable, start: int, values: torch.Tensor) -> None:
        """Keep elements of a tensor, from `start` on.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        self._transfer(os.pwrite, key, start, values)

    def read(self, key: Hashable, start: int, into: torch.Tensor) -> None:
        """Fill `into` with elements of a tensor, from `start` on.

        Raises:
            CheckpointError: the disk fails.
        """
        self._transfer(lambda fd, memory, offset: os.preadv(fd, [memory], offset), key, start, into)

    def _transfer(self, call: _Call, key: Hashable, start: int, values: torch.Tensor) -> None:
        first, itemsize = self._places[key]
        offset, memory = first + start * itemsize, bytes_of(values)
        try:
            while memory:
                count = call(self._file.fileno(), memory, offset)
                if count == 0:
                    raise OSError("the temporary file ends too early")
                memory, offset = memory[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"moving the state of a changed model: {error.strerror or error}") from error

    def close(self) -> None:
        """Give the space of the file back. Idempotent."""
        self._file.close()


def _make_file(folder: Path, nbytes: int) -> IO[bytes]:
    with ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile(dir=folder))
        if nbytes and hasattr(os, "posix_fallocate"):  # elsewhere a full disk shows while writing
            os.posix_fallocate(file.fileno(), 0, nbytes)
        undo.pop_all()
    return file
