"""Tensors on their way into files: what each is, and how to make any range of its elements."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.parts import write_synced
from infinity.checkpoint.tensor_file import TensorFileWriter
from infinity.checkpoint.writer import Fill
from infinity.weights.export_folder import ExportFolder, marked

CHUNK_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor that does not exist: its elements are made when they are written.

    Attributes:
        fill: makes elements, in `dtype`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: Fill

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: names of files, and bytes of tensors."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int


def write_safetensors(
    folder: Path,
    tensors: Sequence[Outgoing],
    *,
    stem: str = "model",
    shard_nbytes: int | None = None,
    beside: dict[str, bytes] | None = None,
    on_file: Callable[[str, int], None] | None = None,
) -> Written:
    """Write tensors to a folder that appears when it is complete. Memory: one chunk of elements.

    One file `<stem>.safetensors`, or `<stem>-00001-of-00009.safetensors` and so on with an index.

    Args:
        folder: must not be there, be empty, or hold an earlier export, which is replaced; files beside that are kept.
        stem: how names of files begin.
        shard_nbytes: most bytes of tensors in a file, but for a tensor that is larger by itself; None for one file.
        beside: other files, by name.
        on_file: told every file that is written, and its bytes of tensors.

    Raises:
        CheckpointError: something else is in the folder, or it cannot be written; nothing is left behind.
    """
    shards = _cut(tensors, shard_nbytes)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    index_name, beside = f"{stem}.safetensors.index.json", beside or {}
    own = names if len(shards) == 1 else [*names, index_name]
    metadata = marked([*own, *beside])
    there = ExportFolder(folder, own)
    with replaced_folder(folder, there.is_replaceable, kind="an export") as made:
        for name, shard in zip(names, shards, strict=True):
            _write_file(made / name, shard, metadata if name == names[0] else {})
            if on_file is not None:
                on_file(name, sum(tensor.nbytes for tensor in shard))
        if len(shards) > 1:
            weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
            write_synced(made / index_name, json.dumps(index, indent=2).encode())
        for name, data in beside.items():
            write_synced(made / name, data)
        there.keep_others(made)
    return Written(tuple(names), len(tensors), sum(tensor.nbytes for tensor in tensors))


def _cut(tensors: Sequence[Outgoing], shard_nbytes: int | None) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and shard_nbytes is not None and used + tensor.nbytes > shard_nbytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def _write_file(path: Path, tensors: Sequence[Outgoing], metadata: Mapping[str, str]) -> None:
    layout = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    with TensorFileWriter(path, layout, metadata={"format": "pt", **metadata}) as file:
        for tensor in tensors:
            buffer = torch.empty(min(CHUNK_NUMEL, tensor.numel), dtype=tensor.dtype)
            for start in range(0, tensor.numel, CHUNK_NUMEL):
                part = buffer[: min(CHUNK_NUMEL, tensor.numel - start)]
                tensor.fill(start, part)
                file.append(tensor.name, part)
        file.finish()
    forget_pages(path)


def forget_pages(path: Path) -> None:
    """Tell the system that nobody reads the file soon; others have a better use for the memory."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
