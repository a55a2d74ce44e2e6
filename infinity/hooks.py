"""Hooks: when a unit is gathered and released. The rules are those of MECHANICS section 1.

[Note: hooks and autograd]
Forward: gather before, release after (unless this forward is a recomputation inside a backward: the coming backward
needs the unit, and `post_backward` frees it). Backward: a multi-grad hook on the outputs gathers the unit before any
of its nodes run; an identity function around the inputs runs after all of them, harvests the gradients and releases.
What has no input that needs a gradient is harvested at the end of the last open graph task.

Every hook may be skipped (early-stopped recomputation, exceptions), repeated, or come in an odd order; so all of them
are idempotent and none pushes or pops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from infinity.errors import UnsupportedModelError
from infinity.groups import Unit

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class UnitEvents(Protocol):
    """What the engine does at each point of a unit's life."""

    def pre_forward(self, unit: Unit) -> None: ...
    def post_forward(self, unit: Unit) -> None: ...
    def before_backward(self, unit: Unit) -> Callable[[], None]: ...
    def post_backward(self, unit: Unit) -> None: ...
    def root_pre_forward(self) -> None: ...
    def root_post_forward(self, output: Any) -> None: ...
    def end_backward(self) -> None: ...


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class GraphTasks:
    """Calls `finish` once when the last open graph task ends.

    Reentrant checkpointing nests a graph task whose callback fires early, so one callback is queued per task id and
    the backward is over when no task is open. If a backward raises, no callback fires at all: `clear` is called then.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._open: set[int] = set()
        self._finish = finish

    def join(self) -> None:
        """Note the graph task that runs now."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._open:
            return
        self._open.add(task)
        Variable._execution_engine.queue_callback(lambda: self._ended(task))

    def _ended(self, task: int) -> None:
        self._open.discard(task)
        if not self._open:
            self._finish()

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def clear(self) -> None:
        self._open.clear()


class _PostBackward(torch.autograd.Function):
    """Identity around a unit's inputs; its backward runs when the whole unit's has."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.then = then
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.then()
        return (None, *grads)


def _uncompiled(hook: _Hook) -> _Hook:
    """Keep torch.compile out of a hook: it resizes storages, which cannot be traced."""
    disabled: _Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


class UnitHooks:
    """The hooks of one unit, bound to its events."""

    def __init__(self, unit: Unit, events: UnitEvents) -> None:
        self._unit = unit
        self._events = events

    def install(self) -> list[RemovableHandle]:
        module = self._unit.module
        pre = _uncompiled(self._pre_forward)
        post = _uncompiled(self._post_forward)
        return [
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True),
            module.register_forward_hook(post, always_call=True, with_kwargs=True),
        ]

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._events.pre_forward(self._unit)
        if not torch.is_grad_enabled():
            return args, kwargs
        flat, spec = tree_flatten((args, kwargs))
        # A tensor passed several times stays one tensor: modules compare their arguments by identity.
        distinct = {id(leaf): leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        if distinct:
            wrapped = _PostBackward.apply(self._post_backward, *distinct.values())  # type: ignore[no-untyped-call]
            stand_in = dict(zip(distinct, wrapped, strict=True))
            flat = [stand_in.get(id(leaf), leaf) for leaf in flat]
        new_args, new_kwargs = tree_unflatten(flat, spec)
        return new_args, new_kwargs

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._events.post_forward(self._unit)
        if output is not None and torch.is_grad_enabled():
            self._refuse_hidden(output)
            watch_outputs(output, self._events.before_backward(self._unit), inputs=(args, kwargs))

    def _refuse_hidden(self, output: Any) -> None:
        """What cannot be seen cannot be watched, and its backward would run without the unit's parameters."""
        hiding = [leaf for leaf in tree_leaves(output) if hasattr(leaf, "__dict__") and not is_dataclass(leaf)]
        if hiding and not tensors_in(output):
            raise UnsupportedModelError(
                f"module {self._unit.name!r} returns a {type(hiding[0]).__name__}, in which no tensor can be seen. "
                "Return tensors, or tuples, lists, dicts or dataclasses of them, or register the type with "
                "torch.utils._pytree.register_pytree_node"
            )

    def _post_backward(self) -> None:
        self._events.post_backward(self._unit)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        raise TypeError(f"module {self._unit.name!r} of an offloaded model cannot be copied; save and load it instead")

    def __reduce_ex__(self, protocol: Any) -> str:
        raise TypeError(f"module {self._unit.name!r} of an offloaded model cannot be pickled; save and load it instead")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers and dataclasses."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, part.name) for part in fields(leaf)])
    return found


def watch_outputs(output: Any, then: Callable[[], None], inputs: Any = ()) -> None:
    """Call `then` once per backward, before the first node behind any tensor of `output` runs.

    Args:
        inputs: what `output` was made of. What is merely passed through has its nodes before the unit, not in it.
    """
    # An input that needed no gradient and now has a node was changed in place: that node belongs to the unit.
    wrapped = [t for t in tensors_in(inputs) if isinstance(t.grad_fn, BackwardCFunction)]
    passed = {id(_owner(t)) for t in wrapped}
    outputs = [t for t in tensors_in(output) if t.requires_grad and id(_owner(t)) not in passed]
    if not outputs:
        return
    register_multi_grad_hook(outputs, lambda _: then(), mode="any")
    for tensor in outputs:
        # An in-place operation on an output that is a view rewrites its history and drops the tensor's hook;
        # the node of its base stays.
        base = tensor._base
        if base is not None and base.grad_fn is not None:
            base.grad_fn.register_prehook(lambda _: then())


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def live_with_graph(output: Any, companion: object) -> bool:
    """Let `companion` live as long as the graph behind `output`. False when no tensor of a graph can be seen in it."""
    tensors = tensors_in(output)
    tensors += [t._base for t in tensors if t._base is not None]  # its node outlives in-place changes of the view
    nodes: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    for node in nodes:
        node.metadata[f"infinity.{id(companion)}"] = companion
    return bool(nodes)


class RootHooks:
    """The hooks of the whole model: where an outermost forward begins and ends."""

    def __init__(self, model: nn.Module, events: UnitEvents) -> None:
        self._model = model
        self._events = events

    def install(self) -> list[RemovableHandle]:
        pre = _uncompiled(lambda module, args: self._events.root_pre_forward())
        post = _uncompiled(lambda module, args, output: self._events.root_post_forward(output))
        return [
            self._model.register_forward_pre_hook(pre, prepend=True),
            self._model.register_forward_hook(post, always_call=True),
        ]


def _copy_into_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict outlives the block in which it was taken; its tensors must not lie in memory that goes."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value is not parameter:
            state_dict[prefix + name] = value.clone()


def install(model: nn.Module, units: Sequence[Unit], events: UnitEvents) -> list[RemovableHandle]:
    """Install the hooks of every unit and of the root; the handles remove them."""
    handles = []
    for unit in units:
        if not unit.resident:
            handles += UnitHooks(unit, events).install()
    owners = {id(module): module for unit in units for module in unit.module.modules()}
    for module in owners.values():
        if any(parameter is not None for parameter in module._parameters.values()):
            handles.append(
                module.register_state_dict_post_hook(_copy_into_state_dict)  # type: ignore[no-untyped-call]
            )
    return handles + RootHooks(model, events).install()
