"""Tensors without memory that a model holds beside its parameters: buffers, attributes, and what is inside attributes.

A constructor keeps tensors in lists, dictionaries and objects of its own, and whole modules in lists, to hide them from
`parameters()`. One that stayed on the `meta` device would not be noticed: a product with it has undefined values. What
functions hold (closures, default arguments) is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from infinity.territory import Territory

_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Tensor, torch.Generator)
_MOST_DEEP = 16

Change = Callable[["Kept"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor without memory.

    Attributes:
        path: where it was found.
        is_buffer: registered as one, of a module of the model.
    """

    path: str
    tensor: torch.Tensor
    is_buffer: bool


def change_kept(model: nn.Module, change: Change) -> None:
    """Put what `change` returns in the place of each of them; the same tensor leaves it as it is."""
    _Walk(model, change).run()


class _Walk:
    def __init__(self, model: nn.Module, change: Change) -> None:
        self._territory = Territory(model)
        self._change = change
        self._parameters = {id(p) for m in self._territory.modules() for p in m._parameters.values()}
        # Modules of other engines belong to these.
        self._seen = {id(part) for _, module in self._territory.borders for part in module.modules()}
        self._held: list[object] = []  # so that their ids stay theirs

    def run(self) -> None:
        modules = list(self._territory.named_modules())
        self._seen.update(id(module) for _, module in modules)
        for prefix, module in modules:
            self._module(prefix, module, is_hidden=False)

    def _module(self, prefix: str, module: nn.Module, *, is_hidden: bool) -> None:
        if is_hidden:
            self._items(module._parameters, prefix, 0)
        self._items(module._buffers, prefix, 0, is_buffer=not is_hidden)
        self._items(vars(module), prefix, 0, without=_OWN)

    def _items(
        self,
        items: dict[Any, Any],
        prefix: str,
        depth: int,
        *,
        is_buffer: bool = False,
        without: frozenset[str] = frozenset(),
    ) -> None:
        for name, value in list(items.items()):
            if name not in without:
                path = f"{prefix}.{name}" if prefix else str(name)
                new = self._visit(path, value, depth, is_buffer=is_buffer)
                if new is not value:
                    items[name] = new

    def _visit(self, path: str, value: Any, depth: int, *, is_buffer: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            is_mine = value.is_meta and id(value) not in self._parameters
            return self._change(Kept(path, value, is_buffer)) if is_mine else value
        if isinstance(value, tuple) and depth < _MOST_DEEP:
            return self._tuple(path, value, depth)
        if value is None or isinstance(value, _NOT_ENTERED) or id(value) in self._seen or depth == _MOST_DEEP:
            return value
        if isinstance(value, nn.Module):
            for name, module in value.named_modules(prefix=path):
                if id(module) not in self._seen:
                    self._see(module)
                    self._module(name, module, is_hidden=True)
        elif isinstance(value, dict):
            self._see(value)
            self._items(value, path, depth + 1)
        elif isinstance(value, list):
            self._see(value)
            for number, part in enumerate(list(value)):
                new = self._visit(f"{path}.{number}", part, depth + 1)
                if new is not part:
                    value[number] = new
        elif hasattr(value, "__dict__"):
            self._see(value)
            self._items(vars(value), path, depth + 1)
        return value

    def _tuple(self, path: str, value: tuple[Any, ...], depth: int) -> tuple[Any, ...]:
        parts = [self._visit(f"{path}.{number}", part, depth + 1) for number, part in enumerate(value)]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

    def _see(self, value: object) -> None:
        self._seen.add(id(value))
        self._held.append(value)
