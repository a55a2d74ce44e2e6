"""What a module holds in place of a parameter: the real one while gathered, a refusing stand-in while released.

[Note: released parameters]
Reading a tensor whose storage was freed is a segmentation fault on CPU, and a `meta` tensor in its place computes
silent garbage. So a module never holds a freed parameter: it holds a `ReleasedParameter`, a wrapper subclass without
data that counts as an `nn.Parameter`, answers questions about metadata (shape, dtype, device, requires_grad) and
hands every other operation to the engine, which gathers on use inside a forward and refuses outside one.

Whoever kept the real parameter (a list of weights, a variable that outlived a `gathered()` block) meets the same
answers: while its memory is away the object's class is `FreedParameter`. The class of an object of ours costs 70 ns to
change, and nothing while the parameter is there.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.errors import NotGatheredError, UnsupportedModelError
from infinity.tensor_metadata import asks_for_metadata
from infinity.torch_compat import forbid_memory, in_backward

if TYPE_CHECKING:
    from infinity.groups import FlatGroup


class Access(Protocol):
    """What a released parameter asks of its engine when an operation touches it."""

    @property
    def is_closed(self) -> bool:
        """Whether its parameters are gone."""

    def owns_module(self, module: nn.Module) -> bool:
        """Whether the engine serves a module; see `infinity.territory`."""

    def use_released(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run `func` with the released arguments gathered, or raise NotGatheredError."""

    def gradient_of(self, ref: ParameterRef) -> torch.Tensor | None:
        """The gradient that waits for the optimizer step, or None."""

    def set_gradient(self, ref: ParameterRef, value: torch.Tensor | None) -> None:
        """Replace the gradient that waits for the optimizer step; None forgets it."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterRef:
    """Which slot of which group a parameter object stands for."""

    group: FlatGroup
    slot: int
    access: Access

    @property
    def name(self) -> str:
        """As the model names it."""
        return self.group.layout.slots[self.slot].name


class OffloadedParameter(nn.Parameter):
    """The real parameter: a leaf, one object for the whole run, a view of its group's flat buffer."""

    ref: ParameterRef

    @property
    def grad(self) -> torch.Tensor | None:
        """What autograd has just put here, or what waits for the optimizer step."""
        fresh = fresh_grad(self)
        return fresh if fresh is not None else self.ref.access.gradient_of(self.ref)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        # Inside a backward it is autograd's own gradient that hooks change; outside, the one that waits.
        set_fresh_grad(self, value if in_backward() else None)
        if value is None or not in_backward():
            self.ref.access.set_gradient(self.ref, value)

    @property
    def data(self) -> torch.Tensor:
        """The values without a graph; what is changed through them is noticed (see `infinity.data_edits`)."""
        data: torch.Tensor = _DATA_GET(self)
        self.ref.group.take_data(self.ref.slot)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    @property
    def requires_grad(self) -> bool:
        """Whether the coming backward gives it a gradient."""
        wanted: bool = _REQUIRES_GRAD_GET(self)
        return wanted

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        set_requires_grad(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in torch; see `set_requires_grad`."""
        set_requires_grad(self, requires_grad)
        return self

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """As in torch. It would see the whole gradient; here earlier parts have left, and it is refused then.

        Raises:
            UnsupportedModelError: in a backward, when gradients of an earlier one wait.
        """

        def whole(parameter: OffloadedParameter) -> None:
            if parameter.ref.access.gradient_of(parameter.ref) is not None:
                raise UnsupportedModelError(
                    f"the hook of {parameter.ref.name!r} (register_post_accumulate_grad_hook) would see a part of an "
                    "accumulated gradient only: what came before has left the device. Use one backward per step, one "
                    "use per forward, or read parameter.grad after the last backward"
                )
            hook(parameter)

        return super().register_post_accumulate_grad_hook(whole)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy(f"parameter {self.ref.name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(f"parameter {self.ref.name!r}")


def fresh_grad(parameter: OffloadedParameter) -> torch.Tensor | None:
    """The gradient that autograd has accumulated and the sink has not collected yet."""
    grad: torch.Tensor | None = _GRAD_GET(parameter)
    return grad


def set_fresh_grad(parameter: OffloadedParameter, value: torch.Tensor | None) -> None:
    """Set what autograd accumulates into."""
    _GRAD_SET(parameter, value)


def refuse_copy(what: str) -> NoReturn:
    """Raise for deepcopy and pickle, which would take a state that lies in the tiers for one that lies in the object.

    Raises:
        NotGatheredError: always.
    """
    raise NotGatheredError(
        f"{what} can neither be deep-copied nor pickled: its values and state are offloaded. To store it use "
        "engine.save(), for values in memory infinity.state_dicts.get_model_state_dict(engine) or clones taken inside "
        "`with infinity.gathered(module):`; for a second model build one and offload it with weights=CHECKPOINT; "
        "for an average of the weights (EMA), where AveragedModel takes a copy, see 'An average of the weights' in the "
        "user guide"
    )


_TENSOR = torch.Tensor
# What `__torch_function__` is told when a property of a tensor is read or set is the bound method of its descriptor.
_GRAD: Any = inspect.getattr_static(_TENSOR, "grad")
_REQUIRES_GRAD: Any = inspect.getattr_static(_TENSOR, "requires_grad")
_DATA: Any = inspect.getattr_static(_TENSOR, "data")
_DATA_GET, _DATA_SET = _DATA.__get__, _DATA.__set__
_GRAD_GET, _GRAD_SET = _GRAD.__get__, _GRAD.__set__
_REQUIRES_GRAD_GET, _REQUIRES_GRAD_SET = _REQUIRES_GRAD.__get__, _REQUIRES_GRAD.__set__
_REGISTER = (_TENSOR.register_hook, _TENSOR.register_post_accumulate_grad_hook)


class StandIn(torch.Tensor):
    """A tensor without data: it answers questions about metadata and hands every other operation to `touched`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    @abstractmethod
    def touched(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation that needs data was called on a stand-in."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if asks_for_metadata(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.touched(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise NotGatheredError(f"{func} reached {first_of(cls, args, kwargs or {})!r}, whose data is not here")


class ReleasedParameter(StandIn):
    """A parameter whose data is elsewhere: metadata only; everything else gathers on use or refuses."""

    ref: ParameterRef
    _is_param: bool

    @staticmethod
    def __new__(
        cls, ref: ParameterRef, shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool
    ) -> ReleasedParameter:
        self: ReleasedParameter = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        forbid_memory(self)
        self.ref = ref
        self._is_param = True
        return self

    @classmethod
    def touched(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func == _GRAD_GET:
            return args[0].ref.access.gradient_of(args[0].ref)
        if func == _GRAD_SET:
            return args[0].ref.access.set_gradient(args[0].ref, args[1])
        if func in _REGISTER:  # hooks belong to the real parameter, which is one object for the whole run
            parameter = args[0].ref.group.parameters[args[0].ref.slot]
            return getattr(parameter, func.__name__)(*args[1:], **kwargs)
        if func == _DATA_SET and isinstance(args[0], ReleasedParameter):
            return _set_data(args[0], args[1])
        if func == _REQUIRES_GRAD_SET or func is _TENSOR.requires_grad_:
            return _change_requires_grad(func, args, kwargs)
        use = data_of if func == _DATA_GET else func
        return first_of(cls, args, kwargs).ref.access.use_released(use, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({self.ref.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy(f"parameter {self.ref.name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(f"parameter {self.ref.name!r}")


def become(original: nn.Parameter, stand_in: ReleasedParameter) -> ReleasedParameter:
    """Turn a parameter object into its stand-in, and return that.

    Where torch cannot do so (something holds a weak reference to it, as RNN modules do, or a view of it) the stand-in
    is another object, and the original is emptied, so that a use of it fails instead of computing with old values.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(original, stand_in)  # type: ignore[no-untyped-call]
    except RuntimeError:
        original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        return stand_in
    return cast(ReleasedParameter, original)


class FreedParameter(OffloadedParameter):
    """The real parameter while its memory is away: metadata only; everything else gathers on use or refuses."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if asks_for_metadata(func, args, kwargs) or func in (_GRAD_GET, _GRAD_SET) or func in _REGISTER:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func == _REQUIRES_GRAD_SET or func is _TENSOR.requires_grad_:
            return _change_requires_grad(func, args, kwargs or {})
        return first_of(cls, args, kwargs or {}).ref.access.use_released(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FreedParameter({self.ref.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


def mark_freed(parameters: Iterable[OffloadedParameter]) -> None:
    """The memory of these parameters is about to go: from now on they refuse what needs it."""
    for parameter in parameters:
        parameter.__class__ = FreedParameter


def mark_present(parameters: Iterable[OffloadedParameter]) -> None:
    """The memory of these parameters is there and filled."""
    for parameter in parameters:
        parameter.__class__ = OffloadedParameter


def move_hooks(before: OffloadedParameter, after: OffloadedParameter) -> None:
    """The hooks of one real parameter belong to another one from now on; their handles remove them there."""
    with torch._C.DisableTorchFunctionSubclass():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(before, name, None):
                setattr(after, name, hooks)


def is_released(value: object) -> TypeGuard[ReleasedParameter | FreedParameter]:
    """Whether a value stands for a parameter whose data is elsewhere."""
    return isinstance(value, (ReleasedParameter, FreedParameter))


def real(value: Any) -> Any:
    """The real parameter for what stands for one; anything else as it is."""
    return value.ref.group.parameters[value.ref.slot] if is_released(value) else value


def _set_data(parameter: OffloadedParameter | ReleasedParameter, value: torch.Tensor) -> None:
    """Setting the data of a parameter to itself, as `model.to` does where nothing changes, does nothing.

    Data of another shape is what resizing an embedding sets: the modules hold a new parameter from then on, which
    `engine.adopt()` takes in. Anything else would have to be a copy, which users can make themselves.
    """
    if value is parameter:
        return
    if value.shape != parameter.shape:
        fresh = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
        for module, attribute in parameter.ref.group.owners[parameter.ref.slot]:
            module._parameters[attribute] = fresh
        return
    raise UnsupportedModelError(
        f"the data of offloaded parameter {parameter.ref.name!r} cannot be replaced (by .data = ..., or by a "
        "conversion such as model.to or model.half): it lies in a buffer of its unit. Choose device and precision "
        "in infinity.Config; change values in place: `with infinity.gathered(module), torch.no_grad(): "
        "parameter.copy_(...)`"
    )


def set_requires_grad(parameter: OffloadedParameter | ReleasedParameter, value: bool) -> None:
    """Freeze or unfreeze a parameter, as in torch: a frozen one gets no gradient, so no step changes it or its state.

    One that was frozen when the model was offloaded has no place for its state: it trains from `engine.adopt()` on.
    """
    ref = parameter.ref
    mark_requires_grad((ref.group.parameters[ref.slot], ref.group.stand_ins[ref.slot]), value)
    if value and not ref.group.trainable:
        ref.group.unfrozen.add(ref.slot)
    else:
        ref.group.unfrozen.discard(ref.slot)


def mark_requires_grad(parameters: Iterable[OffloadedParameter | ReleasedParameter], value: bool) -> None:
    """Set what objects that stand for a parameter say, and nothing else."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            _REQUIRES_GRAD_SET(parameter, value)


def _change_requires_grad(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    parameter = args[0]
    set_requires_grad(parameter, bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
    return parameter if func is _TENSOR.requires_grad_ else None


def data_of(parameter: OffloadedParameter) -> torch.Tensor:
    """`.data` of a parameter that is there."""
    return parameter.data


_Kind = TypeVar("_Kind", bound=torch.Tensor)


def first_of(kind: type[_Kind], args: Sequence[Any], kwargs: dict[str, Any]) -> _Kind:
    """The first stand-in of a kind among the arguments of an operation, looking into lists and dicts."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, kind):
            return leaf
    raise NotGatheredError(f"an operation touched a {kind.__name__} in a way that cannot be seen")


def ref_of(parameter: torch.Tensor) -> ParameterRef | None:
    """The slot a parameter stands for, or None when it is not an offloaded one."""
    if isinstance(parameter, (OffloadedParameter, ReleasedParameter)):
        return parameter.ref
    return None
