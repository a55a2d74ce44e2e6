"""Flat groups and units at run time: the tensors behind one shard, and which modules see them.

A `FlatGroup` holds the parameters of one unit that share dtype and trainability. Its `flat` tensor lives on the
compute device; its storage is resized to nothing while the group is released and refilled when it is gathered. The
parameters are views of `flat` and never change identity (see MECHANICS: the resize rule), so autograd's saved tensors
stay valid across release and gather.

[Note: pages of a gather]
The C library returns the memory of a large buffer to the kernel when it is freed, so that every gather on a CPU would
meet new pages. With pages of 4 KiB the faults of a gather take as long as its copy; huge ones are a five-hundredth as
many. Where torch can exchange the memory of storages, units borrow memory of the host pool instead (`flat_memory.py`).

Owned by the training thread. Other threads read only what never changes (`layout`, `key`, sizes, dtypes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.data_edits import TakenData
from infinity.errors import UnsupportedModelError
from infinity.layout import Chunk, FlatLayout, FlatSpan, Sharding
from infinity.released import (
    Access,
    OffloadedParameter,
    ParameterRef,
    ReleasedParameter,
    become,
    mark_freed,
    mark_present,
    mark_requires_grad,
    move_hooks,
    ref_of,
)
from infinity.torch_compat import swap_memory
from infinity.units import Owned, Owners, Parameters
from storage.huge_pages import advise_huge_pages

ALONE = Sharding()


def replaced_error(name: str, found: torch.Tensor | None) -> UnsupportedModelError:
    """What to say where a module does not hold an offloaded parameter any more, but `found`."""
    if found is None:
        what = f"offloaded parameter {name!r} has been removed from its module"
    else:
        what = (
            f"another tensor has been put in the place of offloaded parameter {name!r} (assignment, "
            "load_state_dict(assign=True), functional_call)"
        )
    return UnsupportedModelError(
        f"{what}, which the engine does not know. Call engine.adopt() between two steps to take the change in; to "
        "change values alone, do it in place: `with infinity.gathered(module), torch.no_grad(): parameter.copy_(...)`"
    )


class FlatGroup:
    """One flat buffer, one shard: parameters of one unit with the same dtype and trainability.

    Building one changes nothing in the model; `attach` makes the tensors, `put_stand_ins` puts the stand-ins in place.

    Args:
        index: position in the engine's list of groups.
        key: name of the shard in the store, for example `blocks.3/float32`.
        own: the parameters as the model holds them, with their owners.
        shard_dtype: dtype of the stored shard.
        compute_dtype: dtype of the flat buffer and of the parameters that modules see.
        sharding: how ranks share the flat buffer.
    """

    def __init__(
        self,
        index: int,
        key: str,
        own: Sequence[Owned],
        *,
        shard_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        sharding: Sharding = ALONE,
    ) -> None:
        self.index = index
        self.key = key
        self.sharding = sharding
        self.layout = FlatLayout.pack(((entry.name, entry.parameter.shape) for entry in own), sharding.size)
        self.param_span = sharding.param_span(self.layout.numel)
        self.grad_span = sharding.grad_span(self.layout.numel)
        self.state_span = sharding.state_span(self.layout.numel)
        self.owners: tuple[Owners, ...] = tuple(entry.owners for entry in own)
        self.trainable = own[0].trainable
        self.source_dtype = own[0].dtype
        self.shard_dtype = shard_dtype
        self.compute_dtype = compute_dtype
        self.shard_nbytes = self.param_span.numel * shard_dtype.itemsize
        self.shard_payload_nbytes = self.layout.payload_in(self.param_span) * shard_dtype.itemsize
        self.flat_nbytes = self.layout.numel * compute_dtype.itemsize
        self.units: set[int] = set()  # every unit that gathers this group: more than one when parameters are tied
        self.flat = torch.empty(0)
        self._borrowed: torch.UntypedStorage | None = None  # has the flat buffer's empty memory meanwhile
        self.parameters: tuple[OffloadedParameter, ...] = ()
        self.stand_ins: tuple[ReleasedParameter, ...] = ()
        self.unfrozen: set[int] = set()  # slots of a frozen group that shall train from the next adoption on
        self._taken = TakenData()

    @property
    def is_gathered_from_ranks(self) -> bool:
        """Whether other ranks hold parts of the parameters."""
        return self.param_span != self.layout.whole

    @property
    def is_stored_as_computed(self) -> bool:
        """Whether a CPU can compute with the shard as it is: it is all of the flat buffer, in the same dtype."""
        return self.sharding.size == 1 and self.shard_dtype is self.compute_dtype and self.flat_nbytes > 0

    def span_of(self, rank: int) -> FlatSpan:
        """The elements of the flat buffer that `rank` updates."""
        return self.sharding.span_of(rank, self.layout.numel)

    def shard_spans(self) -> list[FlatSpan]:
        """The spans of ranks that this rank's shard of the parameters consists of: its own one, or all."""
        every = [self.span_of(rank) for rank in range(self.sharding.size)]
        return [span for span in every if self.param_span.start <= span.start and span.stop <= self.param_span.stop]

    def in_shard(self, chunk: Chunk) -> slice:
        """Where the elements of a chunk lie in this rank's shard of the parameters."""
        return slice(chunk.start - self.param_span.start, chunk.stop - self.param_span.start)

    def in_grad(self, chunk: Chunk) -> slice:
        """Where the elements of a chunk lie in this rank's gradient."""
        return slice(chunk.start - self.grad_span.start, chunk.stop - self.grad_span.start)

    def attach(self, device: torch.device, access: Access) -> None:
        """Make the flat buffer, the parameters over it and their stand-ins. Nothing is gathered yet."""
        with torch.inference_mode(False), torch.no_grad():
            # Views can only be made of memory that is there; the pages are given back before anything touches them.
            self.flat = torch.empty(self.layout.numel, dtype=self.compute_dtype, device=device)
            self.parameters = tuple(self._make_parameter(number, access) for number in range(len(self.layout.slots)))
            mark_freed(self.parameters)
            self.flat.untyped_storage().resize_(0)
        self.stand_ins = tuple(
            ReleasedParameter(p.ref, slot.shape, self.compute_dtype, self.flat.device, self.trainable)
            for p, slot in zip(self.parameters, self.layout.slots, strict=True)
        )

    def _make_parameter(self, number: int, access: Access) -> OffloadedParameter:
        slot = self.layout.slots[number]
        view = self.flat[slot.offset : slot.stop].view(slot.shape)
        parameter = OffloadedParameter(view, requires_grad=self.trainable)
        parameter.ref = ParameterRef(self, number, access)
        return parameter

    def take_over(self) -> None:
        """Let the parameter objects that the modules hold become the stand-ins, once their values are not needed.

        Whoever else holds one of them (a list of weights, a closure, an optimizer) holds the stand-in from then on,
        which is gathered on use, and not an old tensor that nothing trains. What users set on a parameter stays on it.
        """
        for slot in range(len(self.owners)):
            self.take_over_slot(slot)

    def continue_from(self, before: FlatGroup) -> None:
        """Take over the tensors of a group of another engine run that has the same slots for the same parameters."""
        access = self.parameters[0].ref.access
        self.flat, self._taken, self._borrowed = before.flat, before._taken, before._borrowed
        self.parameters, self.stand_ins = before.parameters, before.stand_ins
        for slot, pair in enumerate(zip(self.parameters, self.stand_ins, strict=True)):
            for parameter in pair:
                parameter.ref = ParameterRef(self, slot, access)

    def keep(self, slot: int, before: ParameterRef) -> None:
        """The objects that stood for a parameter in another group stand for a slot of this one from now on."""
        ref = self.parameters[slot].ref
        real, stand_in = before.group.parameters[before.slot], before.group.stand_ins[before.slot]
        mine = self.parameters[slot]
        vars(mine).update({name: value for name, value in vars(real).items() if name not in vars(mine)})
        move_hooks(real, mine)
        for parameter in (real, stand_in):
            parameter.ref = ref
        mark_requires_grad((mine, stand_in), stand_in.requires_grad)
        self.stand_ins = (*self.stand_ins[:slot], stand_in, *self.stand_ins[slot + 1 :])

    def take_over_slot(self, slot: int) -> None:
        """The parameter object that the modules hold becomes the stand-in of a slot; see `take_over`."""
        module, attribute = self.owners[slot][0]
        original = module._parameters[attribute]
        if original is None:
            return
        settings = dict(vars(original))
        stand_in = become(original, self.stand_ins[slot])
        self.stand_ins = (*self.stand_ins[:slot], stand_in, *self.stand_ins[slot + 1 :])
        for parameter in (stand_in, self.parameters[slot]):
            vars(parameter).update({k: v for k, v in settings.items() if k not in vars(parameter)})

    def put_stand_ins(self) -> None:
        """Let the modules hold the refusing stand-ins, whatever they have held before."""
        mark_freed(self.parameters)
        for stand_in, owners in zip(self.stand_ins, self.owners, strict=True):
            for module, attribute in owners:
                module._parameters[attribute] = stand_in  # type: ignore[assignment]

    def show_released(self) -> None:
        """Let the modules hold the refusing stand-ins; whoever kept a parameter finds it refusing too."""
        mark_freed(self.parameters)
        self._show(self.stand_ins)

    def show_gathered(self) -> None:
        """Let the modules hold the real parameters."""
        mark_present(self.parameters)
        self._show(self.parameters)

    def _show(self, parameters: Sequence[torch.Tensor]) -> None:
        """What somebody put in the place of a parameter stays there, until it is refused or adopted."""
        for parameter, known, owners in zip(parameters, self._known(), self.owners, strict=True):
            for module, attribute in owners:
                if id(module._parameters.get(attribute)) in known:
                    module._parameters[attribute] = parameter  # type: ignore[assignment]

    def _known(self) -> Iterator[tuple[int, int]]:
        """By slot, the ids of the objects that stand for it."""
        return ((id(real), id(stand_in)) for real, stand_in in zip(self.parameters, self.stand_ins, strict=True))

    def refuse_replaced(self) -> None:
        """Check that the modules still hold what stands for the parameters.

        Raises:
            UnsupportedModelError: somebody put another tensor in a parameter's place, or removed it.
        """
        for slot, known, owners in zip(self.layout.slots, self._known(), self.owners, strict=True):
            for module, attribute in owners:
                found = module._parameters.get(attribute)
                if id(found) not in known:
                    raise replaced_error(slot.name, found)

    def take_data(self, slot: int) -> None:
        """`.data` of a parameter is handed out, through which it can be edited unseen."""
        self._taken.take(slot, self._values(slot))

    @property
    def is_data_changed(self) -> bool:
        """Whether a parameter was edited through its `.data` since it was filled, or since `accept_data`."""
        return self._taken.is_changed({slot: self._values(slot) for slot in self._taken.slots})

    def accept_data(self) -> None:
        """The present values count as unchanged from now on."""
        self._taken.accept({slot: self._values(slot) for slot in self._taken.slots})

    def _values(self, slot: int) -> torch.Tensor:
        place = self.layout.slots[slot]
        return self.flat.detach()[place.offset : place.stop]

    def allocate_flat(self) -> None:
        """Give the flat buffer memory; its content is undefined until it is filled."""
        storage = self.flat.untyped_storage()
        with torch.inference_mode(False):
            storage.resize_(self.flat_nbytes)
        if self.flat.device.type == "cpu":  # see [Note: pages of a gather]
            advise_huge_pages(storage.data_ptr(), self.flat_nbytes)

    def borrow_flat(self, memory: memoryview) -> None:
        """Let the flat buffer show `flat_nbytes` bytes of memory of somebody else's, until `free_flat`."""
        with torch.inference_mode(False):
            self._borrowed = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        swap_memory(self.flat.untyped_storage(), self._borrowed)

    def free_flat(self) -> None:
        """Give the memory of the flat buffer back. Nobody may read the parameters until the next fill.

        Raises:
            UnsupportedModelError: somebody made a numpy array of a parameter, which nails its memory down for good.
        """
        if not self.is_resizable:
            raise UnsupportedModelError(
                f"a parameter of {self.key} was turned into a numpy array or shared, so its memory cannot be given "
                "back. Copy it first: parameter.detach().clone().numpy(). Close this engine and start again"
            )
        storage = self.flat.untyped_storage()
        if self._borrowed is None:
            storage.resize_(0)
        elif storage.nbytes():  # else a Ctrl-C came between an exchange and what notes it
            swap_memory(storage, self._borrowed)
        self._borrowed = None
        self._taken.clear()

    @property
    def is_resizable(self) -> bool:
        """Whether the memory of the flat buffer can be given back: not once somebody made a numpy array of it.

        Borrowed memory can, once nobody holds a tensor over it, which an array does.
        """
        return self._borrowed is not None or self.flat.untyped_storage().resizable()

    def __repr__(self) -> str:
        return f"FlatGroup({self.key}, {self.layout.payload_numel} parameters, {self.shard_dtype})"


@dataclass(slots=True, eq=False)
class Unit:
    """Modules gathered together, at run time.

    Attributes:
        groups: gathered with it; some may be borrowed (tied weights).
        n_places: how often the module stands in the model: it is called in as many places.
    """

    index: int
    name: str
    module: nn.Module
    groups: tuple[FlatGroup, ...]
    resident: bool
    n_places: int = 1

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.groups[0].flat.device

    def trainable(self) -> Iterator[FlatGroup]:
        """Its groups that get gradients."""
        return (group for group in self.groups if group.trainable)

    def __deepcopy__(self, memo: dict[int, object]) -> Unit:
        # Bound hooks drag the freed tensors into a copy of the module, where reading them is a crash.
        raise TypeError(f"unit {self.name!r} of an offloaded model cannot be copied; save and load it instead")

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError(f"unit {self.name!r} of an offloaded model cannot be pickled; save and load it instead")


def enclosing(units: Sequence[Unit]) -> list[list[Unit]]:
    """For every unit those of them that it lies in, itself included: they run, and are gathered, while it does.

    Every module is looked at once for each unit around it: plans of a thousand units are made while somebody waits.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, unit in enumerate(units):
        places[id(unit.module)].append(place)
    around: list[list[Unit]] = [[] for _ in units]
    for other in units:
        for module in other.module.modules():
            for place in places.get(id(module), ()):
                around[place].append(other)
    return around


def count_uses(units: Sequence[Unit]) -> dict[int, int]:
    """How often one pass through the model gathers each group, by index: once for every unit that has it.

    A unit that lies in another one with the same group finds it gathered.
    """
    uses: Counter[int] = Counter()
    for unit, around in zip(units, enclosing(units), strict=True):
        outer = [other for other in around if other is not unit and not other.resident]
        held = {group.index for other in outer for group in other.groups}
        uses.update(group.index for group in unit.groups if group.index not in held)
    return dict(uses)


def backward_order(units: Sequence[Unit]) -> list[Unit]:
    """Units (given in module order) as their backward begins: in reverse, but one that encloses others before them."""
    ordered: list[Unit] = []
    for unit, around in zip(units, enclosing(units), strict=True):
        # Whoever comes later goes to the front, behind the innermost unit around it.
        outer = [other for other in around if other is not unit and other in ordered]
        place = max((ordered.index(other) + 1 for other in outer), default=0)
        ordered.insert(place, unit)
    return ordered


def in_model_order(model: nn.Module, slots: Iterable[tuple[FlatGroup, int]]) -> list[tuple[FlatGroup, int]]:
    """Slots of offloaded parameters in the order of `model.parameters()`; those the model has no more come last."""
    refs = [ref_of(entry.parameter) for entry in Parameters(model)]
    places = {(ref.group.index, ref.slot): place for place, ref in enumerate(refs) if ref is not None}
    return sorted(slots, key=lambda pair: places.get((pair[0].index, pair[1]), len(places)))
