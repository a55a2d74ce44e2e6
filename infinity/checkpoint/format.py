"""What a checkpoint folder holds.

    checkpoint.json            version, step, precision, what every parameter is and in which file; optimizer; RNG
    group-00000.safetensors    parameters of one group of the run that saved it, and their moments
    buffers.safetensors        the model's persistent buffers
    extra.pt                   what the caller gave as `extra`

[Note: checkpoint by name] Nothing in it depends on budgets, placement, chunks, schedule or precision of the run that
saved it. A parameter that trains is stored as its fp32 master under `parameter/<name>`, with the optimizer's moments
(for AdamW `exp_avg/<name>` and `exp_avg_sq/<name>`) in fp32 unless it was never updated; a frozen one is stored in the
dtype of its shard.

Every tensor and every small file has a checksum in `checkpoint.json`, which has one of itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from infinity.checkpoint.folder import before_of
from infinity.errors import CheckpointError

VERSION = 1
INDEX_FILE = "checkpoint.json"
BUFFERS_FILE = "buffers.safetensors"
EXTRA_FILE = "extra.pt"
PARAMETER = "parameter"
_KIND = "infinity checkpoint"


def group_file(number: int) -> str:
    return f"group-{number:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """Name of a tensor in a group's file; `kind` is "parameter" or one of the moments."""
    return f"{kind}/{name}"


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter of a checkpoint.

    Attributes:
        file: in which file its tensors are.
        dtype: of the stored parameter, named as in torch ("float32"); moments are always fp32.
        step: how often it has been updated.
        checksums: of its tensors, by kind ("parameter", "exp_avg", "exp_avg_sq"); which also says what is stored.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    trains: bool
    step: int
    checksums: dict[str, str]


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One parameter group of the optimizer: which parameters, and its settings (lr, betas, ...)."""

    parameters: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `checkpoint.json`. `files` has the checksums of the small files, `rng` the state of generators."""

    step: int
    precision: str
    parameters: dict[str, ParameterEntry]
    optimizer: list[OptimizerEntry] | None
    rng: dict[str, Any]
    files: dict[str, str]
    written_by: dict[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        content = {"kind": _KIND, "version": VERSION, **asdict(self)}
        return json.dumps({**content, "checksum": _checksum_of(content)}, indent=1)


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is no checkpoint, its index is damaged, or it has another version.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(_not_there(folder)) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise CheckpointError(f"{path} does not belong to a checkpoint of infinity; give the folder that save() made")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} is a checkpoint of version {content.get('version')!r}, this infinity reads version {VERSION}; "
            f"use the infinity that wrote it ({content.get('written_by')})"
        )
    expected = content.pop("checksum", None)
    if expected != _checksum_of(content):
        raise damaged(path, "its checksum is wrong")
    return _parse(path, content)


def _parse(path: Path, content: Mapping[str, Any]) -> Index:
    try:
        parameters = {
            name: ParameterEntry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in content["parameters"].items()
        }
        groups = content["optimizer"]
        return Index(
            step=content["step"],
            precision=content["precision"],
            parameters=parameters,
            optimizer=None if groups is None else [OptimizerEntry(**group) for group in groups],
            rng=content["rng"],
            files=content["files"],
            written_by=content["written_by"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it does not have the expected content ({error!r})") from error


def _not_there(folder: Path) -> str:
    before = before_of(folder)
    if (before / INDEX_FILE).exists():
        return f"there is no checkpoint at {folder}, saving was interrupted; the one before is at {before}: use it"
    if not folder.exists():
        return f"there is no checkpoint at {folder}: nothing is there; check the path"
    return f"there is no checkpoint at {folder}: {INDEX_FILE} is missing; give the folder that save() made"


def damaged(path: Path, how: str) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(f"{path} is damaged: {how}. Use another checkpoint, or another copy of this one")


def _checksum_of(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def checksum_of_file(path: Path) -> str:
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
