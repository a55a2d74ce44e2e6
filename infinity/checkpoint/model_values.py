"""The values of all parameters as tensors in memory, for state dicts: what trains as its fp32 master."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.checkpoint.agreement import Agreement, AllRanks, OneRank
from infinity.checkpoint.format import PARAMETER, listed
from infinity.checkpoint.given import given_tensors
from infinity.checkpoint.live import LiveTensors, read_dtype
from infinity.checkpoint.load import Source, fill_parameters, go_on, refuse_gathered, stand_still
from infinity.checkpoint.parts import parameter_names, persistent_buffers, state_names
from infinity.checkpoint.tiers import Tiers
from infinity.errors import ConfigError
from infinity.groups import FlatGroup
from infinity.iteration import Iteration
from infinity.runtime import Runtime
from infinity.updates import Updates

_BUFFER = "buffer"


def read_values(runtime: Runtime, live: LiveTensors, *, trains_only: bool = False) -> dict[str, torch.Tensor]:
    """Copies of every parameter and persistent buffer, named and ordered as in `model.state_dict()`, on the CPU.

    Args:
        trains_only: leave out frozen parameters.
    """
    owners, buffers = parameter_names(runtime.model), live.buffers()
    values = {name: live.tensor(name) for name in live.shapes if live.trains(name) or not trains_only}
    names = [name for name, _, _ in state_names(runtime.model)]
    every = {name: values.get(owners[name]) if name in owners else buffers[name] for name in names}
    return {name: value for name, value in every.items() if value is not None}


def write_values(
    runtime: Runtime,
    updates: Updates,
    iteration: Iteration,
    given: Mapping[str, torch.Tensor],
    ranks: AllRanks | None = None,
    *,
    from_first: bool = False,
) -> None:
    """Replace every parameter and persistent buffer; the optimizer's state stays. Everything is checked first.

    Args:
        ranks: of several ranks, which have met.
        from_first: the first rank gives what all ranks get.

    Raises:
        ConfigError: names or shapes are not those of the model.
        CheckpointError: parameters are in use; or it failed on another rank.
        IterationError: an update was lost, or the running step has been applied in part.
    """
    what = "replacing the parameters"
    agreement: Agreement = ranks or OneRank()
    names, buffers = parameter_names(runtime.model), persistent_buffers(runtime.model)
    with agreement.together(what):
        if agreement.member == 0 or not from_first:
            _check(runtime, names, buffers, given)
        updates.settle(what)
        iteration.reset()
        refuse_gathered(runtime)
    tensors = {(owner, PARAMETER): given[name] for name, owner in reversed(names.items()) if name in given}
    tensors |= {(name, _BUFFER): given[name] for name in buffers if name in given}
    dtypes = {(slot.name, PARAMETER): read_dtype(group) for group in runtime.groups for slot in group.layout.slots}
    dtypes |= {(name, _BUFFER): buffer.dtype for name, buffer in buffers.items()}
    with updates.consistency.replacing(what):
        with given_tensors(tensors, dtypes, ranks, what, from_first=from_first) as source, torch.no_grad():
            stand_still(runtime)
            with Tiers(runtime) as tiers:
                for group in runtime.groups:
                    _replace(runtime, tiers, group, source)
            for name, buffer in buffers.items():
                values = torch.empty(buffer.numel(), dtype=buffer.dtype)
                source.read(name, _BUFFER, 0, values)
                buffer.copy_(values.view(buffer.shape))
        go_on(runtime)


def _replace(runtime: Runtime, tiers: Tiers, group: FlatGroup, source: Source) -> None:
    for span in tiers.spans(group):
        values = tiers.read(span)
        fill_parameters(values, source)
        record, completes = span.record, runtime.kernel.completes_master
        tiers.write(values, state=record is not None and (record.is_initialised or completes))
        if record is not None and completes and span.stop == record.chunk.stop:
            record.is_initialised = True
    for span in tiers.copied_spans(group):
        values = tiers.blank(span)
        fill_parameters(values, source)
        tiers.write(values, state=False)


def _check(
    runtime: Runtime,
    names: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
) -> None:
    shapes = {slot.name: slot.shape for group in runtime.groups for slot in group.layout.slots}
    wanted = {owner: shapes[owner] for owner in names.values()}
    found = {names.get(name, name): tuple(tensor.shape) for name, tensor in given.items()}
    wanted |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        parts = [f"lacks {listed(missing)}"] if missing else []
        parts += [f"has {listed(unknown)}, which the model does not have"] if unknown else []
        raise ConfigError(f"the state dict {' and '.join(parts)}; give that of the same model")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{name!r} has shape {found[name]} in the state dict and {shape} in the model")
