"""Which modules of a model one engine serves: all but those of other engines' models inside it.

A model may contain a module that another engine has offloaded, such as a teacher or an encoder. That engine gathers and
trains it, wherever it is called; to the one around it, it is a module without parameters or buffers of its own. Who
serves a module is told by the parameters: an offloaded one knows its engine, and that engine its modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.released import Access, ref_of


class Territory:
    """The modules under `model` that belong to it, as they were when last looked at.

    Others are engines that do not serve `model` itself; what is below one of their modules is theirs. The modules are
    held, so that their ids stay theirs.

    Args:
        model: of an engine, whether it has been offloaded yet or not; or a module of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[int, nn.Module] = {}
        self._borders: dict[int, tuple[str, nn.Module]] = {}
        self.look()

    def look(self) -> None:
        """Take in what has changed."""
        others, found, borders = _others(self._model), dict[int, nn.Module](), dict[int, tuple[str, nn.Module]]()
        waiting = [("", self._model)]
        while waiting:
            path, module = waiting.pop()
            if id(module) in found or id(module) in borders:
                continue
            if any(other.owns_module(module) for other in others):
                borders[id(module)] = path, module
                continue
            found[id(module)] = module
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        self._modules, self._borders = found, borders

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._modules

    @property
    def borders(self) -> Sequence[tuple[str, nn.Module]]:
        """The outermost modules of other engines, with their paths."""
        return tuple(self._borders.values())

    def named_modules(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """As that of torch."""
        return self._named("", self._model, set() if remove_duplicate else None)

    def _named(self, path: str, module: nn.Module, seen: set[int] | None) -> Iterator[tuple[str, nn.Module]]:
        if module not in self or (seen is not None and id(module) in seen):
            return
        if seen is not None:
            seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from self._named(f"{path}.{name}" if path else name, child, seen)

    def modules(self) -> Iterator[nn.Module]:
        """As that of torch."""
        return (module for _, module in self.named_modules())

    def named_children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The children of a module that belong here."""
        return ((name, child) for name, child in module.named_children() if child in self)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As that of torch: each buffer once."""
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{path}.{name}" if path else name, buffer

    def refuse_closed(self) -> None:
        """Refuse modules whose values are gone.

        Raises:
            UnsupportedModelError: the engine of a module inside is closed; it names the module.
        """
        for name, module in self.borders:
            if any(engine.is_closed and engine.owns_module(module) for engine in _engines(module)):
                raise UnsupportedModelError(
                    f"module {name!r} belongs to an engine that is closed, so its values are gone. Build it anew, or "
                    "offload this model while that engine is open"
                )


def _engines(model: nn.Module) -> list[Access]:
    """All engines that serve parameters in a model."""
    found: dict[int, Access] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            ref = None if parameter is None else ref_of(parameter)
            if ref is not None:
                found[id(ref.access)] = ref.access
    return list(found.values())


def _others(model: nn.Module) -> list[Access]:
    return [engine for engine in _engines(model) if not engine.owns_module(model)]
