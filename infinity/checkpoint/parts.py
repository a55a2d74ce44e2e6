"""The parts of a checkpoint that are small: optimizer settings, buffers of the model, what the caller adds."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import __version__
from infinity.checkpoint.format import BUFFERS_FILE, EXTRA_FILE, Index, OptimizerEntry, damaged, listed
from infinity.checkpoint.tensor_file import TensorFileReader, TensorFileWriter
from infinity.errors import CheckpointError, ConfigError
from infinity.groups import FlatGroup
from infinity.released import ref_of
from infinity.territory import Territory

# Optimizer settings ----------------------------------------------------------------------------------------------


def optimizer_entries(optimizer: torch.optim.Optimizer, groups: Iterable[FlatGroup]) -> list[OptimizerEntry]:
    """The parameter groups of an optimizer over these groups, by parameter name.

    Raises:
        ConfigError: the optimizer has parameters of something else.
        CheckpointError: a setting cannot be written as JSON.
    """
    mine = {id(group) for group in groups}
    entries = []
    for param_group in optimizer.param_groups:
        refs = [ref_of(parameter) for parameter in param_group["params"]]
        names = [ref.name for ref in refs if ref is not None and id(ref.group) in mine]
        if len(names) != len(refs):
            raise ConfigError("the optimizer has parameters that are not offloaded by this engine; give its own")
        settings = {key: plain_setting(key, value) for key, value in param_group.items() if key != "params"}
        entries.append(OptimizerEntry(names, settings))
    return entries


def plain_setting(key: str, value: object) -> object:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    try:
        json.dumps(value)
    except TypeError as error:
        raise CheckpointError(
            f"the optimizer's setting {key!r} is {value!r}, which a checkpoint cannot hold ({error}); use numbers, "
            "text, lists or dictionaries"
        ) from error
    return value


def check_settings(
    entries: list[OptimizerEntry] | None, optimizer: torch.optim.Optimizer, groups: Iterable[FlatGroup]
) -> None:
    """Refuse an optimizer whose parameter groups are not those that were saved."""
    if entries is None:
        raise CheckpointError("the checkpoint was saved without an optimizer; load it without one")
    present = optimizer_entries(optimizer, groups)
    if len(present) != len(entries):
        raise CheckpointError(
            f"the optimizer has {len(present)} parameter groups, the one of the checkpoint {len(entries)}; "
            "build it with the same groups"
        )
    for number, (now, saved) in enumerate(zip(present, entries, strict=True)):
        different = sorted(set(now.parameters) ^ set(saved.parameters))
        if different:
            raise CheckpointError(
                f"parameter group {number} of the optimizer does not hold what it held in the checkpoint: "
                f"{listed(different)} in only one of them; build it with the same groups"
            )


def restore_settings(entries: list[OptimizerEntry] | None, optimizer: torch.optim.Optimizer) -> None:
    """Give the parameter groups of a checked optimizer the settings that were saved."""
    for param_group, saved in zip(optimizer.param_groups, entries or [], strict=True):
        for key, value in saved.settings.items():
            present = param_group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:  # JSON knows no tuples
                param_group[key] = tuple(value) if isinstance(present, tuple) else value


# Buffers ---------------------------------------------------------------------------------------------------------


def copy_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the persistent buffers, on the CPU."""
    return {
        name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in persistent_buffers(model).items()
    }


def save_buffers(buffers: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write copied buffers; no file if there are none."""
    if not buffers:
        return
    with TensorFileWriter(folder / BUFFERS_FILE, {name: (b.dtype, b.shape) for name, b in buffers.items()}) as file:
        for name, buffer in buffers.items():
            file.append(name, buffer.reshape(-1))
        file.finish()


def load_buffers(model: nn.Module, folder: Path) -> None:
    """Copy checked buffers into the model."""
    buffers = persistent_buffers(model)
    if not buffers:
        return
    with TensorFileReader(folder / BUFFERS_FILE) as file, torch.no_grad():
        for name, buffer in buffers.items():
            values = torch.empty(buffer.numel(), dtype=buffer.dtype)
            file.read(name, 0, values)
            buffer.copy_(values.view(buffer.shape))


def saved_buffers(folder: Path) -> dict[str, torch.Tensor]:
    """The buffers of a checkpoint; none if it has none."""
    found: dict[str, torch.Tensor] = {}
    if (folder / BUFFERS_FILE).exists():
        with TensorFileReader(folder / BUFFERS_FILE) as file:
            for name, span in file.spans.items():
                found[name] = torch.empty(span.shape, dtype=span.dtype)
                file.read(name, 0, found[name].view(-1))
    return found


def check_buffers(model: nn.Module, folder: Path, index: Index) -> None:
    """Refuse buffers that are not those of the model."""
    wanted = {name: (b.dtype, tuple(b.shape)) for name, b in persistent_buffers(model).items()}
    saved: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if BUFFERS_FILE in index.files:
        with TensorFileReader(folder / BUFFERS_FILE) as file:
            saved = {name: (span.dtype, span.shape) for name, span in file.spans.items()}
    different = sorted(name for name in wanted.keys() | saved.keys() if wanted.get(name) != saved.get(name))
    if different:
        raise CheckpointError(
            f"{folder} belongs to another model: its buffers differ in {listed(different)}; build the model it was "
            "saved from"
        )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in Territory(model).named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def state_names(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every name that `model.state_dict()` has, in its order, with the module and attribute behind it."""
    for prefix, module in Territory(model).named_modules(remove_duplicate=False):
        for attribute, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None and attribute not in module._non_persistent_buffers_set:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, attribute


def parameter_names(model: nn.Module) -> dict[str, str]:
    """By name in `model.state_dict()`, the name of the offloaded parameter behind it; tied ones have several."""
    found = {}
    for name, module, attribute in state_names(model):
        ref = ref_of(getattr(module, attribute)) if attribute in module._parameters else None
        if ref is not None:
            found[name] = ref.name
    return found


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, and the name that each has in checkpoints."""
    return {name: owner for name, owner in parameter_names(model).items() if name != owner}


# What the caller adds --------------------------------------------------------------------------------------------


def pack_extra(extra: Mapping[str, Any] | None) -> bytes:
    """The caller's dictionary as bytes that can be read again without running code from the file.

    Raises:
        CheckpointError: something in it cannot.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(extra or {}), file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`extra` holds something a checkpoint cannot hold ({error}); give numbers, text, tensors, and lists, "
            "tuples and dictionaries of them, such as a scheduler's state_dict()"
        ) from error
    return file.getvalue()


def read_extra(folder: Path) -> dict[str, Any]:
    path = folder / EXTRA_FILE
    try:
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except (OSError, pickle.UnpicklingError, RuntimeError, TypeError, ValueError, EOFError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error


# Files -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What writes a checkpoint, for its index."""
    return {"infinity": __version__, "torch": str(torch.__version__)}


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and bring it to the drive."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
