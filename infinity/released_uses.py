"""Operations that touch released parameters of one engine, done with the real ones in their place, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from infinity.errors import NotGatheredError
from infinity.groups import FlatGroup
from infinity.released import FreedParameter, ReleasedParameter, is_released, mark_freed, mark_present, real

_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class ReleasedUses:
    """Those of other engines stay what they are: an operation is handed on to theirs.

    Args:
        groups: of this engine.
        is_gathered: whether the memory of a group is there.
    """

    def __init__(self, groups: Iterable[FlatGroup], is_gathered: Callable[[FlatGroup], bool]) -> None:
        self._own = frozenset(groups)
        self._is_gathered = is_gathered

    def among(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[ReleasedParameter | FreedParameter]:
        """The released parameters of this engine among the arguments of an operation."""
        return [leaf for leaf in tree_leaves((args, kwargs)) if is_released(leaf) and leaf.ref.group in self._own]

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do it with what is gathered by now."""
        real_args, real_kwargs = tree_map(self._real, (tuple(args), kwargs))
        return func(*real_args, **real_kwargs)

    def differentiate(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The same for `torch.autograd.grad` and its like, with respect to parameters that need not be there."""
        asked = [real(leaf) for leaf in self.among(args, kwargs)]
        mark_present(asked)  # to torch they are leaves of the graph like any others
        try:
            return self.call(func, args, kwargs)
        finally:
            mark_freed(p for p in asked if not self._is_gathered(p.ref.group))

    def _real(self, value: Any) -> Any:
        return real(value) if is_released(value) and value.ref.group in self._own else value


def differentiates(func: Callable[..., Any]) -> bool:
    """Whether an operation asks for gradients: units are gathered as their backward comes."""
    return func in _DIFFERENTIATE


def refuse_outside(func: Callable[..., Any], name: str) -> NoReturn:
    """An operation outside of any forward needs the parameter of this name.

    Raises:
        NotGatheredError: always.
    """
    raise NotGatheredError(
        f"{getattr(func, '__name__', str(func))} on parameter {name!r}, whose data is not here: it is offloaded and "
        "gathered only while its module runs. Read or edit it inside `with infinity.gathered(module):`; for a state "
        "dict of all parameters use infinity.state_dicts.get_model_state_dict(engine), for a checkpoint engine.save()"
    )
