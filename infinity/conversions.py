"""`model.to(...)`, `.half()`, `.cuda()` and the like: nothing happens where nothing changes, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.errors import UnsupportedModelError
from infinity.released import FreedParameter, ReleasedParameter
from infinity.torch_compat import asked_conversion

_TENSOR = torch.Tensor
_DTYPES: dict[Callable[..., Any], torch.dtype] = {
    _TENSOR.half: torch.float16,
    _TENSOR.float: torch.float32,
    _TENSOR.double: torch.float64,
    _TENSOR.bfloat16: torch.bfloat16,
}
CONVERSIONS: frozenset[Callable[..., Any]] = frozenset({*_DTYPES, _TENSOR.to, _TENSOR.cuda, _TENSOR.cpu, _TENSOR.type})


def keep_or_refuse(
    func: Callable[..., Any], parameter: ReleasedParameter | FreedParameter, args: Sequence[Any], kwargs: dict[str, Any]
) -> ReleasedParameter | FreedParameter:
    """The parameter itself if it already is where and what one of `CONVERSIONS` would make it.

    Raises:
        UnsupportedModelError: it would change its device or its dtype.
    """
    device, dtype = _target(func, args[1:], kwargs)
    here = parameter.device
    is_there = device is None or (device.type == here.type and device.index in (None, here.index))
    if is_there and (dtype is None or dtype == parameter.dtype or not parameter.dtype.is_floating_point):
        return parameter
    wanted = " ".join(str(part) for part in (device, dtype) if part is not None)
    raise UnsupportedModelError(
        f"parameter {parameter.ref.name!r} is offloaded, computes on {here} in {parameter.dtype}, and cannot become "
        f"{wanted}. Choose device and precision in infinity.Config(device=..., precision=...); to read or edit "
        "values use `with infinity.gathered(module):`"
    )


def _target(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    if func in _DTYPES:
        return None, _DTYPES[func]
    if func is _TENSOR.cpu:
        return torch.device("cpu"), None
    if func is _TENSOR.cuda:
        wanted = kwargs.get("device", args[0] if args else None)
        return torch.device("cuda") if wanted is None else torch.device("cuda", torch.device(wanted).index), None
    if func is _TENSOR.type:
        converted = torch.empty(0).type(*args, **kwargs)
        return converted.device, converted.dtype
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype
    known = {name: value for name, value in kwargs.items() if name in ("device", "dtype", "non_blocking")}
    return asked_conversion(*args, **known)
