"""Which modules hold which parameters: to notice what was added or replaced after offloading.

A parameter that a model got later is an ordinary one: it would compute, and nothing would ever train it. One put in
the place of an offloaded parameter would be overwritten when its unit is gathered. So whenever a forward begins,
modules and parameters are compared with what was seen last; where nothing changed that compares identities only.

What was removed, moved or wrapped needs no attention: hooks stay on their modules, and a parameter that nothing uses
is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.groups import FlatGroup, replaced_error
from infinity.territory import Territory

_ADOPT = "Call engine.adopt() between two steps, or give new parameters to optimizer.add_param_group, which does so"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module with what it held: its children and the attributes that are parameters."""

    module: nn.Module
    children: tuple[nn.Module | None, ...]
    held: frozenset[int]  # ids of all objects that may stand at one of its parameters
    n_parameters: int

    @property
    def is_unchanged(self) -> bool:
        parameters = self.module._parameters
        return (
            len(parameters) == self.n_parameters
            and tuple(self.module._modules.values()) == self.children
            and self.held.issuperset(map(id, parameters.values()))
        )


class Structure:
    """The parameters of a model as the engine knows them. Used by the training thread.

    Args:
        territory: the modules whose hooks are installed.
        groups: all of its parameters, whose stand-ins are in place.
    """

    def __init__(self, territory: Territory, groups: Sequence[FlatGroup]) -> None:
        self._territory = territory
        self._places: dict[tuple[int, str], tuple[str, frozenset[int]]] = {}
        self._known: set[int] = set()
        self._frozen = [group for group in groups if not group.trainable]
        for group in groups:
            for slot, *objects, owners in zip(
                group.layout.slots, group.parameters, group.stand_ins, group.owners, strict=True
            ):
                ids = frozenset(map(id, objects))
                self._known |= ids
                self._places.update({(id(module), name): (slot.name, ids) for module, name in owners})
        self._seen: Sequence[_Seen] = ()
        self._look()

    def refuse_changed(self) -> None:
        """A forward begins.

        Raises:
            UnsupportedModelError: the model has parameters that are not offloaded.
        """
        if any(group.unfrozen for group in self._frozen):
            slots = [group.layout.slots[slot].name for group in self._frozen for slot in group.unfrozen]
            raise UnsupportedModelError(
                f"{_listed(slots)} was frozen when the model was offloaded and shall train now, but has no place for "
                f"its gradient and state. {_ADOPT}"
            )
        if all(seen.is_unchanged for seen in self._seen):
            return
        self._territory.look()
        added, replaced = self.changes()
        if replaced:
            raise replaced_error(*replaced[0])
        if added:
            raise UnsupportedModelError(
                f"the model has got parameters since it was offloaded, which no step would train: {_listed(added)}. "
                f"{_ADOPT}"
            )
        self._look()

    def changes(self) -> tuple[list[str], list[tuple[str, torch.Tensor]]]:
        """Names of parameters that are new, and of offloaded ones in whose place there is another tensor, with that."""
        added, replaced = [], []
        for path, parameter, place in self._held():
            name, ids = self._places.get(place, ("", frozenset()))
            if ids and id(parameter) not in ids:
                replaced.append((name, parameter))
            elif not ids and id(parameter) not in self._known:
                added.append(path)
        return added, replaced

    def _held(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, str]]]:
        for prefix, module in self._territory.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{prefix}.{name}" if prefix else name, parameter, (id(module), name)

    def _look(self) -> None:
        """Remember the modules as they are now."""
        self._seen = [
            _Seen(module, tuple(module._modules.values()), self._ids_of(module), len(module._parameters))
            for module in self._territory.modules()
        ]

    def _ids_of(self, module: nn.Module) -> frozenset[int]:
        ids = {id(None)}
        for name, parameter in module._parameters.items():
            _, known = self._places.get((id(module), name), ("", frozenset({id(parameter)})))
            ids |= known
        return frozenset(ids)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
