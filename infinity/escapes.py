"""Tensors that leave a unit by other ways than its output, from which a backward may enter it.

A loss of a router that a module keeps as an attribute, or features that a forward hook of the user takes from a layer
inside, are parts of the graph. A backward that begins there meets nodes of the unit before any node behind its output,
and they would read parameters that are not there. So before the node behind such a tensor is executed, the backward of
the run begins.

Seen are outputs of all modules inside that have parameters, and tensors in attributes of modules, also in short lists,
tuples and dictionaries. What code hides elsewhere (a list of its own, filled in the middle of a forward) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.runs import Run
from infinity.territory import Territory
from infinity.torch_compat import node_sequence_nr, unbatched

_LONGEST = 64
_STANDARD = frozenset(vars(nn.Module()))


class Escapes:
    """Watches one unit. Used by the training thread, and in backward by autograd's."""

    def __init__(self, module: nn.Module) -> None:
        territory = Territory(module)
        self._borders = [inner for _, inner in territory.borders]
        self._spaces = [vars(part) for part in territory.modules()]
        self._watched = [
            part
            for part in territory.modules()
            if part is not module and any(p is not None for p in part._parameters.values())
        ]
        self._run: Run | None = None
        self._begin: Callable[[], None] | None = None

    def install(self) -> list[RemovableHandle]:
        """Register the hooks; the handles remove them."""
        passed = [inner.register_forward_pre_hook(self._passed_on, with_kwargs=True) for inner in self._borders]
        return [*passed, *(part.register_forward_hook(self._left_part) for part in self._watched)]

    def begin(self, run: Run, begin: Callable[[], None]) -> None:
        """A forward of the unit starts in grad mode; `begin` is called when its backward does."""
        self._run, self._begin = run, begin

    def end(self) -> None:
        """The forward is over: look for what it has kept."""
        if self._run is not None and torch.is_grad_enabled():
            for tensor in self._kept():
                self._watch(tensor)
        self._run = self._begin = None

    def _left_part(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._run is None:  # compiled code keeps nothing for itself
            return
        for tensor in _tensors_in(output):
            self._watch(tensor)

    def _passed_on(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What a module of another engine gets: a backward from anywhere inside it comes by here."""
        if not torch.compiler.is_compiling():
            for tensor in _tensors_in((args, kwargs)):
                self._watch(tensor)

    def _watch(self, tensor: torch.Tensor) -> None:
        node, run, begin = tensor.grad_fn, self._run, self._begin
        if node is None or run is None or begin is None or node_sequence_nr(node) < run.first:
            return

        def enter(_: Any) -> None:
            if not run.is_open:
                begin()

        node.register_prehook(enter)

    def _kept(self) -> Iterator[torch.Tensor]:
        for space in self._spaces:
            for name in space.keys() - _STANDARD:
                yield from _tensors_in(space[name])


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """A tensor, or those of a short container, which may contain others, and itself.

    Told by the type: `isinstance` would ask the object that a proxy stands for, which may be gone.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield unbatched(value)
    elif issubclass(kind, list | tuple | dict) and len(value) <= _LONGEST:
        seen = set() if seen is None else seen
        if id(value) not in seen:
            seen.add(id(value))
            for part in value.values() if issubclass(kind, dict) else value:
                yield from _tensors_in(part, seen)
