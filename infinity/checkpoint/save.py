"""Saving: group by group out of the tiers, into a folder that appears when it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.format import (
    BUFFERS_FILE,
    EXTRA_FILE,
    INDEX_FILE,
    PARAMETER,
    Index,
    ParameterEntry,
    checksum_of_file,
    group_file,
    tensor_key,
)
from infinity.checkpoint.parts import optimizer_entries, pack_extra, save_buffers, write_synced
from infinity.checkpoint.rng import rng_state
from infinity.checkpoint.tensor_file import TensorFileWriter
from infinity.checkpoint.tiers import Tiers, Values
from infinity.groups import FlatGroup
from infinity.optim.splitmaster import join_master
from infinity.runtime import Runtime
from infinity.updates import Updates


def save_checkpoint(
    runtime: Runtime,
    updates: Updates,
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """Write everything a run needs to go on; see `Engine.save`."""
    updates.consistency.check()
    updates.settle("saving")
    packed = pack_extra(extra)
    entries = optimizer_entries(optimizer, runtime.groups) if optimizer is not None else None
    with replaced_folder(path, lambda there: (there / INDEX_FILE).exists()) as folder:
        parameters: dict[str, ParameterEntry] = {}
        with Tiers(runtime) as tiers:
            for number, group in enumerate(runtime.groups):
                parameters |= _save_group(runtime, tiers, group, folder / group_file(number))
        save_buffers(runtime.model, folder)
        write_synced(folder / EXTRA_FILE, packed)
        small = [name for name in (BUFFERS_FILE, EXTRA_FILE) if (folder / name).exists()]
        index = Index(
            step=max((step for state in runtime.states.values() for step in state.steps), default=0),
            precision=runtime.config.precision.value,
            parameters=parameters,
            optimizer=entries,
            rng=rng_state(),
            files={name: checksum_of_file(folder / name) for name in small},
            written_by={"torch": str(torch.__version__)},
        )
        write_synced(folder / INDEX_FILE, index.to_text().encode())


def _save_group(runtime: Runtime, tiers: Tiers, group: FlatGroup, path: Path) -> dict[str, ParameterEntry]:
    """Stream one group into its file; what the index says about its parameters."""
    state = runtime.states.get(group.index)
    moments = runtime.kernel.moments
    steps = state.steps if state is not None else [0] * len(group.layout.slots)
    dtype = torch.float32 if group.trainable else group.shard_dtype
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for slot, step in zip(group.layout.slots, steps, strict=True):
        tensors[tensor_key(PARAMETER, slot.name)] = dtype, slot.shape
        if step:
            tensors |= {tensor_key(moment, slot.name): (torch.float32, slot.shape) for moment in moments}
    with TensorFileWriter(path, tensors) as file:
        for span in tiers.spans(group):
            values = tiers.read(span)
            master = master_of(values)
            for number, first, last, _ in span.pieces():
                name = group.layout.slots[number].name
                file.append(tensor_key(PARAMETER, name), master[first:last])
                if steps[number]:
                    for moment in moments:
                        file.append(tensor_key(moment, name), values.state[moment][first:last])
        checksums = file.finish()
    entries = {}
    for slot, step in zip(group.layout.slots, steps, strict=True):
        kinds = (PARAMETER, *moments) if step else (PARAMETER,)
        entries[slot.name] = ParameterEntry(
            file=path.name,
            shape=slot.shape,
            dtype=str(dtype).removeprefix("torch."),
            trains=group.trainable,
            step=step,
            checksums={kind: checksums[tensor_key(kind, slot.name)] for kind in kinds},
        )
    return entries


def master_of(values: Values) -> torch.Tensor:
    """The parameters of a span as they are stored in checkpoints: the fp32 master of what trains."""
    low, whole = values.state.get("low"), values.state.get("master")
    if whole is not None:
        return whole
    return values.param if low is None else join_master(values.param, low)
