"""Units: which parameters are gathered together.

The outermost repeated blocks of a model (see `infinity.blocks`: children of one class in a `ModuleList`, `Sequential`
or `ModuleDict`; siblings of one class where these hold most of what would be one unit without them) are units; so is
every other module that owns at least `resident_threshold` bytes of parameters itself. What is left is
packed into one *resident* unit that stays on the device. A unit gathers its whole subtree, because modules such as
`nn.MultiheadAttention` read the parameters of children whose forward they never call. A module without a forward, such
as `nn.ParameterList`, is never a unit, because nothing would gather it: its parameters count as its parent's own.

A parameter that several modules share belongs to the first unit that holds it and is *borrowed* by the others: one
shard, several users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.blocks import is_called, outermost, repeated_blocks, sibling_blocks
from infinity.errors import UnsupportedModelError
from infinity.released import ref_of
from infinity.territory import Territory

# Names of what is no module's path; they cannot be attribute names.
RESIDENT_NAME = "(resident)"
ROOT_NAME = "(root)"

Owners = list[tuple[nn.Module, str]]
WrapPolicy = Callable[[nn.Module], Iterable[nn.Module]]


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a parameter that is offloaded already, when a changed model is partitioned anew."""

    parameter: nn.Parameter  # the one object that counts, of the two that may stand for it
    dtype: torch.dtype  # of the values it was made of
    trainable: bool


@dataclass(slots=True)
class Owned:
    """One parameter of the model and every (module, attribute) that holds it. The first name is its name."""

    name: str
    parameter: nn.Parameter
    owners: Owners = field(default_factory=list)
    kept: Kept | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameter, as the model has it."""
        return self.parameter.dtype if self.kept is None else self.kept.dtype

    @property
    def trainable(self) -> bool:
        """Whether it gets gradients."""
        return self.parameter.requires_grad if self.kept is None else self.kept.trainable

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter in the model's dtype."""
        return self.parameter.numel() * self.dtype.itemsize


@dataclass(slots=True)
class UnitSpec:
    """What one unit holds: `own` parameters live in its shards, `borrowed` ones in another unit's."""

    name: str
    module: nn.Module
    own: list[Owned]
    borrowed: list[Owned]
    resident: bool = False
    n_places: int = 1  # how often the module stands in the model: it is called in as many places


class Parameters:
    """Every parameter of a model once, in module order, with all its owners.

    Args:
        kept: what is offloaded already, by the id of every object that may stand for it.
        territory: the modules of the model that count; looked for if not given.
    """

    def __init__(
        self, model: nn.Module, kept: Mapping[int, Kept] | None = None, territory: Territory | None = None
    ) -> None:
        self._kept = kept or {}
        self._found: dict[int, Owned] = {}
        for prefix, module in (territory or Territory(model)).named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                known = self._kept.get(id(parameter))
                one = parameter if known is None else known.parameter
                name = f"{prefix}.{attribute}" if prefix else attribute
                entry = self._found.setdefault(id(one), Owned(name, one, kept=known))
                entry.owners.append((module, attribute))

    def __iter__(self) -> Iterator[Owned]:
        return iter(self._found.values())

    def of(self, parameter: nn.Parameter) -> Owned:
        """The entry of an object that some module holds."""
        known = self._kept.get(id(parameter))
        return self._found[id(parameter if known is None else known.parameter)]


def partition(
    model: nn.Module,
    *,
    resident_threshold_nbytes: int,
    unit_classes: Sequence[str | type[nn.Module]] = (),
    wrap_policy: tuple[str, WrapPolicy] | None = None,
    kept: Mapping[int, Kept] | None = None,
) -> list[UnitSpec]:
    """Partition the model's parameters into units, in module order; the resident unit, if any, comes last.

    Args:
        model: the module whose forward is the outermost one.
        resident_threshold_nbytes: a module outside the blocks that owns fewer bytes stays on the device.
        unit_classes: classes, or their names, whose outermost instances are the blocks; empty finds repeated blocks.
        wrap_policy: chooses the blocks instead, with the name by which errors call it.
        kept: parameters that are offloaded already, by the id of every object that may stand for one.

    Raises:
        UnsupportedModelError: `unit_classes` or `wrap_policy` matches nothing, or modules without a forward or of
            another model; or a parameter is a lazy, sparse, complex or subclassed tensor.
    """
    territory = Territory(model)
    territory.refuse_closed()
    parameters = Parameters(model, kept, territory)
    fresh = [entry for entry in parameters if entry.kept is None]
    _refuse_unsupported(model, fresh)
    _refuse_overlapping(territory, fresh)
    if wrap_policy is not None:
        blocks = outermost(_chosen_blocks(territory, model, *wrap_policy))
        _refuse_unusable(blocks, wrap_policy[0])
    elif unit_classes:
        wanted = ", ".join(c if isinstance(c, str) else c.__name__ for c in unit_classes)
        blocks = outermost(_match_blocks(territory, model, "", unit_classes))
        _refuse_unusable(blocks, f"unit_classes = {wanted}")
    else:
        blocks = _found_blocks(territory, model, parameters, resident_threshold_nbytes)
    chosen = _with_large_owners(territory, parameters, blocks, resident_threshold_nbytes)
    order = {id(m): position for position, m in enumerate(territory.modules())}
    chosen.sort(key=lambda pair: order[id(pair[1])])
    return _assign(territory, model, parameters, chosen)


def _refuse_shared(model: nn.Module, entry: Owned) -> None:
    """A parameter that a module of another engine holds too has its values and state there."""
    ref = ref_of(entry.parameter)
    if ref is not None and not ref.access.owns_module(model):
        raise UnsupportedModelError(
            f"parameter {entry.name!r} is {ref.name!r} of another model that has been offloaded, and one engine cannot "
            f"read what another one holds. Give this model a parameter of its own, or offload both models as one"
        )


def _refuse_unsupported(model: nn.Module, parameters: Sequence[Owned]) -> None:
    for entry in parameters:
        _refuse_shared(model, entry)
        refuse_lazy(entry.name, entry.parameter)
        if type(entry.parameter) is not nn.Parameter:
            raise UnsupportedModelError(
                f"parameter {entry.name!r} is a {type(entry.parameter).__name__}; only plain nn.Parameter can be "
                "offloaded. A model can be offloaded once; tensor subclasses have to be converted first"
            )
        if entry.parameter._backward_hooks or getattr(entry.parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedModelError(
                f"parameter {entry.name!r} has hooks, which would be lost: offloading replaces the parameter. Register "
                "them after infinity.offload, inside `with infinity.gathered(module):`"
            )
        if entry.parameter.grad is not None:
            raise UnsupportedModelError(
                f"parameter {entry.name!r} has a gradient already, which would be lost. Use it, or call "
                "model.zero_grad(), before infinity.offload"
            )
        if entry.parameter.is_sparse or entry.parameter.is_complex():
            raise UnsupportedModelError(
                f"parameter {entry.name!r} is sparse or complex; convert it to a dense real tensor first"
            )


def refuse_lazy(name: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedModelError for a tensor that has no shape yet."""
    if is_lazy(tensor):
        raise UnsupportedModelError(
            f"parameter {name!r} is lazy and has no shape yet; run one forward before offloading the model"
        )


def _refuse_overlapping(territory: Territory, parameters: Sequence[Owned]) -> None:
    """Tensors that share memory change together; offloaded, each would have values of its own."""
    named = [(entry.name, entry.parameter.detach(), True) for entry in parameters]
    named += [(name, buffer, False) for name, buffer in territory.named_buffers()]
    spans = [(*_memory_span(t), name, is_parameter) for name, t, is_parameter in named if _has_memory(t)]
    furthest = furthest_parameter = (0, "")  # where what came before ends
    for start, stop, name, is_parameter in sorted(spans):
        end, other = furthest if is_parameter else furthest_parameter
        if start < end:
            raise overlapping_error(name, other)
        furthest = max(furthest, (stop, name))
        if is_parameter:
            furthest_parameter = max(furthest_parameter, (stop, name))


def overlapping_error(name: str, other: str) -> UnsupportedModelError:
    """Two tensors of a model share memory."""
    return UnsupportedModelError(
        f"{name!r} shares memory with {other!r} but is another tensor, so that only plain PyTorch would change "
        f"both together. Tie parameters by using one object ({name} = {other}), or give it a copy of its own. "
        "Where model.load_state_dict(..., assign=True) untied them, give infinity.offload(..., weights=FILE) instead"
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is torch.Tensor and tensor.numel() > 0


def _memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _refuse_unusable(blocks: Sequence[tuple[str, nn.Module]], setting: str) -> None:
    if not blocks:
        raise UnsupportedModelError(f"{setting} matches no module of the model")
    for name, module in blocks:
        if not is_called(module):
            raise UnsupportedModelError(
                f"{setting} chooses {name or 'the model'!r}, a {type(module).__name__}, which has no forward, so that "
                "its parameters would never be gathered. Choose a module around it that is called"
            )


def _found_blocks(
    territory: Territory, model: nn.Module, parameters: Parameters, threshold_nbytes: int
) -> list[tuple[str, nn.Module]]:
    """Repeated blocks of containers; sibling blocks as well, where one unit would hold most of the model without them.

    They must hold most of that unit, and as many bytes as are worth leaving the device.
    """
    blocks = outermost(repeated_blocks(territory, model, ""))
    specs = _assign(territory, model, parameters, _with_large_owners(territory, parameters, blocks, threshold_nbytes))
    largest = max(({id(e.parameter): e.nbytes for e in spec.own} for spec in specs), key=_sum, default={})
    if 2 * _sum(largest) <= sum(entry.nbytes for entry in parameters):
        return blocks
    siblings = sibling_blocks(territory, blocks)
    held = {
        id(parameters.of(parameter).parameter)
        for _, block in siblings
        for module in block.modules()
        if module in territory
        for parameter in module._parameters.values()
        if parameter is not None
    }
    in_siblings_nbytes = sum(nbytes for key, nbytes in largest.items() if key in held)
    if in_siblings_nbytes < threshold_nbytes or 2 * in_siblings_nbytes <= _sum(largest):
        return blocks
    return blocks + siblings


def _sum(sizes: Mapping[int, int]) -> int:
    return sum(sizes.values())


def _with_large_owners(
    territory: Territory, parameters: Parameters, blocks: list[tuple[str, nn.Module]], threshold_nbytes: int
) -> list[tuple[str, nn.Module]]:
    inside = {id(m) for _, block in blocks for m in block.modules()}
    return blocks + list(_large_owners(territory, parameters, inside, threshold_nbytes))


def _match_blocks(
    territory: Territory, module: nn.Module, path: str, unit_classes: Sequence[str | type[nn.Module]]
) -> Iterator[tuple[str, nn.Module]]:
    if any(type(module).__name__ == c if isinstance(c, str) else isinstance(module, c) for c in unit_classes):
        yield path, module
        return
    for name, child in territory.named_children(module):
        yield from _match_blocks(territory, child, f"{path}.{name}" if path else name, unit_classes)


def _chosen_blocks(
    territory: Territory, model: nn.Module, setting: str, policy: WrapPolicy
) -> Iterator[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in territory.named_modules()}
    for module in policy(model):
        if id(module) not in names:
            raise UnsupportedModelError(
                f"{setting} chose {type(module).__name__}, which is no module of the model, or one that another "
                "engine has offloaded; it has to give some of model.modules() without the latter"
            )
        yield names[id(module)], module


def _large_owners(
    territory: Territory, parameters: Parameters, inside: set[int], threshold_nbytes: int
) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside the blocks that own many bytes themselves; each takes the rest of its subtree with it."""
    taken: set[int] = set()
    for name, module in territory.named_modules():
        if id(module) in inside or id(module) in taken:
            continue
        own = {id(p): p for p in _direct_parameters(territory, module)} if is_called(module) else {}
        if own and sum(parameters.of(p).nbytes for p in own.values()) >= threshold_nbytes:
            taken.update(id(m) for m in module.modules())
            yield name, module


def _direct_parameters(territory: Territory, module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of the module itself and of children that have no forward of their own."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    for _, child in territory.named_children(module):
        if not is_called(child):
            yield from _direct_parameters(territory, child)


def _assign(
    territory: Territory, model: nn.Module, parameters: Parameters, chosen: Sequence[tuple[str, nn.Module]]
) -> list[UnitSpec]:
    owned_by: dict[int, UnitSpec] = {}
    chosen_ids = {id(module) for _, module in chosen}
    places = Counter(id(module) for _, module in territory.named_modules(remove_duplicate=False))
    specs = []
    for name, module in chosen:
        spec = UnitSpec(name, module, [], [], n_places=places[id(module)])
        for entry in _own_subtree(territory, module, parameters, chosen_ids):
            if id(entry.parameter) in owned_by:
                spec.borrowed.append(entry)
            else:
                owned_by[id(entry.parameter)] = spec
                spec.own.append(entry)
        if spec.own or spec.borrowed:
            specs.append(spec)
    rest = [entry for entry in parameters if id(entry.parameter) not in owned_by]
    if rest:
        specs.append(UnitSpec(RESIDENT_NAME, model, rest, [], resident=True))
    return specs


def _own_subtree(territory: Territory, module: nn.Module, parameters: Parameters, chosen_ids: set[int]) -> list[Owned]:
    """Parameters of the subtree without nested units, each once, in module order."""
    seen: dict[int, Owned] = {}

    def walk(part: nn.Module) -> None:
        for parameter in part._parameters.values():
            if parameter is not None:
                entry = parameters.of(parameter)
                seen.setdefault(id(entry.parameter), entry)
        for _, child in territory.named_children(part):
            if id(child) not in chosen_ids:
                walk(child)

    walk(module)
    return list(seen.values())
