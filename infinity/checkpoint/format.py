"""What a checkpoint folder holds; docs/checkpoint-format.md describes it for other programs.

    checkpoint.json                    the index: what every parameter is and where its elements lie; optimizer; RNG
    group-00000.rank0.safetensors      shards of one group of the run that saved it, as one rank held them
    gradients.rank0.safetensors        gradients that no step had used yet, if there were any
    buffers.safetensors                the model's persistent buffers
    config.json, ...                   what a model of transformers says about itself (see `description`)
    extra.pt                           scheduler, loss scaler, and what the caller gave as `extra`

[Note: checkpoint by name] The index tells by parameter name in which pieces of which files its elements lie. So the
shards can be stored as they lay in the swap files, without converting a byte, and loading depends on nothing but the
names: budgets, placement, chunks, schedule, precision and number of ranks may all be others. What trains reads as its
fp32 master, together with the optimizer's moments unless it was never updated; what is frozen in its own dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from infinity.checkpoint.folder import before_of
from infinity.errors import CheckpointError, CheckpointNotFoundError
from storage.durable import DURABLE_PREFIX, durable_folder

VERSION = 3
_READ_VERSIONS = (2, 3)  # 2 has no rows of joined tensors (see `block_rows`)
INDEX_FILE = "checkpoint.json"
BUFFERS_FILE = "buffers.safetensors"
EXTRA_FILE = "extra.pt"
PARAMETER = "parameter"
GRADIENT = "gradient"
_KIND = "infinity checkpoint"


def group_file(number: int, rank: int = 0) -> str:
    return f"group-{number:05d}.rank{rank}.safetensors"


def gradients_file(rank: int = 0) -> str:
    return f"gradients.rank{rank}.safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `start + numel` of a flattened tensor: where they are stored.

    Attributes:
        file, tensor: which tensor of which safetensors file.
        at: the first element there.
        low, low_at: the tensor of the same file with the lower halves, and the first element there. Then `tensor` has
            the upper halves (see [Note: split master]), and the value is both together, in fp32. "" without.
        scales, scales_at: the tensor of the same file with the scales of 8-bit codes (see [Note: 8-bit codes]), and the
            one of the first element's block. "" without.
    """

    start: int
    numel: int
    file: str
    tensor: str
    at: int
    low: str = ""
    low_at: int = 0
    scales: str = ""
    scales_at: int = 0

    @property
    def stop(self) -> int:
        """The element of the parameter behind the last one of the piece."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter of a checkpoint.

    Attributes:
        dtype: of the parameter as it reads, named as in torch: "float32" for what trains.
        step: how often it has been updated.
        tensors: the pieces of its tensors, in order, by kind: "parameter", the moments, and "gradient" for one that no
            step has used. All but the parameter are fp32.
    """

    shape: tuple[int, ...]
    dtype: str
    trains: bool
    step: int
    tensors: dict[str, tuple[Piece, ...]]

    @property
    def moments(self) -> set[str]:
        """The kinds of optimizer state that are stored."""
        return self.tensors.keys() - {PARAMETER, GRADIENT}


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One parameter group of the optimizer: which parameters, and its settings (lr, betas, ...)."""

    parameters: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file beside the index.

    Attributes:
        checksum: xxh3 of its content; of its header alone if it has `digests`.
        digests: xxh3 of the tensor with the digests of its blocks (see `part_file`); "" for small files.
    """

    nbytes: int
    checksum: str
    digests: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """The content of `checkpoint.json`.

    Attributes:
        rng: the state of the generators of every rank that saved it.
        aliases: other names of parameters that are tied, and the name under which each is stored.
    """

    step: int
    precision: str
    parameters: dict[str, ParameterEntry]
    optimizer: list[OptimizerEntry] | None
    rng: list[dict[str, Any]]
    files: dict[str, FileEntry]
    written_by: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        """The JSON that `checkpoint.json` holds."""
        content = {"kind": _KIND, "version": VERSION, **asdict(self)}
        content = json.loads(json.dumps(content))  # as it will be read: tuples are lists
        return json.dumps({**content, "checksum": _checksum_of(content)}, indent=None, separators=(",", ":"))


def merged(parts: Sequence[Mapping[str, ParameterEntry]]) -> dict[str, ParameterEntry]:
    """The parameters of a checkpoint from what every rank has saved of them."""
    found: dict[str, ParameterEntry] = {}
    for part in parts:
        for name, entry in part.items():
            before = found.get(name)
            if before is None:
                found[name] = entry
                continue
            kinds = [*before.tensors, *(kind for kind in entry.tensors if kind not in before.tensors)]
            tensors = {
                kind: tuple(sorted((*before.tensors.get(kind, ()), *entry.tensors.get(kind, ())), key=_start))
                for kind in kinds
            }
            found[name] = ParameterEntry(
                before.shape, before.dtype, before.trains, max(before.step, entry.step), tensors
            )
    return found


def _start(piece: Piece) -> int:
    return piece.start


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointError: there is no checkpoint, its index is damaged, or it has another version.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_there(folder) from error
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise DamagedCheckpointError(
            f"{path} does not belong to a checkpoint of infinity; give the folder that save() made"
        )
    if content.get("version") not in _READ_VERSIONS:
        raise DamagedCheckpointError(
            f"{folder} is a checkpoint of version {content.get('version')!r}, this infinity reads version "
            f"{' and '.join(map(str, _READ_VERSIONS))}; "
            f"use the infinity that wrote it ({_named(content.get('written_by'))})"
        )
    expected = content.pop("checksum", None)
    if expected != _checksum_of(content):
        raise damaged(path, "its checksum is wrong")
    return _parse(path, content)


def _parse(path: Path, content: Mapping[str, Any]) -> Index:
    try:
        groups = content["optimizer"]
        return Index(
            step=content["step"],
            precision=content["precision"],
            parameters={name: parse_entry(entry) for name, entry in content["parameters"].items()},
            optimizer=None if groups is None else [OptimizerEntry(**group) for group in groups],
            rng=list(content["rng"]),
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            written_by=content["written_by"],
            aliases=content.get("aliases", {}),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"it does not have the expected content ({error!r})") from error


def parse_entry(entry: Mapping[str, Any]) -> ParameterEntry:
    """A parameter's entry as `asdict` gave it."""
    tensors = {kind: tuple(Piece(**piece) for piece in pieces) for kind, pieces in entry["tensors"].items()}
    return ParameterEntry(**{**entry, "shape": tuple(entry["shape"]), "tensors": tensors})


def _named(versions: object) -> str:
    """Who wrote a checkpoint, which may be of a version that says it in another way."""
    return ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else str(versions)


def _not_there(folder: Path) -> CheckpointError:
    before = before_of(folder)
    if (before / INDEX_FILE).exists():
        return DamagedCheckpointError(
            f"there is no checkpoint at {folder}, saving was interrupted; the one before is at {before}: use it"
        )
    if not folder.exists():
        return CheckpointNotFoundError(f"there is no checkpoint at {folder}: nothing is there; check the path")
    return DamagedCheckpointError(_why_none(folder))


def _why_none(folder: Path) -> str:
    """What is in a folder that is no checkpoint."""
    if durable_folder(folder).is_dir() or folder.name.startswith(DURABLE_PREFIX):
        return (
            f"there is no checkpoint at {folder}: a run with durability='step' lies there. Continue it (resume=True, "
            "`infinity train --resume`); engine.save() then makes a checkpoint of it"
        )
    told = f"there is no checkpoint at {folder}: {INDEX_FILE} is missing; give the folder that save() made"
    if folder.is_file() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        told += (
            ". Weights alone are given as infinity.offload(..., weights=PATH); `infinity checkpoint import` makes a "
            "checkpoint of torch.save's files, with the optimizer's state"
        )
    return told


class DamagedCheckpointError(CheckpointError):
    """A checkpoint, or a part of it, is not what was written; another one may be."""


def damaged(path: Path, how: str) -> DamagedCheckpointError:
    """The error for a file that is not what was written."""
    return DamagedCheckpointError(f"{path} is damaged: {how}. Use another checkpoint, or another copy of this one")


def unreadable(path: Path, error: OSError, where: str = "") -> DamagedCheckpointError:
    """The error for a file that the system does not give."""
    return DamagedCheckpointError(f"{path} cannot be read{where}: {error.strerror or error}")


def listed(names: Iterable[str], most: int = 5) -> str:
    """Names for a message, not more than a few."""
    chosen = list(names)
    shown = ", ".join(map(repr, chosen[:most]))
    return shown + (f" and {len(chosen) - most} more" if len(chosen) > most else "")


def _checksum_of(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def checksum_of_file(path: Path) -> str:
    """xxh3 of a file's content. Raises CheckpointError if it cannot be read."""
    hasher = xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    except OSError as error:
        raise unreadable(path, error) from error
    return hasher.hexdigest()
