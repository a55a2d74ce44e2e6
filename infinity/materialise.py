"""Parameters on `meta` get their initial values, the groups of one stretch of modules at a time.

A group has real memory from the first step of the initialisation plan that fills it to the last one; then it is
converted, written and forgotten, so a model never exists whole in memory. What no step fills is found by its bytes:
fresh memory is all ones, which in floating point is a NaN that nothing computes; of integers every byte is 0x80.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup, Unit
from infinity.initialisers import InitFn, InitPlan, InitStep, plan_initialisation
from infinity.layout import FlatSpan
from infinity.placing import adopt, piece_numel, pieces_nbytes, place, sources_of, write, write_in_pieces
from infinity.runtime import Runtime
from infinity.staging import StagingMemory
from infinity.territory import Territory
from infinity.weights.match import Match
from infinity.weights.stream import read_into
from storage.align import PAGE_NBYTES, align_up

_CHECK_NUMEL = 1 << 20
_UNTOUCHED = 0xFF
_UNTOUCHED_INTEGER = 0x80
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class FirstValues:
    """Where the first values come from: from files what `match` says, else the model's own, else initialised.

    Attributes:
        init_fn: called with every module that owns parameters; None uses what the modules bring.
    """

    init_fn: InitFn | None = None
    match: Match | None = None

    def has(self, name: str) -> bool:
        """Whether files hold a parameter or buffer."""
        return self.match is not None and name in self.match.parts


def initialising_nbytes(
    model: nn.Module,
    units: Sequence[Unit],
    groups: Sequence[FlatGroup],
    values: FirstValues,
    counts: Callable[[int], bool] = lambda nbytes: True,
) -> int:
    """Bytes that initialising these groups holds at most.

    Args:
        counts: of a piece of memory, by its size, whether it counts.
    """
    plan = plan_initialisation(model, values.init_fn)
    spans = _spans(plan, units, groups)
    sizes = [group.layout.numel * group.source_dtype.itemsize for group in groups]
    sizes = [nbytes if counts(nbytes) else 0 for nbytes in sizes]
    peak = max((sum(n for (a, b), n in zip(spans, sizes, strict=True) if a <= at <= b) for at, _ in spans), default=0)
    needs = _Needs(plan, _owner_ids(groups), draws=values.match is None)
    return peak + max((_scratch_nbytes(step, counts) for step in plan.steps if needs.step(step)), default=0)


def _owner_ids(groups: Sequence[FlatGroup]) -> set[int]:
    return {id(module) for group in groups for owners in group.owners for module, _ in owners}


@dataclass(frozen=True, slots=True)
class _Needs:
    """Which steps are needed.

    Attributes:
        owned: ids of the modules that own parameters without values.
        draws: whether all of construction's random numbers are drawn; not where most values come from files.
    """

    plan: InitPlan
    owned: set[int]
    draws: bool

    def step(self, step: InitStep) -> bool:
        """Whether a step fills something that has no values, or draws the random numbers of those before it."""
        if step.is_drawn:
            return self.draws and bool(self.owned)
        inside = (part for module in step.touches for part in module.modules())
        if self.plan.reaches_down and any(id(part) in self.owned for part in inside):
            return True
        return any(id(module) in self.owned or _empty_buffers(module) for module in step.touches)


def _scratch_nbytes(step: InitStep, counts: Callable[[int], bool]) -> int:
    """Pages for each of the parameters that are lent to the modules at most."""
    sizes = [p.numel() * p.element_size() for m in step.touches for p in m.parameters(recurse=False)]
    return sum(align_up(nbytes, PAGE_NBYTES) for nbytes in sizes if counts(nbytes))


def _spans(plan: InitPlan, units: Sequence[Unit], groups: Sequence[FlatGroup]) -> list[tuple[int, int]]:
    """For every group, the numbers of the first and the last step that may fill it."""
    steps_of: dict[int, list[int]] = {}
    for number, step in enumerate(plan.steps):
        if not step.is_drawn:
            for module in step.touches:
                steps_of.setdefault(id(module), []).append(number)
    spans = []
    for group in groups:
        owners = {id(module) for owners in group.owners for module, _ in owners}
        mine = [unit.module for unit in units if unit.index in group.units]
        owners |= {id(module) for unit_module in mine for module in plan.last_reaching(unit_module)}
        numbers = [number for owner in owners for number in steps_of.get(owner, ())]
        spans.append((min(numbers, default=0), max(numbers, default=0)))
    return spans


def materialise(
    runtime: Runtime, groups: Sequence[FlatGroup], values: FirstValues, on_done: Callable[[FlatGroup], None]
) -> None:
    """Initialise groups on `meta`, and buffers of the model on `meta`; what files hold is read over it.

    Raises:
        UnsupportedModelError: it names what nothing initialises.
    """
    if groups or any(b.is_meta for _, b in Territory(runtime.model).named_buffers()):
        with torch.no_grad():
            _Materialiser(runtime, groups, values, on_done).run(plan_initialisation(runtime.model, values.init_fn))
    refuse_empty_buffers(runtime.model)


def refuse_empty_buffers(model: nn.Module) -> None:
    """Refuse buffers without values.

    Raises:
        UnsupportedModelError: it names the first one.
    """
    for module in Territory(model).modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise UnsupportedModelError(
                    f"buffer {name!r} of {type(module).__name__} was built on the meta device and its values are lost; "
                    "create buffers with an explicit device='cpu', or build the model outside infinity.empty_init()"
                )


class _Materialiser:
    def __init__(
        self,
        runtime: Runtime,
        groups: Sequence[FlatGroup],
        values: FirstValues,
        on_done: Callable[[FlatGroup], None],
    ) -> None:
        self._runtime = runtime
        self._groups = groups
        self._values = values
        self._on_done = on_done
        self._memory = StagingMemory(runtime)
        self._open: dict[int, GroupStaging] = {}
        self._is_tied_late = False
        # The generator's state before a module was made, by its id.
        self._drawn_from: dict[int, torch.Tensor] = {}

    def run(self, plan: InitPlan) -> None:
        # Models of transformers tie parameters when all are initialised, and keep the values of the first.
        self._is_tied_late = plan.reaches_down
        spans = _spans(plan, self._runtime.units, self._groups)
        needs = _Needs(plan, _owner_ids(self._groups), draws=self._values.match is None)
        for group in self._groups:
            group.take_over()
        for number, step in enumerate(plan.steps):
            for group, (first, _) in zip(self._groups, spans, strict=True):
                if first == number:
                    self._open[group.index] = GroupStaging(self._runtime, self._memory, group)
            if needs.step(step):
                self._draw(step) if step.is_drawn else self._initialise(step)
            for group, (_, last) in zip(self._groups, spans, strict=True):
                if last == number:
                    self._open.pop(group.index).close(self._values)
                    self._on_done(group)

    def _draw(self, step: InitStep) -> None:
        self._drawn_from[id(step.module)] = torch.get_rng_state()
        with scratch_parameters(self._memory, step.module):
            step.run()

    def _initialise(self, step: InitStep) -> None:
        empty = [(m, name, _give_memory(m, name, b)) for m in step.touches for name, b in _empty_buffers(m)]
        staged = {place: p for staging in self._open.values() for place, p in staging.places(first=self._is_tied_late)}
        with ExitStack() as stack:
            for module in step.touches:  # values that are in their place already are not overwritten
                kept = {attribute for owner, attribute in staged if owner == id(module)}
                stack.enter_context(scratch_parameters(self._memory, module, kept))
            step.run()
            mine = {attribute: p for (owner, attribute), p in staged.items() if owner == id(step.module)}
            left = {attribute: p for attribute, p in mine.items() if is_untouched(p)}
            if left and step.fallback is not None:
                self._fall_back(step.module, step.fallback, left)
        for module, name, memory in empty:
            buffer = module._buffers[name]
            if buffer is memory and is_untouched(memory):
                module._buffers[name] = memory.to("meta")

    def _fall_back(self, module: nn.Module, construct: Callable[[], object], left: Mapping[str, torch.Tensor]) -> None:
        """What the step left alone keeps the values with which the module was made."""
        present, before = torch.get_rng_state(), self._drawn_from.get(id(module))
        if before is not None:
            torch.set_rng_state(before)
        with scratch_parameters(self._memory, module):
            construct()
            for attribute, target in left.items():
                made = module._parameters[attribute]
                if made is not None:
                    target.copy_(made)
        if before is not None:
            torch.set_rng_state(present)


def _empty_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]


def _give_memory(module: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    mark_untouched(memory)
    module._buffers[name] = memory
    return memory


def mark_untouched(memory: torch.Tensor) -> None:
    """Fill a contiguous tensor with bytes by which `is_untouched` knows it."""
    byte = _UNTOUCHED if memory.is_floating_point() else _UNTOUCHED_INTEGER
    memory.view(-1).view(torch.uint8).fill_(byte)


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether nothing has been written since `mark_untouched`; in floating point, whether an element is left."""
    if tensor.is_meta or tensor.numel() == 0:
        return False
    flat = tensor.detach().reshape(-1)
    parts = [flat[start : start + _CHECK_NUMEL] for start in range(0, flat.numel(), _CHECK_NUMEL)]
    if tensor.is_floating_point():
        return any(bool((part.view(_INTEGERS[part.element_size()]) == -1).any()) for part in parts)
    return all(bool((part.view(torch.uint8) == _UNTOUCHED_INTEGER).all()) for part in parts)


@contextmanager
def scratch_parameters(source: StagingMemory, module: nn.Module, kept: Collection[str] = ()) -> Iterator[None]:
    """Let a module hold parameters whose values are thrown away afterwards, but for the attributes in `kept`."""
    real = {a: p for a, p in module._parameters.items() if p is not None and a not in kept}
    with ExitStack() as stack:
        for attribute, parameter in real.items():
            memory = torch.empty(0, dtype=parameter.dtype)
            if parameter.numel():
                taken = source.take(parameter.numel(), parameter.dtype, f"scratch for {attribute}")
                memory = stack.enter_context(taken).values
            module._parameters[attribute] = nn.Parameter(memory.view(parameter.shape), requires_grad=False)
        try:
            yield
        finally:
            module._parameters.update(real)


class GroupStaging:
    """Real memory for the parameters of one group while its modules initialise them."""

    def __init__(self, runtime: Runtime, source: StagingMemory, group: FlatGroup) -> None:
        self._runtime = runtime
        self.group = group
        self._staged = source.take(group.layout.numel, group.source_dtype, f"staging of {group.key}")
        self._flat = self._staged.values
        self.parameters: list[nn.Parameter] = []
        end = 0
        for slot, owners in zip(group.layout.slots, group.owners, strict=True):
            self._flat[end : slot.offset].zero_()
            view = self._flat[slot.offset : slot.stop]
            mark_untouched(view)
            parameter = nn.Parameter(view.view(slot.shape), requires_grad=group.trainable)
            self.parameters.append(parameter)
            for module, attribute in owners:
                module._parameters[attribute] = parameter
            end = slot.stop
        self._flat[end:].zero_()

    def places(self, *, first: bool) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        """Every parameter with the id of a module that holds it, and under which name; `first`: of one module each."""
        for parameter, owners in zip(self.parameters, self.group.owners, strict=True):
            for module, attribute in owners[:1] if first else owners:
                yield (id(module), attribute), parameter

    def close(self, values: FirstValues) -> None:
        """Read what files hold, check, convert, write, give the memory back.

        Raises:
            UnsupportedModelError: something was not initialised.
        """
        group, runtime = self.group, self._runtime
        copy = runtime.copies[group.index]
        with self._staged as staged:
            self._refuse_untouched(values)
            if values.match is not None:
                read_into(runtime, values.match, group, sources_of(group))
            if runtime.lockstep is not None:
                adopt(runtime, group)
                return
            group.put_stand_ins()
            if copy.pinned:
                lease = runtime.pool.lease(group.shard_nbytes, group.key)
                torch.frombuffer(lease.memory, dtype=group.shard_dtype, count=group.layout.numel).copy_(self._flat)
                place(runtime, group, lease)
            elif group.shard_dtype is group.source_dtype and staged.lease is not None:
                write(runtime, group, staged.lease.memory, 0, group.shard_payload_nbytes)
            else:
                write_in_pieces(runtime, group, piece_numel(runtime, group), self._convert)
            del self._flat

    def _refuse_untouched(self, values: FirstValues) -> None:
        for slot, parameter in zip(self.group.layout.slots, self.parameters, strict=True):
            if not values.has(slot.name) and is_untouched(parameter):
                how = "init_fn" if values.init_fn is not None else "what its module brings (see initialisers.py)"
                raise UnsupportedModelError(
                    f"parameter {slot.name!r} is left uninitialised by {how}. Pass weights=..., or init_fn=function "
                    "with a function that fills every parameter of the module that it is called with"
                )

    def _convert(self, start: int, into: torch.Tensor) -> int:
        span = FlatSpan(start, start + into.numel())
        into.copy_(self._flat[span.start : span.stop])
        return self.group.layout.payload_in(span)


def conversion_nbytes(groups: Sequence[FlatGroup], piece_nbytes: int) -> int:
    """Host bytes for converting a staged group piece by piece."""
    return max((pieces_nbytes(g, piece_nbytes) for g in groups if g.shard_dtype is not g.source_dtype), default=0)
