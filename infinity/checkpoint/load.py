"""Loading: structure is checked first, then everything is streamed into the tiers, whatever their placement.

[Note: precisions meet in the master] What trains reads from a checkpoint as its fp32 master. An fp32 engine stores it
unchanged, a bf16 engine splits it into two halves; both lose nothing, so going from one precision to the other and back
gives the same bits (NaNs become one NaN). What is frozen is converted to the dtype in which this engine keeps it, which
rounds when that is the narrower one, as when the model was offloaded.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.checkpoint.agreement import Agreement, OneRank
from infinity.checkpoint.format import (
    GRADIENT,
    PARAMETER,
    DamagedCheckpointError,
    Index,
    ParameterEntry,
    listed,
)
from infinity.checkpoint.parts import (
    check_buffers,
    check_settings,
    load_buffers,
    read_extra,
    restore_settings,
)
from infinity.checkpoint.pending import load_gradients
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.rng import restore_rng_state
from infinity.checkpoint.save import Beside
from infinity.checkpoint.series import candidates
from infinity.checkpoint.tiers import CHECKPOINT_STEP, Tiers, Values, blank_moment
from infinity.errors import CheckpointError, CheckpointNotFoundError
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.iteration import Iteration
from infinity.layout import Slot
from infinity.observe.stalls import StallCause
from infinity.optim.hyper import Kernel
from infinity.optim.splitmaster import split_master
from infinity.residency import CopyState
from infinity.runtime import Runtime
from infinity.updates import Updates
from storage.types import Ticket

_log = logging.getLogger(__name__)


def load_checkpoint(
    runtime: Runtime,
    updates: Updates,
    iteration: Iteration,
    path: Path,
    beside: Beside,
    ranks: Agreement | None = None,
) -> dict[str, Any]:
    """Replace the whole state of an engine; see `Engine.load`.

    Args:
        ranks: of several ranks, which have met; every one reads what it holds.
    """
    ranks = ranks or OneRank()
    runtime.saver.settle()  # one of them may be what is to be loaded
    first: CheckpointError | None = None
    with ranks.together(f"loading {path}"):
        found = candidates(path)
    for folder in found:
        try:
            return _load(runtime, updates, iteration, folder, beside, ranks)
        except (DamagedCheckpointError, CheckpointNotFoundError) as error:
            first = first or error
            if folder != found[-1]:
                _log.warning("%s. The checkpoint before it is tried: %s", error, found[found.index(folder) + 1])
    if first is None or len(found) == 1:
        raise first or CheckpointError(f"there is no checkpoint at {path}")
    raise CheckpointError(f"no checkpoint of {path} can be loaded, of {len(found)}; the latest: {first}") from first


def _load(
    runtime: Runtime, updates: Updates, iteration: Iteration, folder: Path, beside: Beside, ranks: Agreement
) -> dict[str, Any]:
    what = f"loading {folder}"
    with ExitStack() as stack:
        with ranks.together(what):
            checkpoint = stack.enter_context(CheckpointReader(folder))
            content = _check(runtime, checkpoint, beside)
            updates.settle_to_load()
            iteration.reset()
            refuse_gathered(runtime)
        with updates.loading(what):
            with ranks.together(what):
                stand_still(runtime)
                renew_copies(runtime)
                with Tiers(runtime) as tiers:
                    for group in runtime.groups:
                        _load_group(runtime, tiers, group, checkpoint)
                load_buffers(runtime.model, folder)
            go_on(runtime)
        with ranks.together(what):
            load_gradients(runtime, updates, checkpoint)
        if beside.optimizer is not None:
            restore_settings(checkpoint.index.optimizer, beside.optimizer)
        for thing, state in ((beside.scheduler, content["scheduler"]), (beside.scaler, content["scaler"])):
            if thing is not None:
                thing.load_state_dict(state)
        if ranks.member < len(checkpoint.index.rng):  # what more ranks than saved it draw is theirs
            restore_rng_state(checkpoint.index.rng[ranks.member])
        extra: dict[str, Any] = content["extra"]
        return extra


# Checks: nothing has been changed yet ------------------------------------------------------------------------------


def _check(runtime: Runtime, checkpoint: CheckpointReader, beside: Beside) -> dict[str, Any]:
    index, folder = checkpoint.index, checkpoint.folder
    wanted = {slot.name: (group, slot) for group in runtime.groups for slot in group.layout.slots}
    _check_names(folder, wanted.keys(), index)
    for name, (group, slot) in wanted.items():
        _check_parameter(folder, group, slot, index.parameters[name], runtime.kernel.moments)
    checkpoint.check_structure()
    check_buffers(runtime.model, folder, index)
    if beside.optimizer is not None:
        check_settings(index.optimizer, beside.optimizer, runtime.groups)
    content = read_extra(folder)
    for name, thing in (("scheduler", beside.scheduler), ("scaler", beside.scaler)):
        if thing is not None and content.get(name) is None:
            raise CheckpointError(f"{folder} was saved without a {name}; load it without one")
    return {"extra": {}, "scheduler": None, "scaler": None, **content}


def _check_names(folder: Path, wanted: Iterable[str], index: Index) -> None:
    names = set(wanted)
    missing, unknown = sorted(names - index.parameters.keys()), sorted(index.parameters.keys() - names)
    if missing or unknown:
        details = f"it lacks {listed(missing)}" if missing else ""
        details += " and " if missing and unknown else ""
        details += f"it has {listed(unknown)}, which the model does not have" if unknown else ""
        raise CheckpointError(f"{folder} belongs to another model: {details}; build the model it was saved from")


def _check_parameter(folder: Path, group: FlatGroup, slot: Slot, entry: ParameterEntry, moments: Sequence[str]) -> None:
    if entry.shape != slot.shape:
        raise CheckpointError(
            f"{folder} belongs to another model: {slot.name!r} has shape {entry.shape} there and {slot.shape} here; "
            "build the model it was saved from"
        )
    dtype = getattr(torch, entry.dtype)
    if dtype is not group.shard_dtype and not (dtype.is_floating_point and group.shard_dtype.is_floating_point):
        raise CheckpointError(
            f"{folder}: {slot.name!r} is {entry.dtype} there and {group.shard_dtype} here, and only floating-point "
            "numbers are converted; build the model it was saved from"
        )
    if entry.moments != (set(moments) if entry.step else set()) and group.trainable:
        raise CheckpointError(
            f"{folder} has {listed(sorted(entry.moments)) or 'no state'} of {slot.name!r}, but "
            f"the optimizer here keeps {listed(moments) or 'none'}; build the optimizer that it was saved with"
        )
    if (entry.step or GRADIENT in entry.tensors) and not group.trainable:
        raise CheckpointError(
            f"{folder}: {slot.name!r} was trained there and is frozen here, so its optimizer state would be lost; "
            "freeze it after loading in a run of its own, or build the model as it was"
        )


def refuse_gathered(runtime: Runtime) -> None:
    """Refuse to replace parameters that somebody holds."""
    resident = {group.index for group in runtime.resident_groups}
    runtime.gatherer.drop_ahead(runtime.groups)
    runtime.gatherer.release_unviewed()
    if runtime.gatherer.kept:
        gc.collect()  # the frames of an exception hold its tensors until somebody looks for cycles
        runtime.gatherer.release_unviewed()
    held = [group.key for group in runtime.gatherer.gathered() if group.index not in resident]
    if held:
        raise CheckpointError(
            f"{listed(held)} is in use, so it cannot be replaced; load outside a forward and outside `gathered()`"
        )


# Moving the bytes --------------------------------------------------------------------------------------------------


def stand_still(runtime: Runtime) -> None:
    """Host copies of what is about to change go, and nothing is read ahead until the next forward."""
    ticket = runtime.io.submit(runtime.read_ahead.forget(), "dropping host copies")
    runtime.stalls.wait(ticket, StallCause.NVME_READ)


def renew_copies(runtime: Runtime) -> None:
    """Updates that were lost are forgotten, and what is in host memory for good has memory, whose bytes are replaced.

    Nothing may be in flight, and no copy held that is not there for good.
    """
    for copy in runtime.copies:
        copy.lost_update = None
        copy.update = Ticket.completed(copy.group.key)
        if copy.pinned and copy.state is CopyState.FAILED:
            copy.drop()
        if copy.pinned and copy.state is CopyState.ABSENT:
            copy.begin_read(HostBlock(runtime.pool.lease(copy.group.shard_nbytes, copy.group.key)), copy.update)
            copy.landed()


def go_on(runtime: Runtime) -> None:
    """What is always there is read again: parameters on the device, and copies kept from step to step."""
    for group in runtime.resident_groups:
        runtime.gatherer.refresh(group)
    runtime.io.post(runtime.read_ahead.read_kept, CHECKPOINT_STEP)


def _load_group(runtime: Runtime, tiers: Tiers, group: FlatGroup, checkpoint: CheckpointReader) -> None:
    state = runtime.states.get(group.index)
    steps = [checkpoint.entry(slot.name).step for slot in group.layout.slots]
    for span in tiers.spans(group):
        values = tiers.blank(span)
        if span.record is not None:
            # State that is zero need not be written: records are born zero. Low halves are rarely all zero.
            used = any(steps[piece.slot] for piece in span.record.chunk.pieces)
            span.record.is_initialised = used or runtime.kernel.completes_master
        fill_parameters(values, checkpoint)
        if span.record is not None:
            _fill_moments(values, runtime.kernel, steps, checkpoint)
        tiers.write(values, state=span.record is not None and span.record.is_initialised)
    for span in tiers.copied_spans(group):
        values = tiers.blank(span)
        fill_parameters(values, checkpoint)
        tiers.write(values, state=False)
    if state is not None:
        state.steps[:] = steps


class Source(Protocol):
    """Gives elements of tensors by parameter name: a `CheckpointReader`."""

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None: ...


def fill_parameters(values: Values, source: Source) -> None:
    """Make the parameters of a span those of a source, with the rest of their master."""
    span, group = values.span, values.span.group
    low, whole = values.state.get("low"), values.state.get("master")
    # See [Note: precisions meet in the master].
    is_split = group.trainable and group.shard_dtype is torch.bfloat16
    master = whole if whole is not None else torch.zeros(span.numel) if is_split else values.param
    with torch.no_grad():
        for number, first, last, start in span.pieces():
            slot = group.layout.slots[number]
            source.read(slot.name, PARAMETER, start, master[first:last])
        if is_split:
            high, rest = split_master(master)
            values.param.copy_(high)
            if low is not None:
                low.copy_(rest)
        if whole is not None:
            values.param.copy_(whole)


def _fill_moments(values: Values, kernel: Kernel, steps: list[int], checkpoint: CheckpointReader) -> None:
    """Moments of parameters that were updated; those of others are zero."""
    for moment in kernel.moments:
        new = blank_moment(values, moment)
        for number, first, last, start in values.span.pieces():
            if steps[number]:
                checkpoint.read(values.span.group.layout.slots[number].name, moment, start, new[first:last])
        kernel.encode(moment, new, values.state)
