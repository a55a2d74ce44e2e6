"""Tensors without memory that a model holds beside its parameters: buffers, attributes, and what is inside attributes.

A constructor keeps tensors in lists, dictionaries and objects of its own, and whole modules in lists, to hide them from
`parameters()`. One that stayed on the `meta` device would not be noticed: a product with it has undefined values. What
functions hold (closures, default arguments, arguments of a `functools.partial`) is not looked into.

[Note: objects of the user's]
Anything may be in an attribute: a data set of millions of numbers, a proxy of something that is gone, an object that
answers every name. So objects are told by their type, and their attributes are read where Python keeps them: no code of
the user's runs (`__getattr__`, properties, `__class__`). Containers of nothing but numbers and texts are passed by at
the speed of C. What lies deeper than `_MOST_DEEP` containers is not looked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from infinity.territory import Territory

_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
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
        # By id, how deep what has been looked into was met. Modules of other engines belong to these.
        self._seen = {id(part): 0 for _, module in self._territory.borders for part in module.modules()}
        self._rebuilt: dict[int, Any] = {}  # by id of a tuple or frozen set, what stands in its place
        self._slots: dict[type, list[tuple[str, Any]]] = {}
        self._held: list[object] = []  # so that their ids stay theirs

    def run(self) -> None:
        modules = list(self._territory.named_modules())
        self._seen.update((id(module), 0) for _, module in modules)
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
        if _ATOMS.issuperset(map(type, dict.values(items))):
            return
        for name, value in list(dict.items(items)):
            if type(value) not in _ATOMS and name not in without:
                new = self._visit(_joined(prefix, name), value, depth, is_buffer=is_buffer)
                if new is not value:
                    dict.__setitem__(items, name, new)

    def _visit(self, path: str, value: Any, depth: int, *, is_buffer: bool = False) -> Any:
        """What is to be in the place of a value. See [Note: objects of the user's]."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            is_mine = value.is_meta and id(value) not in self._parameters
            return self._change(Kept(path, value, is_buffer)) if is_mine else value
        if depth == _MOST_DEEP or issubclass(kind, _NOT_ENTERED):
            return value
        if issubclass(kind, tuple | frozenset):
            return self._unchangeable(path, value, depth)
        if self._is_known(value, depth):
            return value
        if issubclass(kind, nn.Module):
            self._hidden(path, value)
        elif issubclass(kind, dict):
            self._items(value, path, depth + 1)
        elif issubclass(kind, list | deque):
            self._sequence(path, value, depth + 1)
        elif issubclass(kind, set):
            self._set(path, value, depth + 1)
        else:
            self._attributes(path, value, depth + 1)
        return value

    def _is_known(self, value: object, depth: int) -> bool:
        """Whether it has been looked into from here or from nearer; now it is."""
        before = self._seen.get(id(value))
        if before is None:
            self._held.append(value)
        if before is None or depth < before:
            self._seen[id(value)] = depth
            return False
        return True

    def _hidden(self, path: str, module: nn.Module) -> None:
        """A module that is in no other one's `_modules`, with all that are in its own."""
        for name, part in module.named_modules(prefix=path):
            if part is module or not self._is_known(part, 0):
                self._seen[id(part)] = 0
                self._module(name, part, is_hidden=True)

    def _sequence(self, path: str, value: MutableSequence[Any], depth: int) -> None:
        if _ATOMS.issuperset(map(type, value)):
            return
        for number, part in enumerate(list(value)):
            if type(part) not in _ATOMS:
                new = self._visit(_joined(path, number), part, depth)
                if new is not part:
                    value[number] = new

    def _set(self, path: str, value: set[Any], depth: int) -> None:
        parts = list(value)
        new = self._parts(path, parts, depth)
        if new is not None:
            value.difference_update(parts)
            value.update(new)

    def _unchangeable(self, path: str, value: Any, depth: int) -> Any:
        """A tuple or frozen set, or another one with what is to be in it."""
        if self._is_known(value, depth):
            return self._rebuilt.get(id(value), value)
        parts = self._parts(path, list(value), depth + 1)
        if parts is not None:
            made = type(value)(*parts) if hasattr(type(value), "_fields") else type(value)(parts)
            self._rebuilt[id(value)] = made
            return made
        return value

    def _parts(self, path: str, parts: list[Any], depth: int) -> list[Any] | None:
        """What is to be in the place of the parts of a container; None where nothing changes."""
        if _ATOMS.issuperset(map(type, parts)):
            return None
        new = [
            part if type(part) in _ATOMS else self._visit(_joined(path, number), part, depth)
            for number, part in enumerate(parts)
        ]
        return None if all(one is part for one, part in zip(new, parts, strict=True)) else new

    def _attributes(self, path: str, value: object, depth: int) -> None:
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if isinstance(attributes, dict):
            self._items(attributes, path, depth)
        for name, member in self._slots_of(type(value)):
            try:
                part = member.__get__(value)
            except AttributeError:  # it has not been set
                continue
            if type(part) not in _ATOMS:
                new = self._visit(_joined(path, name), part, depth)
                if new is not part:
                    member.__set__(value, new)

    def _slots_of(self, kind: type) -> Iterable[tuple[str, Any]]:
        """The attributes for which classes written in Python have slots."""
        if kind not in self._slots:
            spaces = [vars(one) for one in kind.__mro__ if "__slots__" in vars(one)]
            self._slots[kind] = [
                (name, member)
                for space in spaces
                for name, member in space.items()
                if type(member) is MemberDescriptorType
            ]
        return self._slots[kind]


def _joined(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)
