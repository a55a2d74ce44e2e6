"""Models built under `infinity.empty_init()` get the values that their constructors gave them; see recording/.

A group has memory from the first recorded operation that its values need to the last; then it is converted, written and
forgotten. Buffers and plain attributes keep the memory that they get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup
from infinity.kept_tensors import Kept, change_kept
from infinity.materialise import FirstValues, GroupStaging
from infinity.placing import sources_of
from infinity.recording.origins import converted_from, is_anything_recorded, is_changed, origin_of
from infinity.recording.plan import ReplayPlan, plan_replay
from infinity.recording.replay import refuse_changed_constants, replay
from infinity.recording.tape import Block, Region, Tape, region_of
from infinity.recording.turns import in_turns, in_turns_drawn_twice
from infinity.runtime import Runtime
from infinity.staging import Staged, StagingMemory
from infinity.territory import Territory
from infinity.units import overlapping_error
from storage.align import PAGE_NBYTES, align_up

Counts = Callable[[int], bool]

_SAVING = 0.5  # random numbers are drawn twice where this part of the memory, or less, is enough then


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter of a group and the record of its values.

    Attributes:
        is_direct: the storage holds exactly what the slot does, so that it lies in the group's memory.
    """

    slot: int
    region: Region
    is_direct: bool


@dataclass(frozen=True, slots=True)
class _Present:
    """A parameter of a group that has memory, among others that have none.

    Attributes:
        block: where random numbers drawn in it are replaced by those in the right order.
    """

    slot: int
    values: torch.Tensor
    block: Block | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor without memory that a module holds beside its parameters, and the record of its values."""

    tensor: torch.Tensor
    region: Region


class RecordedValues:
    """The part of a model whose first values are recorded.

    Attributes:
        groups: those of which every parameter that needs a value has a record.
        targets: of each of them by its index, the parameters that need one.
        present: and those that have one.
        kept: what modules hold beside their parameters, by id; of buffers those that are defined.
        kept_blocks: their storages.
        shared_blocks: those that are parameters' too; they are copied, as offloading a built model does it.
        real: storages that have memory, in which random numbers were drawn out of order.
        plan: what is replayed.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[FlatGroup], values: FirstValues, *, is_first: bool = True
    ) -> None:
        self.values = values
        self.targets: dict[int, list[_Target]] = {}
        self.present: dict[int, list[_Present]] = {}
        self.groups: list[FlatGroup] = []
        wanted: dict[Tape, list[Region]] = {}
        if values.init_fn is None:
            for group in groups:
                found = _recorded(group, values)
                if found is not None:
                    self.groups.append(group)
                    self.targets[group.index] = [target for _, target in found]
                    self.present[group.index] = _present(group, values)
                    for tape, target in found:
                        wanted.setdefault(tape, []).append(target.region)
            wanted |= {tape: [] for tape in _tapes_of_real(model) if tape not in wanted}
        found_kept = _kept_by_modules(model, values)
        for _, tape, kept in found_kept:
            wanted.setdefault(tape, []).append(kept.region)
        draws = values.match is None and values.init_fn is None and is_first
        self.real: set[Block] = set()
        for tape, regions in wanted.items():
            real = [block for block in tape.real if draws and block.real is not None and block.real() is not None]
            self.real.update(real)
            regions += [Region(block, torch.uint8, (block.nbytes,), (1,), 0) for block in real]
        in_order = plan_replay(wanted, draws=draws)
        undefined = in_order.undefined
        self.kept = {
            id(kept.tensor): kept
            for is_buffer, _, kept in found_kept
            if not (is_buffer and kept.region.block in undefined)
        }
        parameters = {target.region.block for targets in self.targets.values() for target in targets}
        self.kept_blocks = {kept.region.block for kept in self.kept.values()} - parameters
        self.shared_blocks = {kept.region.block for kept in self.kept.values()} & parameters
        self.plan = self._cheapest(in_order)
        self._spans = self._group_spans(self.plan)

    def _cheapest(self, in_order: ReplayPlan) -> ReplayPlan:
        """The order that holds least, but random numbers are drawn twice only where that saves much.

        An order is tried only where the one before holds more than every order does: the largest group.
        """

        def peak_nbytes(plan: ReplayPlan) -> int:
            return self._peak_nbytes(plan, lambda nbytes: True)

        together = [self._blocks(group) for group in self.groups]
        least_nbytes = max((group.layout.numel * group.source_dtype.itemsize for group in self.groups), default=0)
        once, once_nbytes = in_order, peak_nbytes(in_order)
        if once_nbytes > least_nbytes:
            turns = in_turns(in_order, together)
            once, once_nbytes = min((once, once_nbytes), (turns, peak_nbytes(turns)), key=lambda pair: pair[1])
        if _SAVING * once_nbytes < least_nbytes:
            return once
        twice = in_turns_drawn_twice(in_order, together)
        return once if twice is None or peak_nbytes(twice) > _SAVING * once_nbytes else twice

    def _blocks(self, group: FlatGroup) -> dict[Block, None]:
        """Those of a group, in an order that is the same on every rank."""
        targets = [target.region.block for target in self.targets[group.index]]
        present = [present.block for present in self.present[group.index] if present.block is not None]
        return dict.fromkeys([*targets, *present])

    def _group_spans(self, plan: ReplayPlan) -> dict[int, tuple[int, int]]:
        """By the indices of groups, the numbers of their first and last steps."""
        end = max(0, len(plan.steps) - 1)
        found = {}
        for group in self.groups:
            spans = [plan.spans[block] for block in self._blocks(group) if block in plan.spans]
            first, last = min((first for first, _ in spans), default=end), max((last for _, last in spans), default=end)
            found[group.index] = first, last
        return found

    def refuse_unusable(self) -> None:
        """Refuse, before anything changes, parameters that share memory or that ordinary construction leaves undefined.

        Raises:
            UnsupportedModelError: it names the parameters; or a tensor that constructors copied has been changed since.
        """
        refuse_changed_constants(self.plan)
        found = [(g.layout.slots[t.slot].name, t.region) for g in self.groups for t in self.targets[g.index]]
        by_block: dict[Block, list[tuple[int, int, str]]] = {}
        for name, region in found:
            by_block.setdefault(region.block, []).append((region.start, region.stop, name))
        for spans in by_block.values():
            for (_, stop, other), (start, _, name) in pairwise(sorted(spans)):
                if start < stop:
                    raise overlapping_error(name, other)
        missing = [name for name, region in found if region.block in self.plan.undefined]
        if missing:
            shown = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UnsupportedModelError(
                f"{shown} is left uninitialised by the constructor: its memory was made by torch.empty or the like, "
                "and nothing filled all of it inside infinity.empty_init(). Fill it there, or pass "
                "infinity.offload(..., init_fn=function), which is called with every module that owns parameters, or "
                "weights=..."
            )

    def nbytes(self, counts: Counts) -> int:
        """Bytes that the replay holds at most, of pieces of memory that count."""
        return self._peak_nbytes(self.plan, counts)

    def _peak_nbytes(self, plan: ReplayPlan, counts: Counts) -> int:
        group_spans = self._group_spans(plan)
        direct = {t.region.block for targets in self.targets.values() for t in targets if t.is_direct}
        extents = [(group_spans[g.index], g.layout.numel * g.source_dtype.itemsize) for g in self.groups]
        for block, span in self._block_spans(plan, group_spans).items():
            if block not in direct and block not in self.kept_blocks:
                extents.append((span, _aligned(block.nbytes)))
        return plan.peak_nbytes(extents, counts, _aligned)

    def ending(self) -> dict[int, tuple[list[FlatGroup], list[Block]]]:
        """After which step which groups are complete, and which blocks' memory is not needed any more."""
        found: dict[int, tuple[list[FlatGroup], list[Block]]] = {}
        for group in self.groups:
            found.setdefault(self._spans[group.index][1], ([], []))[0].append(group)
        for block, (_, last) in self._block_spans(self.plan, self._spans).items():
            if block not in self.kept_blocks:
                found.setdefault(last, ([], []))[1].append(block)
        return found

    def _block_spans(
        self, plan: ReplayPlan, group_spans: Mapping[int, tuple[int, int]]
    ) -> dict[Block, tuple[int, int]]:
        """First and last step; a parameter is taken out of a storage that is not its own when its group is placed."""
        spans = dict(plan.spans)
        for group in self.groups:
            for block in {target.region.block for target in self.targets[group.index]} & spans.keys():
                first, last = spans[block]
                spans[block] = first, max(last, group_spans[group.index][1])
        return spans

    def fill(self, runtime: Runtime, on_done: Callable[[FlatGroup], None]) -> None:
        """Replay, and place every group when its values are complete."""
        if self.groups or self.kept or self.plan.steps:
            with torch.no_grad():
                _Filling(runtime, self, on_done).run()


class _Filling:
    """One replay: gives blocks memory, and places groups and other tensors when their last step is done."""

    def __init__(self, runtime: Runtime, recorded: RecordedValues, on_done: Callable[[FlatGroup], None]) -> None:
        self._runtime = runtime
        self._recorded = recorded
        self._on_done = on_done
        self._memory = StagingMemory(runtime)
        self._open: dict[int, GroupStaging] = {}
        self._taken: dict[Block, torch.Tensor] = {}
        self._leases: dict[Block, Staged] = {}
        self._copies: dict[Block, torch.Tensor] = {}
        self._direct = {
            target.region.block: (group, target.slot)
            for group in recorded.groups
            for target in recorded.targets[group.index]
            if target.is_direct
        }
        self._ending = recorded.ending()
        self._waiting = {group.index: group for group in recorded.groups}

    def run(self) -> None:
        """Replay all."""
        replay(self._recorded.plan, self._take, self._scratch, self._step_done)
        for group in list(self._waiting.values()):  # nothing of them is recorded, because files hold it
            self._place(group)
        if self._recorded.kept:
            self._keep()

    def _take(self, block: Block) -> torch.Tensor:
        if block in self._direct:
            group, slot = self._direct[block]
            self._taken[block] = self._staging_of(group).parameters[slot].detach().reshape(-1).view(torch.uint8)
        elif block in self._recorded.kept_blocks:
            self._taken[block] = torch.empty(block.nbytes, dtype=torch.uint8)
        elif not block.nbytes:
            self._taken[block] = torch.empty(0, dtype=torch.uint8)
        else:
            staged = self._memory.take(block.nbytes, torch.uint8, "a tensor that constructors compute with")
            self._leases[block] = staged
            self._taken[block] = staged.values
        return self._taken[block]

    @contextmanager
    def _scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        with self._memory.take(nbytes, torch.uint8, "random numbers that are not used") as staged:
            yield staged.values

    def _staging_of(self, group: FlatGroup) -> GroupStaging:
        if group.index not in self._open:
            group.take_over()
            self._open[group.index] = GroupStaging(self._runtime, self._memory, group)
        return self._open[group.index]

    def _step_done(self, number: int) -> None:
        groups, blocks = self._ending.get(number, ((), ()))
        for block in blocks:  # first, because groups are placed with these values
            self._deliver_real(block)
        for group in groups:
            self._place(group)
        for block in blocks:
            self._taken.pop(block)
            if block in self._leases:
                self._leases.pop(block).release()

    def _place(self, group: FlatGroup) -> None:
        staging = self._staging_of(group)
        for block in {target.region.block for target in self._recorded.targets[group.index]}:
            if block in self._recorded.shared_blocks and block in self._taken:
                self._copies.setdefault(block, self._taken[block].clone())
        for target in self._recorded.targets[group.index]:
            if not target.is_direct and target.region.block in self._taken:
                staging.parameters[target.slot].copy_(target.region.of(self._taken[target.region.block]))
        for present in self._recorded.present[group.index]:
            staging.parameters[present.slot].copy_(present.values)
        del self._open[group.index], self._waiting[group.index]
        staging.close(self._recorded.values)
        self._on_done(group)

    def _deliver_real(self, block: Block) -> None:
        storage = None if block.real is None else block.real()
        if storage is not None and block in self._recorded.real:
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(self._taken[block][: block.nbytes])

    def _keep(self) -> None:
        """Put buffers and other tensors into their places; what was one tensor stays one."""
        made: dict[int, torch.Tensor] = {}

        def with_memory(found: Kept) -> torch.Tensor:
            kept = self._recorded.kept.get(id(found.tensor))
            return found.tensor if kept is None else made.setdefault(id(found.tensor), self._made(kept))

        change_kept(self._runtime.model, with_memory)

    def _made(self, kept: _Kept) -> torch.Tensor:
        region = kept.region
        taken = self._copies if region.block in self._recorded.shared_blocks else self._taken
        memory = taken.get(region.block)
        if memory is None:  # nothing fills it
            memory = taken[region.block] = torch.empty(region.block.nbytes, dtype=torch.uint8)
        tensor = torch.empty(0, dtype=region.dtype)
        tensor.set_(memory.untyped_storage(), region.offset, region.shape, region.stride)
        if isinstance(kept.tensor, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=kept.tensor.requires_grad)
        return tensor


def _recorded(group: FlatGroup, values: FirstValues) -> list[tuple[Tape, _Target]] | None:
    """The records of a group's parameters that files do not hold; None where one of them has none."""
    found = []
    places = zip(group.layout.slots, sources_of(group), group.owners, strict=True)
    for number, (slot, source, owners) in enumerate(places):
        if values.has(slot.name) or not source.is_meta:
            continue
        origin = origin_of(source)
        before = next((dtype for owner in owners if (dtype := converted_from(*owner)) is not None), None)
        if before is not None:
            raise UnsupportedModelError(
                f"parameter {slot.name!r} was given other memory after infinity.empty_init(), while it had none "
                f"({before} before, {source.dtype} now), so that its recorded values are lost. Convert the model "
                "inside the block, as in `model = Model().to(torch.bfloat16)`"
            )
        if origin is None or origin.block.is_foreign:
            return None
        if origin.block.is_outdated:
            raise UnsupportedModelError(
                f"parameter {slot.name!r} was made under one infinity.empty_init() and changed under another, so that "
                "the order of both is not known. Build and change the model under one"
            )
        if is_changed(source, origin.block):
            raise UnsupportedModelError(
                f"parameter {slot.name!r} was changed after infinity.empty_init(), while it had no memory, so that the "
                "change is lost. Make it inside the block, or in `with infinity.gathered(module):` after offloading. "
                "Weights are given as infinity.offload(..., weights=FILE), in place of model.load_state_dict()"
            )
        region = region_of(source, origin.block)
        is_direct = source.is_contiguous() and region.start == 0 and region.stop == origin.block.nbytes
        found.append((origin.tape, _Target(number, region, is_direct)))
    return found


def _present(group: FlatGroup, values: FirstValues) -> list[_Present]:
    found = []
    for number, (slot, source) in enumerate(zip(group.layout.slots, sources_of(group), strict=True)):
        if not values.has(slot.name) and not source.is_meta:
            origin = origin_of(source)
            found.append(_Present(number, _alias(source), None if origin is None else origin.block))
    return found


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, but no view: a parameter of which there is a view could not become its stand-in."""
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _tapes_of_real(model: nn.Module) -> list[Tape]:
    """The records of what has memory and random numbers in it."""
    held = (t for m in Territory(model).modules() for t in (*m._parameters.values(), *m._buffers.values()))
    # Parameters that are offloaded already are of other types, and have no storage.
    real = [t for t in held if t is not None and type(t) in (nn.Parameter, torch.Tensor) and not t.is_meta]
    return list(dict.fromkeys(origin.tape for t in real if (origin := origin_of(t)) is not None))


def _kept_by_modules(model: nn.Module, values: FirstValues) -> list[tuple[bool, Tape, _Kept]]:
    """What modules hold beside their parameters and files do not hold: whether it is a buffer, and its record."""
    found: list[tuple[bool, Tape, _Kept]] = []

    def note(kept: Kept) -> torch.Tensor:
        origin = None if values.has(kept.path) else origin_of(kept.tensor)
        if origin is not None and not origin.block.is_foreign and not origin.block.is_outdated:
            found.append((kept.is_buffer, origin.tape, _Kept(kept.tensor, region_of(kept.tensor, origin.block))))
        return kept.tensor

    if is_anything_recorded():
        change_kept(model, note)
    return found


def _aligned(nbytes: int) -> int:
    return align_up(nbytes, PAGE_NBYTES)
