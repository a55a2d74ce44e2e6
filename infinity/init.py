"""Initial values: building a model without memory, and turning its parameters into shards unit by unit.

`empty_init` builds on the `meta` device. `fill_shards` then walks the modules in order, gives the parameters of one
group at a time real memory, lets the modules initialise themselves (or copies the values of an already built model),
converts to the stored dtype, writes the shard and gives the memory back; so a model never exists whole in memory.
Random numbers are drawn in module order, as ordinary construction draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.observe.stalls import StallCause
from infinity.rank_init import check_same_model, copy_span, share_buffers, share_shard
from infinity.runtime import Runtime
from storage.align import align_down
from storage.pool import Lease
from storage.types import Ticket, TrafficTag

INIT_STEP = -1
_CONVERT_NBYTES = 1 << 20
InitFn = Callable[[nn.Module], object]


@contextmanager
def empty_init() -> Iterator[None]:
    """Build modules without memory: their parameters are on the `meta` device until `infinity.offload` fills them.

    Example:
        with infinity.empty_init():
            model = MyModel()
    """
    with torch.device("meta"):
        yield


def _is_meta(group: FlatGroup) -> bool:
    """Whether any parameter of the group has no data yet."""
    held = [module._parameters[attribute] for owners in group.owners for module, attribute in owners[:1]]
    return any(parameter is not None and parameter.is_meta for parameter in held)


def _owner_ids(group: FlatGroup) -> set[int]:
    return {id(module) for owners in group.owners for module, _ in owners}


def _open_spans(model: nn.Module, groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """For every group, the positions of the first and the last module that own its parameters."""
    position = {id(module): number for number, module in enumerate(model.modules())}
    spans = []
    for group in groups:
        places = [position[owner] for owner in _owner_ids(group)]
        spans.append((min(places), max(places)))
    return spans


def staging_nbytes(model: nn.Module, groups: Sequence[FlatGroup]) -> int:
    """Host bytes that initialisation holds at most beside the shards placed in host memory."""
    shared = 2 * max((group.shard_nbytes for group in groups if group.sharding.size > 1), default=0)
    if not groups or not any(_is_meta(group) for group in groups):
        return max(shared, max((group.shard_nbytes for group in groups), default=0))
    spans = _open_spans(model, groups)
    sizes = [group.layout.numel * group.source_dtype.itemsize for group in groups]
    peak = 0
    for start, _ in spans:
        peak = max(peak, sum(n for (a, b), n in zip(spans, sizes, strict=True) if a <= start <= b))
    converted = [min(g.shard_nbytes, _CONVERT_NBYTES) for g in groups if g.shard_dtype is not g.source_dtype]
    return peak + max(shared, max(converted, default=0))


def fill_shards(runtime: Runtime, init_fn: InitFn | None, on_progress: Callable[[str], None] | None = None) -> None:
    """Give every group its initial shard and put the stand-ins in place.

    Args:
        init_fn: called with every module that owns parameters, in module order; None calls `reset_parameters()`.
        on_progress: told the key of every group that is done.

    Raises:
        UnsupportedModelError: parameters on `meta` that nothing initialises, or of which only some are on `meta`.
    """
    built = [group for group in runtime.groups if not _is_meta(group)]
    empty = [group for group in runtime.groups if _is_meta(group)]
    for group in empty:
        _refuse_half_built(group)
    if empty and init_fn is None:
        _refuse_uninitialised(empty)
    if runtime.lockstep is not None:
        check_same_model(runtime.lockstep, runtime.model, runtime.groups)
    for group in built:
        _adopt(runtime, group)
        _report(on_progress, group)
    if empty:
        _materialise(runtime, empty, init_fn, on_progress)
    if runtime.lockstep is not None:
        share_buffers(runtime.lockstep, runtime.model)


def leave_uninitialised(runtime: Runtime) -> None:
    """Put the stand-ins in place of parameters whose values the swap files hold already.

    Raises:
        UnsupportedModelError: a buffer was built on `meta`.
    """
    for module in runtime.model.modules():
        _materialise_buffers(module)
    for group in runtime.groups:
        group.show_released()


def _report(on_progress: Callable[[str], None] | None, group: FlatGroup) -> None:
    if on_progress is not None:
        on_progress(group.key)


def _sources(group: FlatGroup) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for owners in group.owners:
        module, attribute = owners[0]
        parameter = module._parameters[attribute]
        if parameter is None:
            raise UnsupportedModelError(f"parameter {attribute!r} of {type(module).__name__} disappeared")
        found.append(parameter)
    return found


def _refuse_half_built(group: FlatGroup) -> None:
    for slot, source in zip(group.layout.slots, _sources(group), strict=True):
        if not source.is_meta:
            raise UnsupportedModelError(
                f"parameter {slot.name!r} has data, but others of its unit are on the meta device; build the whole "
                "model under infinity.empty_init() or none of it"
            )


def _refuse_uninitialised(groups: Sequence[FlatGroup]) -> None:
    missing = [
        slot.name
        for group in groups
        for slot, owners in zip(group.layout.slots, group.owners, strict=True)
        if not any(_reset_of(module) is not None for module, _ in owners)
    ]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UnsupportedModelError(
            f"nothing initialises {shown}: the modules that own them have no reset_parameters(). Pass "
            "infinity.offload(..., init_fn=function), which is called with every module that owns parameters"
        )


def _adopt(runtime: Runtime, group: FlatGroup) -> None:
    """Copy the parameters of an already built model into the shard, then let the model forget them."""
    lease = _make_shard(runtime, group)
    group.take_over()
    group.show_released()
    _place(runtime, group, lease)


def _make_shard(runtime: Runtime, group: FlatGroup) -> Lease:
    """This rank's shard, made of the values that the modules hold; with several ranks, of those on the first one."""
    lease = runtime.pool.lease(group.shard_nbytes, group.key)
    shard = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.param_span.numel)
    if runtime.lockstep is not None:
        share_shard(runtime.lockstep, runtime.pool, group, _sources(group), shard)
    else:
        copy_span(group, _sources(group), group.param_span, shard)
    return lease


def _place(runtime: Runtime, group: FlatGroup, lease: Lease) -> None:
    """A complete shard in host memory goes where the placement wants it."""
    copy = runtime.copies[group.index]
    if copy.pinned:
        copy.begin_read(lease, None, Ticket.completed(group.key))
        copy.landed()
        if copy.is_stored:
            _write(runtime, group, lease.memory, 0, group.layout.payload_numel)
        return
    with lease:
        _write(runtime, group, lease.memory, 0, group.shard_payload_nbytes)


def _write(runtime: Runtime, group: FlatGroup, memory: memoryview, offset_nbytes: int, payload_nbytes: int) -> None:
    if runtime.store is None:
        raise UnsupportedModelError(f"{group.key} has no place in the swap files")
    ticket = runtime.store.submit_write(
        group.key,
        memory,
        offset=offset_nbytes,
        tag=TrafficTag("param", INIT_STEP),
        payload_nbytes=payload_nbytes,
    )
    runtime.stalls.wait(ticket, StallCause.NVME_WRITE)


class _Staging:
    """Real memory for the parameters of one group while its modules initialise them."""

    def __init__(self, runtime: Runtime, group: FlatGroup) -> None:
        self._runtime = runtime
        self.group = group
        self._lease = runtime.pool.lease(group.layout.numel * group.source_dtype.itemsize, f"staging of {group.key}")
        self._flat = torch.frombuffer(self._lease.memory, dtype=group.source_dtype, count=group.layout.numel)
        self._flat.zero_()
        for slot, owners in zip(group.layout.slots, group.owners, strict=True):
            view = self._flat[slot.offset : slot.stop].view(slot.shape)
            parameter = nn.Parameter(view, requires_grad=group.trainable)
            for module, attribute in owners:
                module._parameters[attribute] = parameter

    def close(self) -> None:
        """Convert, write, give the memory back."""
        group, runtime = self.group, self._runtime
        copy = runtime.copies[group.index]
        with self._lease, torch.no_grad():
            if runtime.lockstep is not None:
                _adopt(runtime, group)
                return
            group.show_released()
            if copy.pinned:
                lease = runtime.pool.lease(group.shard_nbytes, group.key)
                torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.layout.numel).copy_(self._flat)
                _place(runtime, group, lease)
            elif group.shard_dtype is group.source_dtype:
                _write(runtime, group, self._lease.memory, 0, group.shard_payload_nbytes)
            else:
                self._convert()
            del self._flat

    def _convert(self) -> None:
        group, runtime = self.group, self._runtime
        size = group.shard_dtype.itemsize
        numel = min(align_down(_CONVERT_NBYTES // size, 4096), group.layout.numel)
        with runtime.pool.lease(numel * size, f"conversion of {group.key}") as lease:
            part = torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=numel)
            for chunk in group.layout.cut(numel):
                part[: chunk.numel].copy_(self._flat[chunk.start : chunk.stop])
                memory = lease.memory[: chunk.numel * size]
                _write(runtime, group, memory, chunk.start * size, chunk.payload_numel * size)


def _materialise(
    runtime: Runtime,
    groups: Sequence[FlatGroup],
    init_fn: InitFn | None,
    on_progress: Callable[[str], None] | None,
) -> None:
    spans = _open_spans(runtime.model, groups)
    for group in groups:
        group.take_over()
    opened: dict[int, _Staging] = {}
    late: dict[int, list[nn.Module]] = {}  # modules that initialise themselves after the one in that position
    position_of = {id(module): position for position, module in enumerate(runtime.model.modules())}
    for position, module in enumerate(runtime.model.modules()):
        for group, (first, _) in zip(groups, spans, strict=True):
            if first == position:
                opened[group.index] = _Staging(runtime, group)
        if any(parameter is not None for parameter in module._parameters.values()):
            if init_fn is None and isinstance(module, nn.MultiheadAttention):
                late.setdefault(max(position_of[id(part)] for part in module.modules()), []).append(module)
            else:
                _initialise(module, init_fn)
        for finished in late.pop(position, ()):
            _initialise(finished, init_fn)
        _materialise_buffers(module)
        for group, (_, last) in zip(groups, spans, strict=True):
            if last == position:
                opened.pop(group.index).close()
                _report(on_progress, group)


def _initialise(module: nn.Module, init_fn: InitFn | None) -> None:
    if init_fn is not None:
        init_fn(module)
    elif (reset := _reset_of(module)) is not None:
        reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """How a module initialises what it owns. Attention does so under a name of its own, after its projection has."""
    is_attention = isinstance(module, nn.MultiheadAttention)
    reset = getattr(module, "_reset_parameters" if is_attention else "reset_parameters", None)
    return reset if callable(reset) else None


def _materialise_buffers(module: nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            raise UnsupportedModelError(
                f"buffer {name!r} of {type(module).__name__} was built on the meta device and its values are lost; "
                "create buffers with an explicit device='cpu', or build the model outside infinity.empty_init()"
            )
