"""Operations that only fill a new tensor, as the ones that fill memory which is there, as ATen does it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten

# These write all of their first argument and read none of it; the first of them take nothing but numbers besides.
_FILLING = frozenset({_aten.normal_.default, _aten.uniform_.default, _aten.fill_.Scalar, _aten.zero_.default})
_OVERWRITING = frozenset(
    {
        *(_aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_),
        *(_aten.geometric_, _aten.bernoulli_, _aten.fill_, _aten.zero_, _aten.copy_),
    }
)
_EMPTY = frozenset({_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
_ZEROS = frozenset({_aten.zeros, _aten.zeros_like, _aten.new_zeros})
_ONES = frozenset({_aten.ones, _aten.ones_like, _aten.new_ones})
_FULL = frozenset({_aten.full, _aten.full_like, _aten.new_full})
_COPIES = frozenset({_aten.clone, _aten._to_copy})
_NORMAL = frozenset({_aten.randn, _aten.randn_like})
_UNIFORM = frozenset({_aten.rand, _aten.rand_like})


class Fill(NamedTuple):
    """An operation on memory, to be called with it as the first argument.

    Attributes:
        reads: whether its other arguments may be tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  # never changed
    reads: bool = False


def overwrites(func: Any) -> bool:
    """Whether an operation reads nothing of what it changes."""
    return func.overloadpacket in _OVERWRITING or any(argument.is_out for argument in func._schema.arguments)


def fills(func: Any) -> bool:
    """Whether an operation fills a tensor with one number, or with random ones."""
    return func in _FILLING


def is_empty(func: Any) -> bool:
    """Whether an operation makes a tensor of undefined values."""
    return func.overloadpacket in _EMPTY


def changes_secretly(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation changes although its schema does not say so: statistics of a batch norm."""
    if func is not _aten.native_batch_norm.default or not args[5]:
        return []
    return [tensor for tensor in args[3:5] if tensor is not None]


def new_results(func: Any, result: Any) -> list[torch.Tensor]:
    """The tensors that an operation makes besides changing others."""
    results = result if isinstance(result, tuple) else (result,)
    returned = zip(func._schema.returns, results, strict=False)
    return [tensor for kind, tensor in returned if kind.alias_info is None and isinstance(tensor, torch.Tensor)]


def fill_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fill | None:
    """How a tensor that `func` has made is filled; None where it does more than that."""
    packet = func.overloadpacket
    given = {name: value for name, value in kwargs.items() if name == "generator"}
    if packet in _ZEROS:
        return Fill(_aten.zero_.default)
    if packet in _ONES:
        return Fill(_aten.fill_.Scalar, (1,))
    if packet in _FULL:
        return Fill(_aten.fill_.Scalar, (kwargs["fill_value"] if "fill_value" in kwargs else args[-1],))
    if packet in _COPIES:
        return Fill(_aten.copy_.default, args[:1], reads=True)
    if packet in _NORMAL:
        return Fill(_aten.normal_.default, (0.0, 1.0), given)
    if packet in _UNIFORM:
        return Fill(_aten.uniform_.default, (0.0, 1.0), given)
    if packet is _aten.randint:
        bounds = args[:2] if func in (_aten.randint.low, _aten.randint.low_generator) else (0, args[0])
        return Fill(getattr(_aten.random_, "from"), bounds, given)
    return None
