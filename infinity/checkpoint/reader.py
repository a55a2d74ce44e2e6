"""Reading a checkpoint by parameter name: the one way in, for loading, export, verification and other tools."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path

import torch

from infinity.checkpoint.format import (
    PARAMETER,
    Index,
    ParameterEntry,
    Piece,
    checksum_of_file,
    damaged,
    read_index,
)
from infinity.checkpoint.part_reader import PartFileReader, refuse_other_size
from infinity.errors import CheckpointError
from infinity.optim.moments import BLOCK_NUMEL, decode_codes
from infinity.optim.splitmaster import join_master
from storage.closing import Closing

_OPEN_FILES = 8


class CheckpointReader(Closing):
    """Gives elements of any tensor of a checkpoint, each block of them checked against its checksum.

    Memory: what is asked for, and some blocks of 256 KiB. Not thread safe; a context manager.

    Args:
        folder: a checkpoint folder.
        index: its index, if it has been read already.

    Raises:
        CheckpointError: there is no checkpoint, its index is damaged, or it has another version.
    """

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = index if index is not None else read_index(folder)
        self._files: OrderedDict[str, PartFileReader] = OrderedDict()

    def entry(self, name: str) -> ParameterEntry:
        """What the index says of a parameter.

        Raises:
            CheckpointError: there is none of this name.
        """
        try:
            return self.index.parameters[name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no parameter {name!r}") from None

    def dtype(self, name: str, kind: str = PARAMETER) -> torch.dtype:
        """The dtype in which a tensor reads without conversion: of the parameter, or fp32."""
        return _dtype_of(self.entry(name).dtype) if kind == PARAMETER else torch.float32

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` with elements of a flattened tensor, from `start` on; in another dtype they are converted.

        Args:
            kind: "parameter", a moment such as "exp_avg", or "gradient".
            into: 1-D, contiguous, on the CPU.

        Raises:
            CheckpointError: there is no such tensor, it has no such elements, or they are not what was written.
        """
        entry = self.entry(name)
        if kind not in entry.tensors and into.numel():
            raise CheckpointError(f"{self.folder} has no {kind!r} of {name!r}; it has {', '.join(entry.tensors)}")
        stop, numel = start + into.numel(), math.prod(entry.shape)
        if start < 0 or stop > numel:
            raise CheckpointError(
                f"elements {start} to {stop} of {kind!r} of {name!r} were asked for, which has {numel} of them: 0 to "
                f"{numel}"
            )
        at = start
        for piece in entry.tensors.get(kind, ()):
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first < last:
                if first != at:
                    break
                self._read_piece(kind, piece, first - piece.start, into[first - start : last - start])
                at = last
        if at != stop:
            raise damaged(self.folder, f"{kind} of {name!r} lacks elements {at} to {stop}")

    def tensor(self, name: str, kind: str = PARAMETER) -> torch.Tensor:
        """A whole tensor, in its own dtype. All of it is in memory then."""
        tensor = torch.empty(self.entry(name).shape, dtype=self.dtype(name, kind))
        self.read(name, kind, 0, tensor.view(-1))
        return tensor

    def check_structure(self) -> None:
        """Check that the files are there and complete and that every tensor is, without reading what is in them.

        Small files are read. Raises CheckpointError.
        """
        for name, entry in self.index.files.items():
            if entry.digests:
                self._open(name)
                continue
            refuse_other_size(self.folder / name, entry)
            if checksum_of_file(self.folder / name) != entry.checksum:
                raise damaged(self.folder / name, "its checksum is wrong")
        for name, parameter in self.index.parameters.items():
            for kind, pieces in parameter.tensors.items():
                self._check_pieces(name, kind, math.prod(parameter.shape), pieces)

    def verify(self) -> int:
        """Check everything, byte by byte; how many bytes of tensors there are. Raises CheckpointError."""
        self.check_structure()
        return sum(self._open(name).verify() for name, entry in self.index.files.items() if entry.digests)

    def close(self) -> None:
        """Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    # Parts -----------------------------------------------------------------------------------------------------

    def _read_piece(self, kind: str, piece: Piece, skip: int, into: torch.Tensor) -> None:
        """Elements of a piece from its element `skip` on."""
        file = self._open(piece.file)
        if piece.tensor not in file.parts:
            raise damaged(file.path, f"{piece.tensor!r} is not in it")
        dtype = file.parts[piece.tensor].dtype
        if not piece.low and dtype is into.dtype:
            file.read(piece.tensor, piece.at + skip, into)
            return
        values = torch.empty(into.numel(), dtype=dtype)
        file.read(piece.tensor, piece.at + skip, values)
        if piece.low:
            low = torch.empty(into.numel(), dtype=torch.int16)
            file.read(piece.low, piece.low_at + skip, low)
            values = join_master(values, low)
        if piece.scales:
            values = decode_codes(kind, values, self._scales_of(file, piece, skip, into.numel()))
        with torch.no_grad():
            into.copy_(values)

    def _scales_of(self, file: PartFileReader, piece: Piece, skip: int, numel: int) -> torch.Tensor:
        """The scale of each of `numel` elements of a piece from its element `skip` on."""
        blocks = (torch.arange(numel) + skip + piece.at % BLOCK_NUMEL) // BLOCK_NUMEL
        first = int(blocks[0])
        scales = torch.empty(int(blocks[-1]) - first + 1)
        file.read(piece.scales, piece.scales_at + first, scales)
        return scales[blocks - first]

    def _check_pieces(self, name: str, kind: str, numel: int, pieces: tuple[Piece, ...]) -> None:
        at = 0
        for piece in pieces:
            if piece.start != at or piece.numel <= 0 or piece.file not in self.index.files:
                break
            spans = self._open(piece.file).parts
            blocks = -(-piece.numel // BLOCK_NUMEL)
            wanted = [(piece.tensor, piece.at, piece.numel), (piece.low, piece.low_at, piece.numel)]
            for tensor, place, length in (*wanted, (piece.scales, piece.scales_at, blocks)):
                span = spans.get(tensor)
                if tensor and (span is None or place < 0 or place + length > span.nbytes // span.dtype.itemsize):
                    raise damaged(self.folder / piece.file, f"{kind} of {name!r} is not what the index says")
            at = piece.stop
        if at != numel:
            raise damaged(self.folder, f"{kind} of {name!r} has {numel} elements, of which {at} are there")

    def _open(self, name: str) -> PartFileReader:
        """A file of shards; those used last stay open."""
        file = self._files.pop(name, None)
        if file is None:
            entry = self.index.files.get(name)
            if entry is None or not entry.digests:
                raise damaged(self.folder, f"{name!r} holds tensors, but its index does not say so")
            file = PartFileReader(self.folder / name, entry)
            if len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files[name] = file
        return file


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the checkpoint has parameters of dtype {name!r}, which this torch does not have")
    return found
