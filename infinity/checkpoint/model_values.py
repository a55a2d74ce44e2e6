"""The values of all parameters as tensors in memory, for state dicts: what trains as its fp32 master."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.checkpoint.format import listed
from infinity.checkpoint.load import fill_parameters, go_on, refuse_gathered, stand_still
from infinity.checkpoint.parts import copy_buffers, parameter_names, persistent_buffers, state_names
from infinity.checkpoint.tiers import Span, Tiers
from infinity.errors import ConfigError
from infinity.iteration import Iteration
from infinity.optim.splitmaster import join_master
from infinity.runtime import Runtime
from infinity.updates import Updates


def read_values(runtime: Runtime, updates: Updates) -> dict[str, torch.Tensor]:
    """Copies of every parameter and persistent buffer, named and ordered as in `model.state_dict()`, on the CPU.

    Raises:
        IterationError: an update was lost, or the running step has been applied in part.
    """
    updates.consistency.check()
    updates.settle("reading the parameters")
    values: dict[str, torch.Tensor] = {}
    with Tiers(runtime) as tiers:
        for group in runtime.groups:
            dtype = torch.float32 if group.trainable else group.shard_dtype
            for slot in group.layout.slots:
                values[slot.name] = torch.empty(slot.shape, dtype=dtype)
            for span in tiers.spans(group):
                master = _master(tiers, span)
                for number, first, last, start in span.pieces():
                    flat = values[group.layout.slots[number].name].view(-1)
                    flat[start : start + last - first].copy_(master[first:last])
    owners, buffers = parameter_names(runtime.model), copy_buffers(runtime.model)
    names = [name for name, _, _ in state_names(runtime.model)]
    return {name: values[owners[name]] if name in owners else buffers[name] for name in names}


def _master(tiers: Tiers, span: Span) -> torch.Tensor:
    values = tiers.read(span)
    low, whole = values.state.get("low"), values.state.get("master")
    if whole is not None:
        return whole
    return values.param if low is None else join_master(values.param, low)


class _Given:
    """A state dict as something to load from."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        into.copy_(self._tensors[name].detach().reshape(-1)[start : start + into.numel()])


def write_values(
    runtime: Runtime, updates: Updates, iteration: Iteration, given: Mapping[str, torch.Tensor]
) -> None:
    """Replace every parameter and persistent buffer; the optimizer's state stays. Everything is checked first.

    Raises:
        ConfigError: names or shapes are not those of the model.
        CheckpointError: parameters are in use.
        IterationError: an update was lost, or the running step has been applied in part.
    """
    names, buffers = parameter_names(runtime.model), persistent_buffers(runtime.model)
    _check(runtime, names, buffers, given)
    tensors = {owner: given[name] for name, owner in reversed(names.items()) if name in given}
    updates.settle("replacing the parameters")
    iteration.reset()
    refuse_gathered(runtime)
    with updates.consistency.replacing("replacing the parameters"):
        stand_still(runtime)
        with Tiers(runtime) as tiers:
            for group in runtime.groups:
                for span in tiers.spans(group):
                    values = tiers.read(span)
                    fill_parameters(values, _Given(tensors))
                    record, completes = span.record, runtime.kernel.completes_master
                    tiers.write(values, state=record is not None and (record.is_initialised or completes))
                    if record is not None and completes and span.stop == record.chunk.stop:
                        record.is_initialised = True
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(given[name])
        go_on(runtime)


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
