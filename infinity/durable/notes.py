"""What a commit notes beside the shards, and reading it again.

layout    what lies under which key: groups, slots, chunks, precision; the directories. Once per process
run       step counts, which records have been written, optimizer settings, random number generators
buffers   the model's persistent buffers
extra     what the caller gave to `engine.note`
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.format import OptimizerEntry
from infinity.errors import CheckpointError
from infinity.groups import FlatGroup
from infinity.optim.hyper import StateField, most_nbytes_per_element
from storage.manifest import MANIFEST_FILE, Manifest

LAYOUT, RUN, BUFFERS, EXTRA = "layout", "run", "buffers", "extra"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A parameter's place in the shard of its group; `offset` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as it lies in the swap files."""

    key: str
    trains: bool
    dtype: str
    numel: int
    slots: tuple[StoredSlot, ...]

    @classmethod
    def of(cls, group: FlatGroup) -> StoredGroup:
        slots = tuple(StoredSlot(slot.name, slot.shape, slot.offset) for slot in group.layout.slots)
        dtype = str(group.shard_dtype).removeprefix("torch.")
        return cls(group.key, group.trainable, dtype, group.layout.numel, slots)

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> StoredGroup:
        slots = tuple(StoredSlot(one["name"], tuple(one["shape"]), one["offset"]) for one in content["slots"])
        return cls(content["key"], content["trains"], content["dtype"], content["numel"], slots)


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """What lies where in a run's swap files.

    Attributes:
        chunk_numel: elements of a chunk; every chunk of a group that trains has a record of its state.
        fields: name and dtype of the parts of a record, in order.
        directories: of the run, in order, as its last process knew them.
        ranks: which part of it this is, of several ranks; "" with one.
    """

    precision: str
    chunk_numel: int
    fields: tuple[tuple[str, str], ...]
    groups: tuple[StoredGroup, ...]
    directories: tuple[str, ...]
    ranks: str = ""

    def chunk_nbytes(self, fields: Sequence[StateField]) -> int:
        """State of a chunk in bytes: the setting that gives chunks of the same length."""
        return self.chunk_numel * max(most_nbytes_per_element(fields), 1)

    @property
    def state_format(self) -> str:
        """The setting with which the moments are stored as they are."""
        return {"bfloat16": "bf16", "uint8": "int8"}.get(dict(self.fields).get("exp_avg", ""), "fp32")

    def to_bytes(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> StoredLayout:
        groups = [StoredGroup.parse(group) for group in content["groups"]]
        fields = tuple((str(name), str(dtype)) for name, dtype in content["fields"])
        directories, ranks = tuple(content["directories"]), content.get("ranks", "")
        return cls(content["precision"], content["chunk_numel"], fields, tuple(groups), directories, ranks)


@dataclass(frozen=True, slots=True)
class StoredState:
    """Small state of a run as of its last commit.

    Attributes:
        counts: by key of the group, how often each of its parameters has been updated.
        initialised: by key of the group, which of its records have been written.
        optimizer: its parameter groups; None when there was no optimizer yet.
        rng: state of the random number generators.
        is_noted: the loop gives an `extra` for every step, so no step is committed without.
        epoch: counts the changes of state that all ranks make together; see `infinity.durable.together`.
    """

    counts: dict[str, list[int]]
    initialised: dict[str, list[bool]]
    optimizer: list[OptimizerEntry] | None
    rng: dict[str, Any]
    is_noted: bool
    epoch: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> StoredState:
        groups = content["optimizer"]
        return cls(
            content["counts"],
            content["initialised"],
            None if groups is None else [OptimizerEntry(**group) for group in groups],
            content["rng"],
            content["is_noted"],
            content.get("epoch", 0),
        )


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run that can be continued: what its last commit noted.

    Attributes:
        path: the folder of the manifest, for messages.
        step: optimizer steps committed.
    """

    path: Path
    step: int
    layout: StoredLayout
    state: StoredState
    buffers: dict[str, torch.Tensor]
    extra: dict[str, Any]

    @property
    def is_untrained(self) -> bool:
        """Whether nothing would be lost with it: no step was made and no checkpoint loaded, which is an epoch too."""
        return self.step == 0 and self.state.epoch <= 1

    @classmethod
    def parse(cls, path: Path, step: int, notes: Mapping[str, bytes]) -> StoredRun:
        """What `Manifest.notes` gave.

        Raises:
            CheckpointError: it is of another version of infinity, or not of an engine.
        """
        try:
            layout = json.loads(notes[LAYOUT])
            if layout.pop("version") != _VERSION:
                raise CheckpointError(f"the run in {path} is of another version of infinity; continue it with that one")
            return cls(
                path,
                step,
                StoredLayout.parse(layout),
                StoredState.parse(json.loads(notes[RUN])),
                unpack(notes[BUFFERS]),
                unpack(notes[EXTRA]),
            )
        except (KeyError, TypeError, ValueError, pickle.UnpicklingError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not hold the run of an engine ({error!r}); give its folder") from error


def read_run(folder: Path) -> StoredRun | None:
    """The run whose shards lie in a folder `versioned-rank…`; None when none was ever committed there.

    The run may be going on: then this is its last commit.

    Raises:
        IntegrityError: the manifest is damaged.
        CheckpointError: it is of another version of infinity.
    """
    if not (folder / MANIFEST_FILE).exists():
        return None
    manifest = Manifest(folder / MANIFEST_FILE, None)
    try:
        if not manifest.generation:
            return None
        return StoredRun.parse(folder, manifest.step, manifest.notes())
    finally:
        manifest.close()


def refuse_other_layout(run: StoredRun, layout: StoredLayout) -> None:
    """Check that an engine finds under its keys what it expects.

    Raises:
        CheckpointError: it was laid out differently; says where.
    """
    for what in ("ranks", "precision", "fields", "chunk_numel"):
        stored, now = getattr(run.layout, what), getattr(layout, what)
        if stored != now:
            raise CheckpointError(
                f"the run in {run.path} was laid out with {what} {stored!r}, this engine with {now!r}; continue it "
                "with the settings it was started with. Another build of infinity may choose others: then save a "
                "checkpoint there (engine.save), and load that here"
            )
    _refuse_other_groups(run, run.layout.groups, layout.groups)


def _refuse_other_groups(run: StoredRun, stored: Sequence[StoredGroup], now: Sequence[StoredGroup]) -> None:
    is_same_model = _shapes(stored) == _shapes(now)
    for one, other in zip(stored, now, strict=False):
        if one != other and is_same_model:
            raise CheckpointError(
                f"the run in {run.path} has the parameters of this model in other groups: {_describe(one)} where this "
                f"engine has {_describe(other)}. It was started with other settings (unit_classes, wrap_policy, "
                "resident_threshold, frozen parameters), or by another build of infinity; continue it with those, save "
                "a checkpoint there (engine.save), and load that here: checkpoints fit all settings and builds"
            )
        if one != other:
            raise CheckpointError(
                f"the run in {run.path} belongs to another model or to other settings (unit_classes, wrap_policy, "
                f"resident_threshold, frozen parameters): it has {_describe(one)} where this one has "
                f"{_describe(other)}; build the model it was started with"
            )
    if len(stored) != len(now):
        raise CheckpointError(
            f"the run in {run.path} belongs to another model: it has {len(stored)} groups of parameters and this one "
            f"{len(now)}; build the model it was started with"
        )


def _shapes(groups: Sequence[StoredGroup]) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for group in groups for slot in group.slots}


def _describe(group: StoredGroup) -> str:
    first = f", first {group.slots[0].name!r} {group.slots[0].shape}" if group.slots else ""
    return f"{group.key} ({len(group.slots)} parameters, {group.numel} elements{first})"


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Copies of tensors, on the CPU, as bytes."""
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
    return file.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """A dictionary that was packed with `torch.save`."""
    return dict(torch.load(io.BytesIO(data), weights_only=True, map_location="cpu"))
