"""Writing a checkpoint that no engine holds: resharded ones, and those that come from elsewhere.

The tensors are made range by range (`Fill`) and stored in parts of a few MiB, so memory does not depend on their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.format import (
    BUFFERS_FILE,
    INDEX_FILE,
    FileEntry,
    Index,
    OptimizerEntry,
    ParameterEntry,
    Piece,
    checksum_of_file,
    group_file,
)
from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.parts import save_buffers, versions, write_synced
from infinity.checkpoint.tensor_file import bytes_of

PART_NUMEL = 2 << 20  # a multiple of the blocks that have a checksum each
DEFAULT_FILE_NBYTES = 4 << 30

Fill = Callable[[int, torch.Tensor], None]
"""Fills a 1-D contiguous CPU tensor with elements of a flattened tensor, from the given one on."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """One tensor of a parameter, in the dtype in which it is stored."""

    dtype: torch.dtype
    fill: Fill


@dataclass(frozen=True, slots=True)
class NewParameter:
    """A parameter of the new checkpoint; see `ParameterEntry`. What trains and all moments are fp32."""

    name: str
    shape: tuple[int, ...]
    trains: bool
    step: int
    tensors: Mapping[str, NewTensor]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class NewRest:
    """What else the new checkpoint holds; `small` are files by name, such as `extra.pt`; `aliases` as in `Index`."""

    step: int
    precision: str
    optimizer: list[OptimizerEntry] | None
    rng: list[dict[str, Any]]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    small: Mapping[str, bytes] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of one tensor, which becomes a tensor of a file."""

    parameter: NewParameter
    kind: str
    start: int
    numel: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.parameter.name}" + (f"@{self.start}" if self.start else "")

    @property
    def tensor(self) -> NewTensor:
        return self.parameter.tensors[self.kind]

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.dtype.itemsize


def write_checkpoint(
    path: Path,
    parameters: Sequence[NewParameter],
    rest: NewRest,
    *,
    file_nbytes: int = DEFAULT_FILE_NBYTES,
    on_file: Callable[[str, int], None] | None = None,
) -> None:
    """Write a checkpoint; the folder appears when it is complete, in place of a checkpoint that is there.

    Args:
        file_nbytes: most bytes of tensors in a file, but for one part that is larger by itself.
        on_file: told every file of tensors that is written, and its bytes.

    Raises:
        CheckpointError: `path` is something else, or cannot be written.
    """
    with replaced_folder(path, lambda there: (there / INDEX_FILE).exists()) as folder, torch.no_grad():
        files: dict[str, FileEntry] = {}
        pieces: dict[tuple[str, str], list[Piece]] = {}
        for number, parts in enumerate(_cut(_parts_of(parameters), file_nbytes)):
            name = group_file(number)
            files[name] = _write_parts(folder / name, parts)
            for part in parts:
                piece = Piece(part.start, part.numel, name, part.name, 0)
                pieces.setdefault((part.parameter.name, part.kind), []).append(piece)
            if on_file is not None:
                on_file(name, sum(part.nbytes for part in parts))
        save_buffers(rest.buffers, folder)
        for name, data in rest.small.items():
            write_synced(folder / name, data)
        for name in (BUFFERS_FILE, *rest.small):
            if (folder / name).exists():
                files[name] = FileEntry((folder / name).stat().st_size, checksum_of_file(folder / name))
        index = Index(
            step=rest.step,
            precision=rest.precision,
            parameters={parameter.name: _entry(parameter, pieces) for parameter in parameters},
            optimizer=rest.optimizer,
            rng=rest.rng,
            files=files,
            written_by=versions(),
            aliases=dict(rest.aliases),
        )
        write_synced(folder / INDEX_FILE, index.to_text().encode())


def _parts_of(parameters: Iterable[NewParameter]) -> Iterator[_Part]:
    for parameter in parameters:
        for kind in parameter.tensors:
            for start in range(0, parameter.numel, PART_NUMEL):
                yield _Part(parameter, kind, start, min(PART_NUMEL, parameter.numel - start))


def _cut(parts: Iterable[_Part], file_nbytes: int) -> Iterator[list[_Part]]:
    chosen: list[_Part] = []
    nbytes = 0
    for part in parts:
        if chosen and nbytes + part.nbytes > file_nbytes:
            yield chosen
            chosen, nbytes = [], 0
        chosen.append(part)
        nbytes += part.nbytes
    if chosen:
        yield chosen


def _write_parts(path: Path, parts: Sequence[_Part]) -> FileEntry:
    writer = PartFileWriter(path, {part.name: (part.tensor.dtype, (part.numel,)) for part in parts})
    for part in parts:
        values = torch.empty(part.numel, dtype=part.tensor.dtype)
        part.tensor.fill(part.start, values)
        writer.write(part.name, bytes_of(values))
    return writer.finish()


def _entry(parameter: NewParameter, pieces: Mapping[tuple[str, str], Sequence[Piece]]) -> ParameterEntry:
    dtype = next(tensor.dtype for kind, tensor in parameter.tensors.items() if kind == "parameter")
    tensors = {kind: tuple(pieces.get((parameter.name, kind), ())) for kind in parameter.tensors}
    return ParameterEntry(parameter.shape, str(dtype).removeprefix("torch."), parameter.trains, parameter.step, tensors)
