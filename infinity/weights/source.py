"""Files with weights, read piece by piece: safetensors, torch's own format, and checkpoints of infinity.

| given | read |
|---|---|
| a `.safetensors` file | it |
| a `.pt`, `.pth` or `.bin` file | it, memory-mapped, without running code from it |
| a folder | in this order: `checkpoint.json` (a checkpoint of infinity; of a series the newest), |
| | `model.safetensors`, its index, `pytorch_model.bin`, its index, all `*.safetensors` |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.checkpoint.format import BUFFERS_FILE, INDEX_FILE, PARAMETER, damaged
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.series import LATEST_FILE, candidates
from infinity.checkpoint.tensor_file import TensorFileReader
from infinity.errors import CheckpointError, CheckpointNotFoundError
from infinity.weights.torch_file import TorchFile
from infinity.weights.zero_checkpoint import is_zero_checkpoint
from storage.closing import Closing
from storage.paths import StrPath

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file says about one of its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()


class WeightsFile(Protocol):
    """One open file."""

    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor of the file."""

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D, CPU, contiguous, of the tensor's dtype) from element `start` on."""

    def close(self) -> None: ...


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._reader = TensorFileReader(path)

    def stored(self) -> Mapping[str, StoredTensor]:
        return {name: StoredTensor(span.dtype, span.shape) for name, span in self._reader.spans.items()}

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        self._reader.read(name, start, into)

    def close(self) -> None:
        self._reader.close()


class _StoredTorchFile:
    def __init__(self, path: Path) -> None:
        self._file = TorchFile(path)

    def stored(self) -> Mapping[str, StoredTensor]:
        return {name: StoredTensor(t.dtype, tuple(t.shape)) for name, t in self._file.tensors.items()}

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        self._file.fill(name, start, into)

    def close(self) -> None:
        self._file.close()


class _Checkpoint:
    """The parameters of a checkpoint of infinity; every block that is read is checked."""

    def __init__(self, folder: Path) -> None:
        self._reader = CheckpointReader(folder)

    def stored(self) -> Mapping[str, StoredTensor]:
        parameters = self._reader.index.parameters
        return {name: StoredTensor(self._reader.dtype(name), entry.shape) for name, entry in parameters.items()}

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        self._reader.read(name, PARAMETER, start, into)

    def close(self) -> None:
        self._reader.close()


class Weights(Closing):
    """The tensors of one or several files by name. A context manager.

    Attributes:
        path: what was given.
        tensors: every tensor, in the order of the files.
        read_nbytes: how many bytes of tensors have been read so far.
    """

    def __init__(self, path: Path, files: Sequence[tuple[Path, Mapping[str, str] | None]]) -> None:
        """Open the files.

        Args:
            files: with each, the tensors that are wanted of it as {name: name in the file}, or None for all.

        Raises:
            CheckpointError: a file is missing or damaged, lacks a tensor, or two files hold the same one.
        """
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.read_nbytes = 0
        self._homes: dict[str, tuple[WeightsFile, str]] = {}
        with ExitStack() as stack:
            for file_path, wanted in files:
                file = _open(file_path)
                stack.callback(file.close)
                self._take(file_path, file, wanted)
            self._files = stack.pop_all()

    def _take(self, path: Path, file: WeightsFile, wanted: Mapping[str, str] | None) -> None:
        stored = file.stored()
        for name, key in ({key: key for key in stored} if wanted is None else wanted).items():
            if key not in stored:
                raise damaged(path, f"it does not hold {key!r}, which belongs there")
            if name in self._homes:
                raise CheckpointError(f"{self.path}: {name!r} is in several files; keep one of them")
            self._homes[name] = file, key
            self.tensors[name] = stored[key]

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D, CPU, contiguous, of the tensor's dtype) from element `start` of a tensor on."""
        file, key = self._homes[name]
        file.fill(key, start, into)
        self.read_nbytes += into.numel() * into.element_size()

    def close(self) -> None:
        """Idempotent."""
        self._files.close()


def open_weights(path: StrPath) -> Weights:
    """Open a file with weights, or a folder of them; see the table of this module.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointError: damaged, or of no known kind.
    """
    path = Path(path)
    if path.is_dir():
        return Weights(path, _files_of(path))
    if not path.exists():
        raise CheckpointNotFoundError(f"there are no weights at {path}: nothing is there; check the path")
    if path.name.endswith(_INDEX_SUFFIX):
        return Weights(path, _indexed(path))
    return Weights(path, [(path, None)])


def _open(path: Path) -> WeightsFile:
    if path.name == INDEX_FILE:
        return _Checkpoint(path.parent)
    if path.suffix == _SAFETENSORS:
        return _SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return _StoredTorchFile(path)
    known = ", ".join((_SAFETENSORS, *TORCH_SUFFIXES))
    raise CheckpointError(f"{path} is no file with weights: its name should end in one of {known}")


def _files_of(folder: Path) -> list[tuple[Path, Mapping[str, str] | None]]:
    if (folder / LATEST_FILE).is_file() and not (folder / INDEX_FILE).exists():
        if is_zero_checkpoint(folder):
            raise CheckpointError(
                f"{folder} is of DeepSpeed; give what `infinity checkpoint import {folder} OUT` makes of it"
            )
        folder = candidates(folder)[0]
    if (folder / INDEX_FILE).exists():
        buffers = [(folder / BUFFERS_FILE, None)] if (folder / BUFFERS_FILE).exists() else []
        return [(folder / INDEX_FILE, None), *buffers]
    for name in _SINGLE:
        if (folder / name).exists():
            return [(folder / name, None)]
        if (folder / (name + _INDEX_SUFFIX)).exists():
            return _indexed(folder / (name + _INDEX_SUFFIX))
    found = sorted(folder.glob(f"*{_SAFETENSORS}"))
    if not found:
        looked_for = ", ".join((INDEX_FILE, *(f"{name}[{_INDEX_SUFFIX}]" for name in _SINGLE), f"*{_SAFETENSORS}"))
        raise CheckpointError(f"there are no weights in {folder}: it has none of {looked_for}; check the path")
    return [(path, None) for path in found]


def _indexed(index: Path) -> list[tuple[Path, Mapping[str, str] | None]]:
    """The files that an index names, with the tensors it says they hold."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        weight_map = {str(name): str(file) for name, file in content["weight_map"].items()}
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(index, f"it is not an index of weights ({error!r})") from error
    by_file: dict[str, dict[str, str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, {})[name] = name
    return [(index.parent / file, keys) for file, keys in by_file.items()]
