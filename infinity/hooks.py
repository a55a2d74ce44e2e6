"""Hooks: when a unit is gathered and released. The rules are those of MECHANICS section 1.

[Note: hooks and autograd]
Forward: gather before, release after (unless this forward is a recomputation inside a backward: the coming backward
needs the unit, and its end frees it). Backward: a multi-grad hook on the outputs gathers the unit before any of its
nodes run; when all of them have run (`runs` says how that is seen) the gradients are harvested and the unit is
released. The hooks only look at the graph and never change it, so every sum is made in the order of plain PyTorch.

Every hook may be skipped (early-stopped recomputation, exceptions), repeated, or come in an odd order; so all of them
are idempotent and none pushes or pops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from infinity.activations import Activations
from infinity.errors import UnsupportedModelError
from infinity.escapes import Escapes
from infinity.groups import Unit
from infinity.microbatches import MicroBatches, UnitSlices, sliced_units
from infinity.released import refuse_copy
from infinity.runs import Run
from infinity.territory import Territory
from infinity.torch_compat import CheckpointRun, graph_task, node_sequence_nr, transforms, unbatched, uncompiled


class UnitEvents(Protocol):
    """What the engine does at each point of a unit's life."""

    def pre_forward(self, unit: Unit) -> None: ...
    def post_forward(self, unit: Unit, output: Any) -> None: ...
    def before_backward(self, run: Run) -> Callable[[], None]: ...
    def behind_backward(self, run: Run) -> None: ...
    def enter_forward(self) -> None: ...
    def leave_forward(self, output: Any) -> Any: ...
    def join_backward(self) -> None: ...
    def end_backward(self) -> None: ...


class GraphTasks:
    """Calls `end_task` when a graph task ends, and `finish` when the last open one does.

    Reentrant checkpointing nests a graph task whose callback fires early, so one callback is queued per task id and
    the backward is over when no task is open. If a backward raises, no callback fires at all: `clear` is called then.
    """

    def __init__(self, end_task: Callable[[int], None], finish: Callable[[], None]) -> None:
        self._open: set[int] = set()
        self._end_task = end_task
        self._finish = finish

    def join(self) -> None:
        """Note the graph task that runs now."""
        task = graph_task()
        if task is None or task in self._open:
            return
        self._open.add(task)
        Variable._execution_engine.queue_callback(lambda: self._ended(task))

    def _ended(self, task: int) -> None:
        # Open until everything is done: if that fails, the backward has failed, and counts as open until `clear`.
        self._end_task(task)
        if self._open <= {task}:
            self._finish()
        self._open.discard(task)

    @property
    def any_open(self) -> bool:
        """Whether a backward has begun and not ended, well or by an error."""
        return bool(self._open)

    def clear(self) -> None:
        """Forget backwards that have failed."""
        self._open.clear()


class _Uncopied:
    """What hooks are methods of: a module without parameters of its own would not refuse to be copied or pickled.

    Its hooks come before the modules inside it, and the object of a method before its function.
    """

    def uncompiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that torch.compile keeps out of: it resizes storages, which cannot be traced.

        Args:
            method: of the class, to be called for this object.
        """
        return MethodType(uncompiled(method), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy("a module of an offloaded model")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("a module of an offloaded model")


class UnitHooks(_Uncopied):
    """The hooks of one unit, bound to its events."""

    def __init__(
        self, unit: Unit, events: UnitEvents, activations: Activations, slices: UnitSlices | None = None
    ) -> None:
        self._unit = unit
        self._events = events
        self._activations = activations
        self._slices = slices
        self._checkpoint: CheckpointRun | None = None  # of the forward under way
        self._started: Run | None = None  # the forward under way
        self._escapes = Escapes(unit.module)

    def install(self) -> list[RemovableHandle]:
        """Register the hooks; the handles remove them."""
        module = self._unit.module
        pre, post = self.uncompiled(UnitHooks._pre_forward), self.uncompiled(UnitHooks._post_forward)
        return [
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True),
            module.register_forward_hook(post, always_call=True),
            *self._escapes.install(),
        ]

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._started = None
        self._refuse_transformed()
        self._events.pre_forward(self._unit)
        if torch.is_grad_enabled():
            run = self._started = Run.start(self._unit)
            self._watch_inputs((args, kwargs), run)
            self._escapes.begin(run, self._events.before_backward(run))
        sliced = self._slices.begin(args, kwargs) if self._slices is not None else None
        self._checkpoint = self._activations.begin(module, args, kwargs)
        return sliced

    def _watch_inputs(self, inputs: Any, run: Run) -> None:
        # Nodes of another kind of device are executed by another thread, in an order of their own.
        kind = self._unit.device.type
        nodes = {tensor.grad_fn for tensor in tensors_in(inputs) if tensor.requires_grad and tensor.device.type == kind}
        for node in nodes:
            if node is not None:
                node.register_prehook(lambda _: self._events.behind_backward(run))

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        run, self._started = self._started or Run.of_unknown_start(self._unit), None
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            self._activations.end(checkpoint, is_complete=output is not None)
        joined = None
        try:
            joined = self._slices.end(output) if self._slices is not None else None
        finally:
            run.end()
            output = output if joined is None else joined
            self._escapes.end()
            self._events.post_forward(self._unit, output)
        if output is not None and torch.is_grad_enabled():
            self._refuse_hidden(output)
            watch_outputs(output, self._events.before_backward(run), since=run.first)
        return joined

    def _refuse_transformed(self) -> None:
        """Derivatives of torch.func keep wrapped copies of parameters, which outlive the memory of these."""
        if not {"Grad", "Jvp"}.isdisjoint(transforms()):
            raise UnsupportedModelError(
                f"module {self._unit.name!r} is called inside a derivative of torch.func (grad, vjp, jvp, jacrev, "
                "hessian), which keeps copies of parameters that the engine cannot follow. Use torch.autograd.grad, "
                "torch.autograd.functional or torch.autograd.forward_ad; torch.vmap works"
            )

    def _refuse_hidden(self, output: Any) -> None:
        """What cannot be seen cannot be watched, and its backward would run without the unit's parameters."""
        hiding = [leaf for leaf in tree_leaves(output) if hasattr(leaf, "__dict__") and not is_dataclass(leaf)]
        if hiding and not tensors_in(output):
            raise UnsupportedModelError(
                f"module {self._unit.name!r} returns a {type(hiding[0]).__name__}, in which no tensor can be seen. "
                "Return tensors, or tuples, lists, dicts or dataclasses of them, or register the type with "
                "torch.utils._pytree.register_pytree_node"
            )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers and dataclasses."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(unbatched(leaf))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, part.name) for part in fields(leaf)])
    return found


def watch_outputs(output: Any, then: Callable[[], None], *, since: int = 0) -> None:
    """Call `then` once per backward, before the first node behind any tensor of `output` runs.

    Args:
        since: nodes with smaller numbers were there before; what was merely passed through is not watched.
    """
    outputs = [t for t in tensors_in(output) if _is_made(t, since)]
    if not outputs:
        return
    register_multi_grad_hook(outputs, lambda _: then(), mode="any")
    for tensor in outputs:
        # An in-place operation on an output that is a view rewrites its history and drops the tensor's hook;
        # the node of its base stays.
        base = tensor._base
        if base is not None and base.grad_fn is not None and _is_made(base, since):
            base.grad_fn.register_prehook(lambda _: then())


def _is_made(tensor: torch.Tensor, since: int) -> bool:
    """Whether the node behind a tensor has at least this number; a leaf has none."""
    return tensor.grad_fn is not None and node_sequence_nr(tensor.grad_fn) >= since


def live_with_graph(output: Any, companion: object) -> bool:
    """Let `companion` live as long as the graph behind `output`. False when no tensor of a graph can be seen in it."""
    tensors = tensors_in(output)
    tensors += [t._base for t in tensors if t._base is not None]  # its node outlives in-place changes of the view
    nodes: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    for node in nodes:
        node.metadata[f"infinity.{id(companion)}"] = companion
    return bool(nodes)


class EntryHooks(_Uncopied):
    """The hooks of a module that may be called from outside: where an outermost forward begins and ends.

    That is the model, but also what lies between it and its units: `generate` calls an encoder by itself.
    """

    def __init__(self, module: nn.Module, events: UnitEvents) -> None:
        self._module = module
        self._events = events

    def install(self) -> list[RemovableHandle]:
        """Register the hooks; the handles remove them."""
        pre, post = self.uncompiled(EntryHooks._pre_forward), self.uncompiled(EntryHooks._post_forward)
        return [
            self._module.register_forward_pre_hook(pre, prepend=True),
            self._module.register_forward_hook(post, always_call=True),
        ]

    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        self._events.enter_forward()

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._events.leave_forward(output)


def _entries(territory: Territory, units: Sequence[Unit]) -> list[nn.Module]:
    """Every module that has a unit in it or is one."""
    inside = {id(unit.module) for unit in units}
    return [module for module in territory.modules() if any(id(part) in inside for part in module.modules())]


def _copy_into_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict outlives the block in which it was taken; its tensors must not lie in memory that goes."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and value is not parameter:
            state_dict[prefix + name] = value.clone()


def _watch_gradients(unit: Unit, events: UnitEvents) -> list[RemovableHandle]:
    """Parameters that are always there have no run that a backward begins with: it is noticed by what it gives them."""
    arrived = uncompiled(lambda parameter: events.join_backward())
    register = nn.Parameter.register_post_accumulate_grad_hook  # torch's own, not that of an offloaded parameter
    return [
        register(parameter, arrived)  # type: ignore[no-untyped-call]
        for group in unit.trainable()
        for parameter in group.parameters
    ]


def install(
    model: nn.Module,
    units: Sequence[Unit],
    events: UnitEvents,
    activations: Activations,
    *,
    micro_batches: int = 1,
) -> list[RemovableHandle]:
    """Install the hooks of every unit and of where forwards begin; the handles remove them.

    Args:
        activations: what the units save for their backward.
        micro_batches: into how many slices every unit cuts the batch.
    """
    handles = []
    territory = Territory(model)
    shared = MicroBatches(micro_batches)
    chosen = sliced_units(units) if micro_batches > 1 else set()
    slices = {unit.index: UnitSlices(unit, shared) for unit in units if unit.index in chosen}
    for unit in units:
        if unit.resident:
            handles += _watch_gradients(unit, events)
        else:
            handles += UnitHooks(unit, events, activations, slices.get(unit.index)).install()
    owners = {id(module): module for unit in units for module in unit.module.modules()}
    for module in owners.values():
        if module in territory and any(parameter is not None for parameter in module._parameters.values()):
            handles.append(
                module.register_state_dict_post_hook(_copy_into_state_dict)  # type: ignore[no-untyped-call]
            )
    # After the units': an outermost forward begins before its unit is gathered.
    for module in _entries(territory, units):
        handles += EntryHooks(module, events).install()
    if micro_batches > 1:
        handles += shared.install(model)
    for mine in slices.values():
        mine.hooked()
    return handles
