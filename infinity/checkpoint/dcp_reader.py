"""Checkpoints as `torch.distributed.checkpoint` reads them: into plain modules, DTensors, or anything it can load into.

    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=InfinityReader("run/step100"))

What is offered is named as torch names what `get_state_dict` gives: `model.<name>` (also `<name>` alone) for parameters
and buffers, `optim.state.<name>.<moment>`, `optim.state.<name>.step`, `optim.param_groups.<k>.<setting>`. Settings that
only torch's optimizers have (`foreign`, `fused`, ...) are not: load an optimizer with
`planner=DefaultLoadPlanner(allow_partial_load=True)`, which leaves them as they are. Every rank reads what it holds.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from infinity.checkpoint.format import BUFFERS_FILE, PARAMETER, Index
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.series import candidates
from infinity.checkpoint.tensor_file import TensorFileReader
from storage.paths import StrPath

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups."
_STEP = "step"
_PIECE_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class _Offered:
    """A tensor: its dtype, its shape, and what fills a flat tensor with its elements from one on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, torch.Tensor], None]


class InfinityReader(StorageReader):
    """Reads a checkpoint of `Engine.save`.

    Args:
        path: a checkpoint, or the folder of a series, of which the latest is taken.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; what is read is checked block by block.
    """

    def __init__(self, path: StrPath) -> None:
        self._path = Path(path)
        self._reader: CheckpointReader | None = None
        self._offered: dict[str, _Offered] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Called by torch before every load."""
        self.close()
        if checkpoint_id:
            self._path = Path(checkpoint_id)

    def read_metadata(self, *unused: Any, **more: Any) -> Metadata:
        """What the checkpoint offers."""
        checkpoint = self._opened()
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, one in self._offered.items():
            size = torch.Size(one.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            described[name] = TensorStorageMetadata(TensorProperties(dtype=one.dtype), size, [whole])
        described |= dict.fromkeys(_settings(checkpoint.index), BytesStorageMetadata())
        return Metadata(described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *unused: Any, **more: Any) -> None:
        self._opened()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants."""
        try:
            settings = _settings(self._opened().index)
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(_packed(settings[name])))
                else:
                    target = planner.resolve_tensor(item).detach()
                    _read_box(self._offered[name], list(item.storage_offsets), list(item.lengths), 0, 0, target)
                    planner.commit_tensor(item, target)
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def close(self) -> None:
        """Idempotent."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # Parts -----------------------------------------------------------------------------------------------------

    def _opened(self) -> CheckpointReader:
        if self._reader is None:
            self._reader = CheckpointReader(candidates(self._path)[0])
            self._reader.check_structure()
            self._offered = _offered(self._reader)
        return self._reader


def _read_box(
    one: _Offered, offsets: Sequence[int], lengths: Sequence[int], dim: int, start: int, target: torch.Tensor
) -> None:
    """Fill `target` with the part of a tensor that dimensions from `dim` on span; their first element is `start`."""
    if any(offsets[dim + 1 :]) or list(lengths[dim + 1 :]) != list(one.shape[dim + 1 :]):
        row = math.prod(one.shape[dim + 1 :])
        for number in range(lengths[dim]):
            _read_box(one, offsets, lengths, dim + 1, start + (offsets[dim] + number) * row, target[number])
        return
    first = start + offsets[dim] * math.prod(one.shape[dim + 1 :]) if dim < len(lengths) else start
    values = target.view(-1) if _is_plain(target) else torch.empty(target.numel(), dtype=target.dtype)
    for at in range(0, values.numel(), _PIECE_NUMEL):
        one.read(first + at, values[at : at + _PIECE_NUMEL])
    if not _is_plain(target):
        with torch.no_grad():
            target.copy_(values.view(target.shape))


def _is_plain(target: torch.Tensor) -> bool:
    """Whether a tensor can be filled in place, as flat memory."""
    return target.device.type == "cpu" and target.is_contiguous()


def _offered(checkpoint: CheckpointReader) -> dict[str, _Offered]:
    found: dict[str, _Offered] = {}
    for name, entry in checkpoint.index.parameters.items():
        one = _Offered(checkpoint.dtype(name), entry.shape, _reads(checkpoint, name, PARAMETER))
        found[name] = found[MODEL + name] = one
        for moment in entry.moments:
            found[f"{STATE}{name}.{moment}"] = _Offered(torch.float32, entry.shape, _reads(checkpoint, name, moment))
        if entry.moments:
            found[f"{STATE}{name}.{_STEP}"] = _Offered(torch.float32, (), _gives(float(entry.step)))
    for alias, name in checkpoint.index.aliases.items():
        found[alias] = found[MODEL + alias] = found[name]
    if BUFFERS_FILE in checkpoint.index.files:
        with TensorFileReader(checkpoint.folder / BUFFERS_FILE) as file:
            for name, span in file.spans.items():
                one = _Offered(span.dtype, span.shape, _buffer(checkpoint, name))
                found[name] = found[MODEL + name] = one
    return found


def _reads(checkpoint: CheckpointReader, name: str, kind: str) -> Callable[[int, torch.Tensor], None]:
    return lambda start, into: checkpoint.read(name, kind, start, into)


def _gives(value: float) -> Callable[[int, torch.Tensor], None]:
    def fill(start: int, into: torch.Tensor) -> None:
        into.fill_(value)

    return fill


def _buffer(checkpoint: CheckpointReader, name: str) -> Callable[[int, torch.Tensor], None]:
    def fill(start: int, into: torch.Tensor) -> None:
        with TensorFileReader(checkpoint.folder / BUFFERS_FILE) as file:
            values = torch.empty(into.numel(), dtype=file.spans[name].dtype)
            file.read(name, start, values)
        into.copy_(values)

    return fill


def _settings(index: Index) -> dict[str, Any]:
    """The settings of the optimizer's parameter groups by the names under which torch looks for them."""
    found: dict[str, Any] = {}
    for number, group in enumerate(index.optimizer or []):
        for key, value in group.settings.items():  # JSON knows no tuples, which `betas` are
            found[f"{GROUPS}{number}.{key}"] = tuple(value) if isinstance(value, list) else value
        found[f"{GROUPS}{number}.params"] = list(group.parameters)
    return found


def _packed(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
