"""A safetensors file, written and read in pieces, so that no tensor has to be in memory whole.

The format: the length of the header (8 bytes, little endian), the header (JSON: name → dtype, shape, offsets), then the
tensors without gaps. What is written here is read by every safetensors library.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from infinity.checkpoint.format import damaged, unreadable
from infinity.errors import CheckpointError
from storage.closing import Closing
from storage.copying import read_some, write_all

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ALIGN_NBYTES = 8


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def refuse_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError for a dtype that the format does not have."""
    if dtype not in _CODES:
        raise CheckpointError(f"{name} is {dtype}, which safetensors files cannot hold")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, without a copy."""
    return tensor.detach().view(torch.uint8).numpy().data


class TensorFileWriter(Closing):
    """Writes tensors piece by piece; the pieces of one tensor come in order.

    Args:
        path: file to make.
        tensors: dtype and shape of every tensor, by name, in order.
        metadata: text by name, for the header.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header, self._spans = lay_out(tensors, metadata=metadata)
        self._ends = {name: span.offset for name, span in self._spans.items()}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(self._fd, memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def append(self, name: str, piece: torch.Tensor) -> None:
        """The next elements of tensor `name`: 1-D, on the CPU, contiguous, of its dtype."""
        if piece.numel() == 0:
            return
        data = bytes_of(piece)
        write_all(self._fd, data, self._ends[name])
        self._ends[name] += data.nbytes

    def finish(self) -> None:
        """Bring everything to the drive."""
        for name, span in self._spans.items():
            if self._ends[name] != span.offset + span.nbytes:
                raise CheckpointError(f"{name} was not written whole: this is a bug of infinity, please report it")
        os.fsync(self._fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    *,
    align_nbytes: int = _ALIGN_NBYTES,
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, TensorSpan]]:
    """The header, and where every tensor will lie in the file: the first one at a multiple of `align_nbytes`."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        refuse_dtype(name, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % align_nbytes)
    start = 8 + len(text)
    spans = {
        name: TensorSpan(dtype, tuple(shape), start + entries[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
    return struct.pack("<Q", len(text)) + text, spans


class TensorFileReader(Closing):
    """Reads pieces of tensors into given memory.

    Attributes:
        metadata: text by name, of the header.

    Raises:
        CheckpointError: the file is missing, truncated, or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, str] = {}
        try:
            # The library checks that the header is sound and that the file has exactly the bytes it promises.
            with safe_open(path, framework="pt"):
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise damaged(path, "the file is missing") from error
        except SafetensorError as error:
            raise damaged(path, str(error)) from error
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            self.spans = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, TensorSpan]:
        (length,) = struct.unpack("<Q", self.read_bytes(0, 8))
        entries = json.loads(self.read_bytes(8, length))
        spans = {}
        for name, entry in entries.items():
            if name == "__metadata__":
                self.metadata = entry
                continue
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"{self.path}: {name} is {entry['dtype']}, which is not supported")
            offset = 8 + length + entry["data_offsets"][0]
            spans[name] = TensorSpan(_DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
        return spans

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D, CPU, contiguous, the tensor's dtype) from element `start` on."""
        span = self.spans[name]
        self.read_into(span.offset + start * span.dtype.itemsize, bytes_of(into))

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file from an offset on."""
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` from an offset of the file on.

        Raises:
            CheckpointError: the file ends before that, or cannot be read.
        """
        read_all(self.fd, memory, offset, self.path)

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def read_all(fd: int, memory: memoryview, offset: int, path: Path) -> None:
    """Fill `memory` from a file.

    Raises:
        CheckpointError: the file ends before that, or cannot be read.
    """
    while memory:
        try:
            count = read_some(fd, memory, offset)
        except OSError as error:
            raise unreadable(path, error, f" at offset {offset}") from error
        if count == 0:
            raise damaged(path, f"it ends at offset {offset}")
        memory, offset = memory[count:], offset + count
