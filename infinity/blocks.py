"""Repeated blocks: which modules of a model are its units where nobody says so.

Children of one class in a `ModuleList`, `Sequential` or `ModuleDict` are blocks, the outermost ones. A model without
such containers may hold its blocks as attributes (`self.block0`, `add_module`); there it is guesswork which siblings
are blocks, so these count only where most of the model would stay on the device without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from infinity.territory import Territory

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MIN_REPEATS = 2

Named = tuple[str, nn.Module]


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward; a container such as `nn.ModuleList` has none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_composite(module: nn.Module) -> bool:
    """Whether the module has a forward and is made of modules with parameters, as a block is."""
    has_parameters = any(next(child.parameters(), None) is not None for child in module.children())
    return has_parameters and is_called(module) and not isinstance(module, _CONTAINERS)


def outermost(found: Iterable[Named]) -> list[Named]:
    """Each module once, under its first name, and none that lies in another one. A shared module has several names."""
    modules = {id(module): (name, module) for name, module in reversed(list(found))}
    inner = {id(part) for _, module in modules.values() for part in module.modules() if part is not module}
    return [entry for key, entry in reversed(modules.items()) if key not in inner]


def repeated_blocks(territory: Territory, module: nn.Module, prefix: str) -> Iterator[Named]:
    """Outermost children that occur at least twice, by class, in one container."""
    counts: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _CONTAINERS):
        counts.update(type(child) for _, child in territory.named_children(module) if _has_parameters(territory, child))
    for name, child in territory.named_children(module):
        path = f"{prefix}.{name}" if prefix else name
        if counts[type(child)] >= _MIN_REPEATS and not isinstance(child, _CONTAINERS) and is_called(child):
            yield path, child
        else:
            yield from repeated_blocks(territory, child, path)


def sibling_blocks(territory: Territory, blocks: Sequence[Named]) -> list[Named]:
    """Siblings of one class that are attributes of a module, and are made of modules with parameters themselves.

    The outermost ones, unless there are more siblings of a class in each of them: two towers of four blocks are eight
    blocks, and twelve blocks of two attentions are twelve.

    Args:
        blocks: those found in containers; what they are, lie in or hold is no sibling block.
    """
    held = {id(part) for _, block in blocks for part in block.modules()}
    around = {id(module) for _, module in territory.named_modules() if not held.isdisjoint(map(id, module.modules()))}
    groups = [
        group
        for path, parent in territory.named_modules()
        if not isinstance(parent, _CONTAINERS)
        for group in _siblings(territory, path, parent)
        if not any(id(module) in around for _, module in group)
    ]
    sizes = {id(module): len(group) for group in groups for _, module in group}
    kept = [group for group in groups if not any(_holds_more(module, sizes, len(group)) for _, module in group)]
    return outermost(entry for group in kept for entry in group)


def _siblings(territory: Territory, path: str, parent: nn.Module) -> list[list[Named]]:
    by_class: dict[type[nn.Module], list[Named]] = {}
    for name, child in territory.named_children(parent):
        if is_composite(child):
            by_class.setdefault(type(child), []).append((f"{path}.{name}" if path else name, child))
    return [group for group in by_class.values() if len(group) >= _MIN_REPEATS]


def _holds_more(module: nn.Module, sizes: dict[int, int], than: int) -> bool:
    return any(sizes.get(id(part), 0) > than for part in module.modules() if part is not module)


def _has_parameters(territory: Territory, module: nn.Module) -> bool:
    own = any(parameter is not None for parameter in module._parameters.values())
    return own or any(_has_parameters(territory, child) for _, child in territory.named_children(module))
